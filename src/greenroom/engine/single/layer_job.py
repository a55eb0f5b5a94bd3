"""LayerJob: a layer of one token, from its input to its experts' input, as one job of the CPU engine."""

import torch
from torch import nn

from greenroom.engine.single.layer_parts import LayerParts, Norm, weight_of
from greenroom.experts.attention import can_attend, native_attention
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.linear import native_linear
from greenroom.experts.sequence import NativePart, StepSequence, add_row, choose_row, norm_row, store_row, turn_row
from greenroom.kernels.cpu.library import NativeLinear, NativeRow

_TURN, _ATTEND, _ADD = 2, 3, 5
"""Numbers of the steps that change from token to token, beside the first."""


class LayerJob:
    """Holds what the steps read and write. All tensors are BF16 unless said otherwise.

    Attributes:
        residual: [1, 1, H], the layer's input and its attention's output.
        normal: [1, 1, H], the same behind the norm in front of ``mlp``.
        ids, weights: int32, float32 [1, K], the router's choices; empty without one.
    """

    @classmethod
    def make(cls, parts: LayerParts, engine: CpuExperts, keys: torch.Tensor, values: torch.Tensor) -> "LayerJob | None":
        """None for a layer whose heads the engine does not attend with.

        Args:
            keys, values: [1, Hk, S, D], as the cache holds them.
        """
        width, head = parts.query.out_features, parts.head
        if width % head or parts.key.out_features != keys.shape[1] * head or keys.shape[3] != head:
            return None
        if parts.value.out_features != values.shape[1] * values.shape[3] or values.shape[1] != keys.shape[1]:
            return None
        query = torch.empty(width // head, head, dtype=torch.bfloat16)
        if not can_attend(query, keys[0], values[0]) or parts.output.in_features != len(query) * values.shape[3]:
            return None
        return cls(parts, engine, keys, values)

    def __init__(self, parts: LayerParts, engine: CpuExperts, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._engine = engine
        self._parts = parts
        self._input, self.residual, self.normal = (_row(parts.query.in_features) for _ in range(3))
        self._query, self._key, self._value, self._output = (
            _row(part.out_features) for part in (parts.query, parts.key, parts.value, parts.output)
        )
        self._turned_query, self._turned_key = torch.empty_like(self._query), torch.empty_like(self._key)
        self._attended = _row(parts.output.in_features)
        choices, experts = (0, 0) if parts.router is None else (parts.router.top_k, len(weight_of(parts.router.module)))
        self.ids, self.weights = torch.empty(1, choices, dtype=torch.int32), torch.empty(1, choices)
        self._logits = _row(experts)
        self._key_heads, self._value_heads = keys.shape[1::2], values.shape[1::2]
        self._addresses = self._weights_now()
        self._head_norms = [norm for norm in (parts.query_norm, parts.key_norm) if norm is not None]  # both or none
        self._sequence = StepSequence(self._steps(keys, values))

    def is_current(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether the model's weights still lie where the job reads them, and the cache's heads are as they were."""
        same = keys.shape[1::2] == self._key_heads and values.shape[1::2] == self._value_heads
        return same and self._weights_now() == self._addresses

    def run(
        self, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> None:
        """Writes ``residual``, ``normal``, ``ids`` and ``weights``, and the last position of ``keys`` and ``values``.

        Args:
            hidden: [1, 1, H]. cosines, sines: [1, 1, D]. Contiguous.
            keys, values: [1, Hk, S, D], of which a row lies in one piece.
        """
        steps, last, behind_norms = self._sequence, keys.shape[2] - 1, len(self._head_norms)
        steps.part(0).x = steps.part(_ADD).x = hidden.data_ptr()
        for number, cache in enumerate((keys, values)):
            turn, store = steps.part(_TURN, behind_norms + number), steps.part(_TURN, behind_norms + 2 + number)
            turn.y, turn.z = cosines.data_ptr(), sines.data_ptr()
            store.out = cache.data_ptr() + last * cache.stride(2) * cache.element_size()
            store.pitch = cache.stride(1)
        attention = steps.part(_ATTEND)
        attention.k, attention.v, attention.length = keys.data_ptr(), values.data_ptr(), last + 1
        attention.k_head, attention.v_head = keys.stride(1), values.stride(1)
        attention.k_position, attention.v_position = keys.stride(2), values.stride(2)
        self._engine.run_sequence(steps, (self, hidden, keys, values, cosines, sines))

    def _weights_now(self) -> list[int]:
        """Addresses of all weights that the steps read."""
        parts = self._parts
        linears = (parts.query, parts.key, parts.value, parts.output)
        norms = (parts.before, parts.query_norm, parts.key_norm, parts.behind)
        weights = [tensor for part in linears for tensor in (part.weight, part.bias) if tensor is not None]
        weights += [weight_of(norm.module) for norm in norms if norm is not None]
        weights += [] if parts.router is None else [weight_of(parts.router.module)]
        return [weight.data_ptr() for weight in weights]

    def _steps(self, keys: torch.Tensor, values: torch.Tensor) -> list[list[NativePart]]:
        parts, head = self._parts, self._parts.head
        heads = self._turned_query.view(-1, head), keys[0], values[0]
        steps: list[list[NativePart]] = [
            [_norm(parts.before, self.residual, self._input)],
            [
                _product(parts.query, self._input, self._query),
                _product(parts.key, self._input, self._key),
                _product(parts.value, self._input, self._value),
            ],
            [
                *(_norm(norm, x, x) for norm, x in zip(self._head_norms, (self._query, self._key), strict=False)),
                turn_row(self._query, head, self._turned_query),
                turn_row(self._key, head, self._turned_key),
                store_row(self._turned_key, head),
                store_row(self._value, values.shape[3]),
            ],
            [native_attention(*heads, parts.scaling, self._attended)],
            [_product(parts.output, self._attended, self._output)],
            [add_row(self.residual, self._output, self.residual), _norm(parts.behind, self.residual, self.normal)],
        ]
        if (router := parts.router) is not None:
            steps.append([native_linear(weight_of(router.module), self.normal, None, self._logits)])
            steps.append([choose_row(self._logits, router.normalise, router.dtype, self.weights, self.ids)])
        return steps


def _row(width: int) -> torch.Tensor:
    return torch.empty(1, 1, width, dtype=torch.bfloat16)


def _norm(norm: Norm, x: torch.Tensor, out: torch.Tensor) -> NativeRow:
    return norm_row(x, weight_of(norm.module), norm.epsilon, out)


def _product(layer: nn.Linear, x: torch.Tensor, out: torch.Tensor) -> NativeLinear:
    return native_linear(layer.weight, x, layer.bias, out)
