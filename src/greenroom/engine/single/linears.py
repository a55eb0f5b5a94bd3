"""Dense layers of a single token: the CPU engine reads weights faster than torch."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from greenroom.engine.single.passes import SinglePass
from greenroom.experts.cpu import CpuExperts

LEAST_BYTES = 1 << 18
"""Of a weight: less is not worth waking the engine's threads."""


def take_linears(model: nn.Module, engine: CpuExperts, single: SinglePass) -> None:
    """Gives the engine every plain dense layer in BF16: in other dtypes torch reads as fast."""
    for module in model.modules():
        if type(module) is nn.Linear and is_large(module.weight):
            module.forward = partial(_forward, module, engine, single)  # type: ignore[method-assign]


def is_large(weight: torch.Tensor) -> bool:
    """Whether the engine's threads are worth waking for it."""
    return weight.dtype == torch.bfloat16 and weight.nbytes >= LEAST_BYTES


def _forward(layer: nn.Linear, engine: CpuExperts, single: SinglePass, hidden: torch.Tensor) -> torch.Tensor:
    weight = layer.weight
    if not single.active or hidden.numel() != hidden.shape[-1] or hidden.dtype != weight.dtype:
        return F.linear(hidden, weight, layer.bias)
    return engine.linear(weight, hidden.contiguous(), layer.bias)
