"""Decode of one sequence on a CPU: the CPU engine multiplies its row, since it reads weights faster than torch."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from greenroom.experts.cpu import CpuExperts

LEAST_BYTES = 1 << 20
"""Of a weight: less is not worth waking the engine's threads."""


class SingleRows:
    """Takes over a model's large dense layers where a pass has one token of one sequence.

    Not in passes over packed sequences, also of a single one: there a text must not depend, by a single bit, on what is
    served beside it, and torch is as fast from two rows on. One thread at a time, the one that runs the model.
    """

    def __init__(self, model: PreTrainedModel, engine: CpuExperts) -> None:
        """In other dtypes than BF16 torch reads as fast."""
        self._engine = engine
        self._single = False  # the pass that is under way
        for module in model.modules():
            if type(module) is nn.Linear and _is_large(module.weight):
                module.forward = partial(self._forward, module)  # type: ignore[method-assign]
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    @torch.compiler.disable
    def _begin(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if t is not None), None)
        self._single = "paged" not in kwargs and isinstance(tokens, torch.Tensor) and tokens.shape[:2] == (1, 1)

    @torch.compiler.disable
    def _end(self, _model: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
        self._single = False

    @torch.compiler.disable
    def _forward(self, layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        weight, single = layer.weight, hidden.numel() == hidden.shape[-1]
        if not (self._single and single) or torch.is_grad_enabled() or hidden.dtype != weight.dtype:
            return F.linear(hidden, weight, layer.bias)
        return self._engine.linear(weight, hidden.contiguous(), layer.bias)


def _is_large(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.nbytes >= LEAST_BYTES
