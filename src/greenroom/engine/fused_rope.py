"""Attention modules with rotary embedding in one kernel."""

from typing import Any

import torch
from torch import nn

from greenroom.engine.known_parts import Apply, is_usual_turn, rope_modules
from greenroom.kernels.gpu.rope import rotate


def fuse_rope(model: nn.Module) -> int:
    """Gives every attention module whose rotary embedding is the usual one the kernel; returns how many."""
    fused = 0
    for found in rope_modules(model):
        found.module.forward = found.forward_with(_fused(found.own))
        fused += 1
    return fused


def _fused(own: Apply) -> Apply:
    def apply(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rest or named or not is_usual_turn(query, key, cos, sin):
            return own(query, key, cos, sin, *rest, **named)
        return rotate(query, key, cos, sin)

    return apply
