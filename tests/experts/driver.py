"""Drives an OffloadManager and the slow model side by side, and checks everything after each operation."""

import random

import numpy as np
import torch

from greenroom.experts.dispatch import CostModel
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.manager import OffloadManager
from greenroom.experts.policies import make_policy
from greenroom.experts.residency import ABSENT
from greenroom.experts.store import HostStore
from tests.reference.expert_math import moe_float64
from tests.reference.residency_model import ResidencyModel
from tests.reference.slow_engine import SlowEngine
from tests.reference.slow_tier import SlowTier

FMT = ExpertFormat(4, 3, torch.float32, Activation(ActivationKind.SILU))

ALL_ON_CPU = CostModel(0, 1, 1)
ALL_STREAMED = CostModel(1, 0, 0)
BOTH_LANES = CostModel(1e6, 1e6, 1e9)


class Driver:
    """One manager over random weights, its slow twin, and the battery."""

    def __init__(
        self,
        experts: int,
        slots: int,
        layers: int = 2,
        policy: str = "lru",
        cache_topk: int = 2,
        limit: int = 2,
        costs: CostModel = ALL_ON_CPU,
        group: int = 3,
        seed: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.store = HostStore([FMT] * layers, [experts] * layers)
        for layer in range(layers):
            views = self.store.views(layer)
            views.up.copy_(torch.randn(views.up.shape, generator=self.generator))
            views.down.copy_(torch.randn(views.down.shape, generator=self.generator))
        self.engine = SlowEngine()
        self.tier = SlowTier(self.store, [slots] * layers, self.engine, group)
        self.manager = OffloadManager(
            self.store, self.tier, [slots] * layers, make_policy(policy), cache_topk, limit, costs
        )
        self.model = ResidencyModel(experts, slots, layers, policy, cache_topk, limit)
        self.experts = experts
        self.check()

    def step(self, tokens: int, top_k: int, padding: int = 0, skew: bool = True) -> None:
        """One step of all layers on random routing; the last ``padding`` rows are not counted."""
        routing = [[self._choose(top_k, skew) for _ in range(tokens)] for _ in self.model.layers]
        valid = [row < tokens - padding for row in range(tokens)]
        for write in list(self.tier._landed):
            self.model.land(write.layer, write.expert)
        version = None
        with self.manager.step(np.array(valid) if padding else None):
            version = self.manager.cache.version.copy()
            for layer in range(len(routing)):
                self._run_layer(layer, routing[layer])
                assert (self.manager.cache.version == version).all(), "a slot changed within a step"
        self.model.step(routing, valid)
        self.check()

    def finish_writes(self, count: int) -> None:
        """Lets some slot writes land; the map must not change before the next step."""
        before = self.manager.cache.slot_of.copy()
        self.tier.finish(count)
        assert (self.manager.cache.slot_of == before).all()
        self.check()

    def check(self) -> None:
        """The battery: map, slots, versions, contents of slots, and equality with the slow model."""
        cache = self.manager.cache
        cache.check()
        landed = {(w.layer, w.expert) for w in self.tier._landed}
        for number, layer in enumerate(self.model.layers):
            resident = {e for e in range(self.experts) if cache.slot_of[number, e] != ABSENT}
            assert resident == layer.resident, f"layer {number}: {resident} != {layer.resident}"
            assert set(np.flatnonzero(cache.being_written()[number]).tolist()) == layer.flying
            assert len(resident) + len(layer.flying) <= layer.slots
            for expert in resident:
                slot = int(cache.slot_of[number, expert])
                there, source = self.tier.slot_bytes(number, slot), self.store.blocks(number)[expert].numpy()
                assert (there == source).all(), f"slot {slot} of layer {number} does not hold expert {expert}"
            counters = self.manager.counters.layers()[number]
            for name, count in layer.counts.items():
                assert getattr(counters, name) == count, f"layer {number}: {name}"
            assert counters.streamed + counters.cpu == counters.misses
        assert landed <= {(n, e) for n, layer in enumerate(self.model.layers) for e in layer.flying}

    def _run_layer(self, layer: int, routing: list[list[int]]) -> None:
        tokens = len(routing)
        hidden = torch.randn(tokens, FMT.hidden, generator=self.generator)
        ids = torch.tensor(routing)
        weights = torch.rand(ids.shape, generator=self.generator).sort(descending=True).values
        shuffled = torch.argsort(torch.rand(ids.shape, generator=self.generator))
        ids, weights = ids.gather(1, shuffled), weights.gather(1, shuffled)
        out = self.manager.layers[layer].forward(hidden, ids, weights)
        expected = moe_float64(hidden, ids, weights, self.store.views(layer), FMT)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)

    def _choose(self, top_k: int, skew: bool) -> list[int]:
        """Distinct experts; the low ids more often, so that a cache has something to find."""
        weights = [1 / (1 + e) if skew else 1.0 for e in range(self.experts)]
        chosen: list[int] = []
        while len(chosen) < min(top_k, self.experts):
            expert = self.random.choices(range(self.experts), weights)[0]
            if expert not in chosen:
                chosen.append(expert)
        return chosen
