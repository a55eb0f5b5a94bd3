"""OffloadedExperts: one layer's routed experts, wherever they are."""

from collections.abc import Callable

import torch

from greenroom.experts.admission import count_pairs
from greenroom.experts.cache import ExpertCache
from greenroom.experts.dispatch import CostModel, Dispatch, dispatch
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.tier import DeviceTier, HostRouting, LayerBatch

Record = Callable[[int, HostRouting, Dispatch], None]
"""Takes note of a layer's routing and of what was decided."""

RunLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, hidden [T, H], ids [T, K], weights [T, K]) -> [T, H] of hidden's dtype, all on the device."""


class OffloadedExperts:
    """Takes the place of a model's experts module: same inputs, same output, weights elsewhere.

    Attributes:
        complete: every expert has a slot, and the tier needs no decision of the host.
        run_instead: while it is set, layers go through it and not through the host's decision.
    """

    def __init__(
        self,
        layer: int,
        fmt: ExpertFormat,
        num_experts: int,
        tier: DeviceTier,
        cache: ExpertCache,
        costs: CostModel,
        expect_step: Callable[[], None],
        record: Record,
    ) -> None:
        """
        Args:
            layer: its number among the experts layers of the store, tier and cache, not the model's.
            expect_step: raises outside a step.
        """
        self._layer = layer
        self._format = fmt
        self._num_experts = num_experts
        self._tier = tier
        self._slot_of = cache.layer_map(layer)
        self._costs = costs
        self._expect_step = expect_step
        self._record = record
        # All its experts are put into the slots of their numbers before the first step, and none ever takes another.
        self.complete = cache.num_slots[layer] == num_experts and tier.takes_complete(layer)
        self._decided = tier.has_to_decide(costs)
        self.run_instead: RunLayer | None = None

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
        if self.run_instead is not None:
            inner = hidden.to(self._format.dtype).contiguous()
            return self.run_instead(self._layer, inner, topk_ids, topk_weights).to(hidden.dtype)
        self._expect_step()
        inner = hidden.to(self._format.dtype).contiguous()
        if self.complete:
            batch = LayerBatch(self._layer, inner, topk_ids.contiguous(), topk_weights.contiguous())
            return self._tier.run_complete(batch).to(hidden.dtype)
        ids, weights = topk_ids.to(torch.int32).contiguous(), topk_weights.float().contiguous()
        batch = LayerBatch(self._layer, inner, ids, weights)
        if not self._decided:
            return self._tier.run_undecided(batch).to(hidden.dtype)
        routing = self._tier.read_routing(batch)
        counts = count_pairs(routing.ids, self._num_experts)
        lanes = self._tier.lanes(batch, self._costs)
        plan = dispatch(counts, self._slot_of, self._costs, self._format, self._tier.group_size, lanes)
        self._record(self._layer, routing, plan)
        return self._tier.run(batch, routing.ids, plan, self._slot_of).to(hidden.dtype)
