"""Which modules of a model are what their kind usually is, by trying them: norms, routers, rotary embeddings."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_ROPE = "apply_rotary_pos_emb"
"""What transformers' modules call the function, each its own copy."""

_ROUTER_ROWS = 64
MOST_EXPERTS = 1024
MOST_CHOICES = 32
"""Of a router that a kernel takes over: it holds all experts of a token and makes one choice after another."""

Apply = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""(query, key, cos, sin) -> query and key, turned."""


def rms_epsilon(module: nn.Module) -> float | None:
    """The epsilon of a module that is an RMS norm with a weight, None for any other.

    A module counts as one if its result on random rows is that of the formula, bit for bit.
    """
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon, float) or not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return None
    if len(list(module.parameters())) != 1 or not weight.is_floating_point():
        return None
    with torch.no_grad():
        rows = torch.randn(4, len(weight), device=weight.device).to(weight.dtype)
        try:
            result = module(rows)
        except (TypeError, RuntimeError):
            return None  # takes something else than rows
    wide = rows.float()
    normal = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(rows.dtype)
    return epsilon if isinstance(result, torch.Tensor) and torch.equal(result, weight * normal) else None


def router_form(module: nn.Module) -> tuple[bool, torch.dtype] | None:
    """Of a softmax router: whether its weights are normalised, and their dtype. None for any other module.

    A module counts as one if what it returns for random rows is (logits, weights, ids) by the formula.
    """
    top_k, weight = getattr(module, "top_k", None), getattr(module, "weight", None)
    if not isinstance(top_k, int) or not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        return None
    if len(list(module.parameters())) != 1 or not 1 <= top_k <= min(len(weight), MOST_CHOICES):
        return None
    if len(weight) > MOST_EXPERTS or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROUTER_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        try:
            result = module(rows)
        except (TypeError, ValueError, RuntimeError):
            return None  # takes something else than rows
        if not _is_choice(result, top_k):
            return None
        logits, weights, ids = result
        if not torch.equal(logits, F.linear(rows, weight)):
            return None
        shares = logits.float().softmax(-1)
        largest = shares.topk(top_k).values
        if not torch.equal(shares.gather(1, ids), largest):
            return None
        forms = {True: largest / largest.sum(-1, keepdim=True), False: largest}
        limits = torch.finfo(weights.dtype)
        fits = [
            normalise
            for normalise, expected in forms.items()
            if torch.allclose(weights.float(), expected, rtol=4 * limits.eps, atol=limits.smallest_normal)
        ]
    # Both fit where the chosen few have all of the mass: then this router cannot be told.
    return (fits[0], weights.dtype) if len(fits) == 1 else None


def _is_choice(result: Any, top_k: int) -> bool:
    return (
        isinstance(result, tuple)
        and len(result) == 3
        and all(isinstance(tensor, torch.Tensor) and tensor.ndim == 2 for tensor in result)
        and result[1].shape == result[2].shape == (_ROUTER_ROWS, top_k)
        and result[2].dtype == torch.int64
    )


@dataclass(frozen=True)
class RopeModule:
    """A module, mostly attention, whose forward calls the usual rotary embedding.

    own: the function that it calls.
    """

    module: nn.Module
    own: Apply
    _forward: FunctionType

    def forward_with(self, apply: Apply) -> Callable[..., Any]:
        """The module's own forward, with another meaning of the function's name: transformers' modules and other models
        stay as they are."""
        bound: Callable[..., Any] = _with_function(self._forward, apply).__get__(self.module)
        return bound


def rope_modules(model: nn.Module) -> Iterator[RopeModule]:
    """The modules of ``model`` whose rotary embedding is the usual one."""
    for module in model.modules():
        forward = type(module).forward
        while hasattr(forward, "__wrapped__"):  # renames of arguments, which a model's own layers do not need
            forward = forward.__wrapped__
        if not isinstance(forward, FunctionType) or _ROPE not in forward.__code__.co_names:
            continue
        own = getattr(sys.modules[forward.__module__], _ROPE, None)
        if own is not None and _is_usual(own):
            yield RopeModule(module, own, forward)


def is_usual_turn(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether a call of the function has heads of [B, heads, T, D], tables of [.., T, D] and one dtype, all with rows
    in one piece."""
    if cos.ndim != 3 or not query.ndim == key.ndim == 4:
        return False
    if not query.dtype == key.dtype == cos.dtype == sin.dtype or cos.shape[-1] != query.shape[-1]:
        return False
    return query.stride(-1) == key.stride(-1) == cos.stride(-1) == 1 and cos.stride() == sin.stride()


def _is_usual(own: Apply) -> bool:
    """Whether ``own`` turns the halves of whole heads against each other, by trying it."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    cos, sin = torch.randn(2, 2, 3, 8, generator=generator).unbind()

    def expected(x: torch.Tensor) -> torch.Tensor:
        turned = torch.cat([-x[..., 4:], x[..., :4]], dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    try:
        result = own(query, key, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    return len(result) == 2 and torch.equal(result[0], expected(query)) and torch.equal(result[1], expected(key))


def _with_function(forward: FunctionType, apply: Apply) -> FunctionType:
    """``forward`` with ``apply`` under the function's name."""
    names = {**forward.__globals__, _ROPE: apply}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
