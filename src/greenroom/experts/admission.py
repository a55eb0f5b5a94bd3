"""Admission: what a step's routing teaches, and what enters the cache because of it."""

import numpy as np

from greenroom.experts.cache import ExpertCache
from greenroom.experts.landing import Offers, choose_offers
from greenroom.experts.policies import Policy
from greenroom.experts.residency import Swap, choose_swaps
from greenroom.experts.usage import ExpertUsage


class Admission:
    """Collects one step's routing, then proposes changes of residency. Knows no memory and no device.

    The manager and the simulator run the same object.

    Attributes:
        usage: what it has learnt.
        cache_topk: only a token's so many heaviest choices admit or refresh an expert.
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
        self._is_expert = np.arange(max(num_experts))[None, :] < np.array(num_experts)[:, None]
        self._policy = policy
        self.cache_topk = cache_topk
        self._update_expert_num = update_expert_num
        shape = (len(num_experts), max(num_experts))
        self._needed = np.zeros(shape, dtype=bool)
        self._admissible = np.zeros(shape, dtype=bool)
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
        leading = heaviest(ids, weights, self.cache_topk)
        if valid_rows is not None and len(valid_rows) == len(ids):
            leading = leading[valid_rows]
        experts = self._num_experts[layer]
        chosen = count_pairs(leading, experts)
        self.usage.record(layer, np.minimum(chosen / max(len(leading), 1), 1.0))
        self._needed[layer, :experts] = counts > 0
        self._admissible[layer, :experts] = chosen > 0

    def record_all(self, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Takes note of all layers' routing at once, without padding.

        Args:
            ids: int32 [layers, T, K], -1 where there is no choice.
            weights: float [layers, T, K].

        Returns:
            int64 [layers, experts]: pairs of each.
        """
        layers, tokens, top_k = ids.shape
        used = self._count_all(ids)
        chosen = used
        if self.cache_topk < ids.shape[2]:
            by_row = ids.reshape(-1, top_k), weights.reshape(-1, top_k)
            chosen = self._count_all(heaviest(*by_row, self.cache_topk).reshape(layers, -1))
        self.usage.record_all(np.minimum(chosen / max(tokens, 1), 1.0))
        self._needed[:] = used > 0
        self._admissible[:] = chosen > 0
        return used

    def end_step(self, cache: ExpertCache) -> list[tuple[int, Swap]]:
        """(layer, swap) for each change to make; forgets the step."""
        swaps = choose_swaps(
            self._policy.scores(self.usage),
            cache.slot_of,
            cache.free_slots(),
            self._needed | cache.at_stake(),
            self._admissible & ~cache.being_written(),
            self._update_expert_num,
            self._policy.margin,
        )
        self.usage.advance()
        self.forget_step()
        return swaps

    def offers(self, cache: ExpertCache, count: int) -> Offers:
        """``count`` places a layer, or as many as it has slots, for experts of a coming step to land in."""
        return choose_offers(
            self._policy.scores(self.usage),
            np.where(self._is_expert, self._policy.scores(self.usage.if_all_were_used()), np.inf),
            cache.expert_in,
            cache.may_be_offered(),
            cache.being_written(),
            count,
            self._policy.margin,
        )

    def forget_step(self) -> None:
        """Drops what the step has needed, without changes of residency."""
        self._needed[:] = False
        self._admissible[:] = False

    def _count_all(self, ids: np.ndarray) -> np.ndarray:
        """int64 [layers, experts]: how often each id occurs in its layer."""
        layers, experts = self._needed.shape
        own = np.arange(layers)[:, None] * experts + ids.reshape(layers, -1)
        inside = (ids.reshape(layers, -1) >= 0) & (ids.reshape(layers, -1) < experts)
        return np.bincount(own[inside], minlength=layers * experts).reshape(layers, experts)


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
