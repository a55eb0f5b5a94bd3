"""Dense layers of single tokens: the CPU engine reads weights faster than torch."""

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


def multiply(
    engine: CpuExperts, weight: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None, singles: int
) -> torch.Tensor:
    """``hidden @ weight.T + bias``: the first ``singles`` rows by the engine, the others by torch.

    Args:
        weight: BF16 [N, H].
        hidden: [..., H] of any dtype; only rows in BF16 are the engine's.
    """
    rows = hidden.numel() // hidden.shape[-1]
    if singles == 0 or hidden.dtype != weight.dtype:
        return F.linear(hidden, weight, bias)
    if singles == rows:
        return engine.linear(weight, hidden.contiguous(), bias)
    flat = hidden.reshape(rows, -1).contiguous()
    out = flat.new_empty(rows, weight.shape[0])
    engine.linear(weight, flat[:singles], bias, out[:singles])
    out[singles:] = F.linear(flat[singles:], weight, bias)
    return out.view(*hidden.shape[:-1], -1)


def _forward(layer: nn.Linear, engine: CpuExperts, passing: EnginePass, hidden: torch.Tensor) -> torch.Tensor:
    singles = passing.singles_among(hidden.numel() // hidden.shape[-1])
    return multiply(engine, layer.weight, hidden, layer.bias, singles)


def _forward_head(layer: nn.Linear, engine: CpuExperts, passing: EnginePass, hidden: torch.Tensor) -> torch.Tensor:
    """One row a sequence, whether its chunk had one token or many."""
    rows = hidden.numel() // hidden.shape[-1] if passing.active else 0
    return multiply(engine, layer.weight, hidden, layer.bias, rows)
