"""Dense layers of a single token, and the head: the CPU engine reads weights faster than torch."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from greenroom.engine.single.passes import EnginePass
from greenroom.experts.cpu import CpuExperts


def take_linears(model: PreTrainedModel, engine: CpuExperts, passing: EnginePass) -> None:
    """Gives the engine every plain dense layer in BF16: in other dtypes torch reads as fast."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16:
            forward = _forward_head if module is head else _forward
            module.forward = partial(forward, module, engine, passing)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, engine: CpuExperts, passing: EnginePass, hidden: torch.Tensor) -> torch.Tensor:
    row = hidden.numel() == hidden.shape[-1]
    if not (passing.single and row) or hidden.dtype != layer.weight.dtype:
        return F.linear(hidden, layer.weight, layer.bias)
    return engine.linear(layer.weight, hidden.contiguous(), layer.bias)


def _forward_head(layer: nn.Linear, engine: CpuExperts, passing: EnginePass, hidden: torch.Tensor) -> torch.Tensor:
    """Also of packed sequences: a row of each, whatever its chunk was, and always by the engine."""
    if not passing.active or hidden.dtype != layer.weight.dtype:
        return F.linear(hidden, layer.weight, layer.bias)
    return engine.linear(layer.weight, hidden.contiguous(), layer.bias)
