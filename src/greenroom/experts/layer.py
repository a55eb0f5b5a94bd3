"""OffloadedExperts: one layer's routed experts, wherever they are."""

from typing import TYPE_CHECKING

import torch

from greenroom.experts.admission import count_pairs
from greenroom.experts.dispatch import dispatch
from greenroom.experts.tier import LayerBatch

if TYPE_CHECKING:
    from greenroom.experts.manager import OffloadManager


class OffloadedExperts:
    """Takes the place of a model's experts module: same inputs, same output, weights elsewhere."""

    def __init__(self, manager: "OffloadManager", layer: int) -> None:
        self._manager = manager
        self._layer = layer
        self._format = manager.store.formats[layer]
        self._num_experts = manager.store.num_experts[layer]

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Without gradients: ``out[t] = sum_k topk_weights[t, k] * expert(topk_ids[t, k])(hidden[t])``.

        Args:
            hidden: [T, H] on the tier's device.
            topk_ids: integers [T, K]; ids outside [0, experts) belong to other ranks and are skipped.
            topk_weights: floats [T, K].

        Returns:
            [T, H] of ``hidden``'s dtype.
        """
        if topk_ids.numel() == 0:
            return torch.zeros_like(hidden)
        batch = LayerBatch(
            self._layer,
            hidden.to(self._format.dtype).contiguous(),
            topk_ids.to(torch.int32).contiguous(),
            topk_weights.float().contiguous(),
        )
        manager = self._manager
        routing = manager.tier.read_routing(batch)
        slot_of = manager.cache.layer_map(self._layer)
        counts = count_pairs(routing.ids, self._num_experts)
        plan = dispatch(counts, slot_of, manager.costs, self._format, manager.tier.group_size)
        manager.record(self._layer, routing, plan)
        return manager.tier.run(batch, routing.ids, plan, slot_of).to(hidden.dtype)
