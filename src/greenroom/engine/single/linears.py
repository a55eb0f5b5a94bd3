"""Dense layers by the CPU engine: of a single token, and the head, where it reads weights faster than torch; of all
passes where torch has no kernels for their dtype."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from greenroom.engine.single.passes import EnginePass
from greenroom.experts.cpu import CpuExperts

_KERNELS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
"""By dtype, who knows whether this processor has what torch's kernels need."""


def take_linears(model: PreTrainedModel, engine: CpuExperts, passing: EnginePass) -> None:
    """Gives the engine every plain dense layer in half precision, to be multiplied when ``passing`` says so."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype in _KERNELS:
            forward = _forward_head if module is head else _forward
            module.forward = partial(forward, module, engine, passing)  # type: ignore[method-assign]


def torch_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch has kernels for matrices of ``dtype`` on this processor: in half precision it takes AVX-512, or
    more. Without them its products take four times as long as the engine's."""
    if dtype not in _KERNELS:
        return True
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, _KERNELS[dtype])())


def _forward(layer: nn.Linear, engine: CpuExperts, passing: EnginePass, hidden: torch.Tensor) -> torch.Tensor:
    if not passing.multiplies(hidden) or hidden.dtype != layer.weight.dtype:
        return F.linear(hidden, layer.weight, layer.bias)
    return engine.linear(layer.weight, hidden.contiguous(), layer.bias)


def _forward_head(layer: nn.Linear, engine: CpuExperts, passing: EnginePass, hidden: torch.Tensor) -> torch.Tensor:
    """In BF16 also of packed sequences: a row of each, whatever its chunk was, and always by the engine."""
    by_engine = passing.multiplies(hidden) or (passing.active and hidden.dtype == torch.bfloat16)
    if not by_engine or hidden.dtype != layer.weight.dtype:
        return F.linear(hidden, layer.weight, layer.bias)
    return engine.linear(layer.weight, hidden.contiguous(), layer.bias)
