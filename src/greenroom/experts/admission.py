"""Admission: what a step's routing teaches, and what enters the cache because of it."""

import numpy as np

from greenroom.experts.cache import ExpertCache
from greenroom.experts.policies import Policy
from greenroom.experts.residency import Swap, choose_swaps
from greenroom.experts.usage import ExpertUsage


class Admission:
    """Collects one step's routing, then proposes changes of residency. Knows no memory and no device.

    The manager and the simulator run the same object.
    """

    def __init__(self, num_experts: list[int], policy: Policy, cache_topk: int, update_expert_num: int) -> None:
        """
        Args:
            num_experts: of each layer.
            policy: ranks experts.
            cache_topk: only a token's so many heaviest choices admit or refresh an expert.
            update_expert_num: replacements a layer a step at most.

        Raises:
            ConfigError: the policy does not fit the model.
        """
        self.usage = ExpertUsage(len(num_experts), max(num_experts))
        self._num_experts = num_experts
        self._policy = policy
        self._cache_topk = cache_topk
        self._update_expert_num = update_expert_num
        self._needed: dict[int, np.ndarray] = {}
        self._admissible: dict[int, np.ndarray] = {}
        policy.scores(self.usage)

    def record(
        self,
        layer: int,
        ids: np.ndarray,
        weights: np.ndarray,
        counts: np.ndarray,
        valid_rows: np.ndarray | None,
    ) -> None:
        """Takes note of one layer's routing.

        Args:
            ids: int32 [T, K].
            weights: float [T, K], of the choices.
            counts: int [experts], pairs of each expert, of padding too.
            valid_rows: bool [T], False for padding; None if there is none.
        """
        leading = heaviest(ids, weights, self._cache_topk)
        if valid_rows is not None and len(valid_rows) == len(ids):
            leading = leading[valid_rows]
        chosen = count_pairs(leading, self._num_experts[layer])
        self.usage.record(layer, np.minimum(chosen / max(len(leading), 1), 1.0))
        self._needed[layer] = counts > 0
        self._admissible[layer] = chosen > 0

    def end_step(self, cache: ExpertCache) -> list[tuple[int, Swap]]:
        """(layer, swap) for each change to make; forgets the step."""
        scores = self._policy.scores(self.usage)
        swaps = [
            (layer, swap)
            for layer, needed in self._needed.items()
            if cache.num_slots[layer] > 0
            for swap in self._choose(layer, scores[layer, : len(needed)], needed, cache)
        ]
        self.usage.advance()
        self.forget_step()
        return swaps

    def forget_step(self) -> None:
        """Drops what the step has needed, without changes of residency."""
        self._needed.clear()
        self._admissible.clear()

    def _choose(self, layer: int, scores: np.ndarray, needed: np.ndarray, cache: ExpertCache) -> list[Swap]:
        candidates = self._admissible[layer].copy()
        candidates[cache.being_written(layer)] = False
        slot_of, free_slots = cache.layer_map(layer), cache.free_slots(layer)
        return choose_swaps(
            scores, slot_of, free_slots, needed, candidates, self._update_expert_num, self._policy.margin
        )


def heaviest(ids: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    """[T, min(k, K)]: each token's choices of greatest weight."""
    if k >= ids.shape[1]:
        return ids
    # Routers need not sort their choices.
    return by_weight(ids, weights)[:, :k]


def by_weight(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[T, K]: each token's choices in falling order of weight."""
    return np.take_along_axis(ids, np.argsort(-weights, axis=1, kind="stable"), axis=1)


def count_pairs(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 [experts]: how often each id in [0, experts) occurs."""
    if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
        ids = ids[(ids >= 0) & (ids < num_experts)]
    return np.bincount(ids.reshape(-1), minlength=num_experts)
