"""Replaying recorded routing through the cache, without weights: what a policy would have hit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from greenroom.experts.admission import Admission, count_pairs
from greenroom.experts.cache import ExpertCache
from greenroom.experts.policies import Policy
from greenroom.experts.residency import ABSENT

Step = Sequence[np.ndarray]
"""One step's routing: for each layer int [T, K], a token's choices in falling order of weight."""


@dataclass(frozen=True)
class ReplayResult:
    """Experts a layer a step, summed over the replay: found in a slot, needed, and copied into slots."""

    hits: int
    needed: int
    admissions: int

    @property
    def hit_rate(self) -> float:
        """Share of the needed experts that were found in a slot; 0 for an empty replay."""
        return self.hits / self.needed if self.needed else 0.0


def replay(
    steps: Iterable[Step],
    num_experts: int,
    num_layers: int,
    num_slots: int,
    policy: Policy,
    cache_topk: int,
    update_expert_num: int,
) -> ReplayResult:
    """Runs the cache's own code over recorded steps; what enters after a step is there in the next."""
    cache = ExpertCache([num_experts] * num_layers, [min(num_slots, num_experts)] * num_layers)
    admission = Admission([num_experts] * num_layers, policy, cache_topk, update_expert_num)
    hits = needed = admissions = 0
    for step in steps:
        for layer, ids in enumerate(step):
            counts = count_pairs(ids, num_experts)
            used = counts > 0
            hits += int((used & (cache.layer_map(layer) != ABSENT)).sum())
            needed += int(used.sum())
            admission.record(layer, ids, by_rank(ids), counts, None)
        for layer, swap in admission.end_step(cache):
            cache.map_landed(cache.unmap_and_write(layer, swap))
            admissions += 1
    return ReplayResult(hits, needed, admissions)


def by_rank(ids: np.ndarray) -> np.ndarray:
    """float [T, K]: weights that fall from choice to choice, for routing recorded without them."""
    return np.broadcast_to(-np.arange(ids.shape[1], dtype=float), ids.shape)


def belady_hits(steps: Sequence[Step], num_slots: int) -> ReplayResult:
    """The most that any policy could hit: after each step it keeps what is needed again soonest.

    Knows the future, has no limit on replacements, and may drop an expert that the step has just used.
    """
    layers = len(steps[0]) if steps else 0
    hits = needed = admissions = 0
    for layer in range(layers):
        used = [set(np.unique(step[layer]).tolist()) for step in steps]
        resident: set[int] = set()
        for now, experts in enumerate(used):
            hits += len(experts & resident)
            needed += len(experts)
            kept = set(sorted(resident | experts, key=lambda e: _next_use(used, now, e))[:num_slots])
            admissions += len(kept - resident)
            resident = kept
    return ReplayResult(hits, needed, admissions)


def _next_use(used: list[set[int]], now: int, expert: int) -> int:
    """The next step after ``now`` that uses the expert; past the end if there is none."""
    return next((step for step in range(now + 1, len(used)) if expert in used[step]), len(used))
