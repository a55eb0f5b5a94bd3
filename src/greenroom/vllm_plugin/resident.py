"""Layers all of whose experts have a slot: vLLM's own kernels read them there, and no step has anything to decide."""

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

from greenroom.experts.formats import ActivationKind
from greenroom.experts.manager import OffloadManager
from greenroom.vllm_plugin.routed_experts import OffloadingLayer, RunExperts

_KINDS = {ActivationKind.SILU: MoEActivation.SILU, ActivationKind.GELU: MoEActivation.GELU}


def resident_layers(manager: OffloadManager, layers: list[OffloadingLayer]) -> list[RunExperts] | None:
    """How each layer runs, or None if some layer has experts without a slot, or is none that vLLM's kernel takes."""
    runs = []
    for index, layer in enumerate(layers):
        fmt, slots = manager.store.formats[index], manager.tier.slots[index]
        plain = fmt.gated and not fmt.bias and fmt.activation.limit == float("inf") and fmt.activation.kind in _KINDS
        if len(slots) < manager.store.num_experts[index] or not plain or layer.expert_map is not None:
            return None
        # Slots are filled in the order of experts when all of them fit.
        if not (manager.cache.layer_map(index)[: len(slots)] == range(len(slots))).all():
            return None
        views = fmt.views(slots)
        runs.append(_run(views.up, views.down, _KINDS[fmt.activation.kind]))
    return runs


def _run(up: torch.Tensor, down: torch.Tensor, activation: MoEActivation) -> RunExperts:
    def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fused_experts(hidden.contiguous(), up, down, weights, ids, activation=activation)
        return out

    return run
