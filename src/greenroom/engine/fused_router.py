"""Softmax routers with their choice in one kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from greenroom.kernels.gpu.route import route

_ROWS = 64
_MOST_EXPERTS = 1024
_MOST_CHOICES = 32
"""A program holds all experts of a token and makes one choice after another."""


def fuse_routers(model: nn.Module) -> int:
    """Gives every module that is a softmax router the kernel; returns how many.

    A module counts as one if what it returns for random rows is (logits, weights, ids) by the formula.
    """
    fused = 0
    for module in model.modules():
        form = _form(module)
        if form is not None:
            module.forward = _fused(module, *form)
            fused += 1
    return fused


def _form(module: nn.Module) -> tuple[bool, torch.dtype] | None:
    """Of a softmax router: whether its weights are normalised, and their dtype. None for any other module."""
    top_k, weight = getattr(module, "top_k", None), getattr(module, "weight", None)
    if not isinstance(top_k, int) or not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        return None
    if len(list(module.parameters())) != 1 or not 1 <= top_k <= min(len(weight), _MOST_CHOICES):
        return None
    if len(weight) > _MOST_EXPERTS or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
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
        and result[1].shape == result[2].shape == (_ROWS, top_k)
        and result[2].dtype == torch.int64
    )


def _fused(module: nn.Module, normalise: bool, dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight, top_k = module.weight, module.top_k
        assert isinstance(weight, torch.Tensor)
        assert isinstance(top_k, int)
        logits = F.linear(hidden_states.reshape(-1, weight.shape[1]), weight)
        ids, weights = route(logits, top_k, normalise=normalise, dtype=dtype)
        return logits, weights, ids

    return forward
