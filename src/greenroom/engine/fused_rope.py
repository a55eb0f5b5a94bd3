"""Attention modules with rotary embedding in one kernel."""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from greenroom.kernels.gpu.rope import rotate

_NAME = "apply_rotary_pos_emb"
"""What transformers' modules call the function, each its own copy."""

Apply = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fuse_rope(model: nn.Module) -> int:
    """Gives every attention module whose rotary embedding is the usual one the kernel; returns how many.

    The module's own forward is kept and runs with another meaning of the function's name, so that transformers'
    modules and other models stay as they are.
    """
    fused = 0
    for module in model.modules():
        forward = type(module).forward
        while hasattr(forward, "__wrapped__"):  # renames of arguments, which a model's own layers do not need
            forward = forward.__wrapped__
        if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
            continue
        own = getattr(sys.modules[forward.__module__], _NAME, None)
        if own is not None and _is_usual(own):
            module.forward = _with_function(forward, _fused(own)).__get__(module)
            fused += 1
    return fused


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


def _fused(own: Apply) -> Apply:
    def apply(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        usual = not rest and not named and cos.ndim == 3 and query.ndim == key.ndim == 4
        if not usual or not query.dtype == key.dtype == cos.dtype == sin.dtype or cos.shape[-1] != query.shape[-1]:
            return own(query, key, cos, sin, *rest, **named)
        if not query.stride(-1) == key.stride(-1) == cos.stride(-1) == 1 or cos.stride() != sin.stride():
            return own(query, key, cos, sin)
        return rotate(query, key, cos, sin)

    return apply


def _with_function(forward: FunctionType, apply: Apply) -> FunctionType:
    """``forward`` with ``apply`` under the function's name."""
    names = {**forward.__globals__, _NAME: apply}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
