"""Dense layers by the CPU engine: of a single token, and the head, where it reads weights faster than torch; of all
passes where torch has no kernels for BF16."""

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


def torch_multiplies_bfloat16() -> bool:
    """Whether torch has kernels for it on this processor. Without AVX-512 its products of BF16 matrices take four times
    as long as the engine's."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _forward(layer: nn.Linear, engine: CpuExperts, passing: EnginePass, hidden: torch.Tensor) -> torch.Tensor:
    if not passing.multiplies(hidden) or hidden.dtype != layer.weight.dtype:
        return F.linear(hidden, layer.weight, layer.bias)
    return engine.linear(layer.weight, hidden.contiguous(), layer.bias)


def _forward_head(layer: nn.Linear, engine: CpuExperts, passing: EnginePass, hidden: torch.Tensor) -> torch.Tensor:
    """Also of packed sequences: a row of each, whatever its chunk was, and always by the engine."""
    if not (passing.active or passing.multiplies(hidden)) or hidden.dtype != layer.weight.dtype:
        return F.linear(hidden, layer.weight, layer.bias)
    return engine.linear(layer.weight, hidden.contiguous(), layer.bias)
