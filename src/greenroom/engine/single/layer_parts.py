"""LayerParts: what a decoder layer of the usual kind consists of, by the names that transformers gives."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from greenroom.engine.attach import RoutedExperts
from greenroom.engine.known_parts import rms_epsilon, router_form

_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_BLOCK = {"gate", "experts"}


@dataclass(frozen=True)
class Norm:
    """An RMS norm with a weight."""

    module: nn.Module
    epsilon: float


@dataclass(frozen=True)
class Router:
    """A softmax router, and the experts that it chooses; see ``known_parts.router_form``."""

    module: nn.Module
    experts: RoutedExperts
    top_k: int
    normalise: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Place:
    """Where a module stands. called: it is run as it is, whatever it does."""

    parent: nn.Module
    name: str
    called: bool = False

    def module(self) -> nn.Module | None:
        """What stands there now."""
        return self.parent._modules.get(self.name)


@dataclass(frozen=True)
class LayerParts:
    """A layer that is, in this order, norm, attention, residual, norm, ``mlp`` and residual.

    query_norm, key_norm: of heads, or of all of them as one row; both or neither. router: if ``mlp`` is a router and
    its experts and nothing else.
    """

    layer: nn.Module
    before: Norm
    attention: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    query_norm: Norm | None
    key_norm: Norm | None
    behind: Norm
    mlp: nn.Module
    router: Router | None

    @property
    def number(self) -> int:
        """The layer's, in the cache."""
        number = self.attention.layer_idx
        assert isinstance(number, int)
        return number

    @property
    def scaling(self) -> float:
        """Of scores."""
        scaling = self.attention.scaling
        assert isinstance(scaling, float)
        return scaling

    @property
    def head(self) -> int:
        """A head's width."""
        head = self.attention.head_dim
        assert isinstance(head, int)
        return head

    def places(self) -> dict[Place, nn.Module]:
        """All modules that the layer consists of, as far as it is known, and where."""
        called = self.mlp if self.router is None else self.router.experts
        parents = [self.layer, self.attention] + ([self.mlp] if self.router is not None else [])
        return {
            Place(parent, name, module is called): module
            for parent in parents
            for name, module in parent.named_children()
        }


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight that a norm, router or dense layer has now."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def layer_parts(layer: nn.Module) -> LayerParts | None:
    """The parts of a layer that looks as if it were of the usual kind, in BF16; None for any other."""
    children: dict[str, Any] = dict(layer.named_children())
    attention = children.get("self_attn")
    if set(children) != _LAYER or attention is None:
        return None
    known = {"layer_idx": int, "head_dim": int, "scaling": float}
    if not all(isinstance(getattr(attention, name, None), kind) for name, kind in known.items()):
        return None
    inner: dict[str, Any] = dict(attention.named_children())
    if not _ATTENTION <= set(inner) <= _ATTENTION | _HEAD_NORMS or len(_HEAD_NORMS & set(inner)) == 1:
        return None
    query, key, value, output = (inner[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    if not all(type(part) is nn.Linear and part.weight.dtype == torch.bfloat16 for part in (query, key, value, output)):
        return None
    before, behind = _norm(children["input_layernorm"]), _norm(children["post_attention_layernorm"])
    query_norm, key_norm = (_norm(inner[name]) if name in inner else None for name in ("q_norm", "k_norm"))
    if before is None or behind is None or (set(inner) >= _HEAD_NORMS and (query_norm is None or key_norm is None)):
        return None
    mlp = children["mlp"]
    return LayerParts(
        layer, before, attention, query, key, value, output, query_norm, key_norm, behind, mlp, _router(mlp)
    )


def _norm(module: nn.Module) -> Norm | None:
    epsilon = rms_epsilon(module)
    return None if epsilon is None or module.weight.dtype != torch.bfloat16 else Norm(module, epsilon)


def _router(block: nn.Module) -> Router | None:
    children: dict[str, Any] = dict(block.named_children())
    if set(children) != _BLOCK or not isinstance(children["experts"], RoutedExperts):
        return None
    gate = children["gate"]
    form = router_form(gate)
    if form is None or gate.weight.dtype != torch.bfloat16 or form[1] not in (torch.bfloat16, torch.float32):
        return None
    return Router(gate, children["experts"], gate.top_k, *form)
