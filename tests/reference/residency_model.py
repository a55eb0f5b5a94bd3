"""A slow, obvious model of what the cache does, held against the real one step by step.

It keeps the whole history of routing and derives every score from it anew, in plain Python.
"""

from collections import Counter
from dataclasses import dataclass, field

from greenroom.experts.usage import DECAY

Routing = list[list[int]]
"""One layer's routing in one step: for each token its experts, most wanted first."""


@dataclass
class LayerModel:
    """One layer. ``resident`` and ``flying`` are sets of experts; which slot they use is left open."""

    experts: int
    slots: int
    resident: set[int] = field(default_factory=set)
    flying: set[int] = field(default_factory=set)
    history: list[dict[int, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def score(self, policy: str, expert: int) -> float:
        now = len(self.history) - 1
        shares = [step.get(expert, 0.0) for step in self.history]
        last = max((s for s, share in enumerate(shares) if share > 0), default=-1)
        match policy:
            case "lru":
                return last
            case "lfu":
                return sum(shares)
            case "lfru":
                return sum(share * DECAY ** (now - s) for s, share in enumerate(shares)) / (1 + now - last)
            case "first-come":
                return 0.0
        raise AssertionError(policy)


MARGIN = {"lru": 1, "lfu": 1, "lfru": 8, "first-come": 1}
"""How many times a resident's score a candidate must exceed."""


class ResidencyModel:
    """All layers, driven by ``land`` and ``step``."""

    def __init__(self, experts: int, slots: int, layers: int, policy: str, cache_topk: int, limit: int) -> None:
        self.policy, self.cache_topk, self.limit = policy, cache_topk, limit
        self.layers = [LayerModel(experts, slots) for _ in range(layers)]
        if slots == experts:
            for layer in self.layers:
                layer.resident = set(range(experts))
                layer.counts["admissions"] = experts

    def land(self, layer: int, expert: int) -> None:
        self.layers[layer].flying.remove(expert)
        self.layers[layer].resident.add(expert)

    def step(self, routing: list[Routing], valid: list[bool]) -> None:
        for layer, tokens in zip(self.layers, routing, strict=True):
            self._layer_step(layer, tokens, valid)

    def _layer_step(self, layer: LayerModel, tokens: Routing, valid: list[bool]) -> None:
        needed = {e for token in tokens for e in token if 0 <= e < layer.experts}
        layer.counts["hits"] += len(needed & layer.resident)
        layer.counts["misses"] += len(needed - layer.resident)
        kept = [token for token, ok in zip(tokens, valid, strict=True) if ok]
        leading = Counter(e for token in kept for e in token[: self.cache_topk] if 0 <= e < layer.experts)
        layer.history.append({e: min(n / max(len(kept), 1), 1.0) for e, n in leading.items()})
        entering = [e for e in range(layer.experts) if e in leading and e not in layer.resident | layer.flying]
        entering.sort(key=lambda e: (-round(layer.score(self.policy, e), 9), e))
        while entering and len(layer.resident | layer.flying) < layer.slots:
            layer.flying.add(entering.pop(0))
            layer.counts["admissions"] += 1
        for _ in range(self.limit):
            leaving = sorted(layer.resident - needed, key=lambda e: (round(layer.score(self.policy, e), 9), e))
            if not entering or not leaving:
                return
            best, worst = (round(layer.score(self.policy, e), 9) for e in (entering[0], leaving[0]))
            if best <= MARGIN[self.policy] * worst:
                return
            layer.resident.remove(leaving[0])
            layer.flying.add(entering.pop(0))
            layer.counts["admissions"] += 1
            layer.counts["evictions"] += 1
