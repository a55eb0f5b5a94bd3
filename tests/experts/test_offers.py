"""Offers that are chosen while the step before runs: whatever comes in between, against brute force.

No kernels: the device is played, and lands any experts that it lacks in any of the places that it was offered.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest

from greenroom.experts.admission import Admission
from greenroom.experts.cache import ExpertCache, SlotWrite
from greenroom.experts.counters import COUNTER_NAMES
from greenroom.experts.dispatch import CostModel
from greenroom.experts.landing import SLOT, Offers
from greenroom.experts.manager import OffloadManager, StepRecord
from greenroom.experts.policies import make_policy
from greenroom.experts.residency import ABSENT
from greenroom.experts.store import HostStore
from tests.experts.driver import FMT
from tests.experts.offer_mutants import Patch, a_copy_writes_what_is_offered, the_running_steps_slots_stay_on_offer
from tests.reference.slow_engine import SlowEngine
from tests.reference.slow_tier import SlowTier

EXPERTS, TOP_K = 9, 3


class WatchedTier(SlowTier):
    """Refuses copies into slots that the running step may write."""

    offered: frozenset[tuple[int, int]] = frozenset()

    def start_write(self, write: SlotWrite) -> None:
        assert (write.layer, write.slot) not in self.offered, f"{write}: the running step may write there"
        super().start_write(write)

    def land(self, layer: int, slot: int, block: object) -> None:
        self._slots[layer][slot].copy_(block)  # type: ignore[arg-type]


class Player:
    """Steps of all kinds in any order, each checked."""

    def __init__(self, seed: int, slots: list[int], policy: str, places: int) -> None:
        self.dice = random.Random(seed)
        self.places = places
        self.store = HostStore([FMT] * len(slots), [EXPERTS] * len(slots))
        for layer in range(len(slots)):
            for expert, block in enumerate(self.store.blocks(layer)):
                block.fill_(16 * layer + expert)
        self.tier = WatchedTier(self.store, slots, SlowEngine(), 3)
        self.limit, costs = max(2, places), CostModel(0, 1, 1)
        self.manager = OffloadManager(self.store, self.tier, slots, make_policy(policy), TOP_K, self.limit, costs)
        self.cache = self.manager.cache
        self.record: StepRecord | None = None
        self.landed = 0
        self.lost = np.zeros(len(slots), dtype=np.int64)  # residents, by what landed in the last step

    def any_operation(self) -> None:
        kinds = [self.decode] * 6 + [self.prefill, self.learn, self.decode_apart, self.fail, self.fail_prefill]
        self.dice.choice(kinds)()
        self.tier.finish(self.dice.randint(0, 3))
        self.check()

    def decode(self, fails: bool = False) -> None:
        """A step that is offered slots."""
        self.manager.begin_step()
        offers = self.manager.offer(self.places)
        offered = self.offered_slots(offers)
        mapped, held = self.cache.slot_of.copy(), self.cache.expert_in.copy()
        self.tier.offered = frozenset(offered)
        self.learn()
        self.tier.finish(self.dice.randint(0, 3))
        self.check()
        for layer, slot in offered:
            assert self.cache.expert_in[layer, slot] == held[layer, slot], "the step may still read what it held"
        landed = self.play(offers, mapped)
        self.tier.offered = frozenset()
        self.record = None
        if fails:
            self.manager.abandon_step()
            assert all(self.cache.expert_in[layer, slot] == ABSENT for layer, slot in offered)
            return
        before = self.evictions()
        self.manager.take_landed(landed)
        self.lost = self.evictions() - before
        self.manager.leave_step()
        self.check_landed(offers, landed, held)
        self.record = self.any_record(landing=True)

    def decode_apart(self) -> None:
        """A step that is offered nothing, as one of two halves."""
        self.manager.begin_step()
        self.learn()
        self.manager.leave_step()
        self.record = self.any_record(landing=False)

    def prefill(self, fails: bool = False) -> None:
        """Layer by layer with the host; its end starts copies."""
        self.manager.begin_step()
        for layer, ids in enumerate(self.any_record(False).ids):
            counts = np.bincount(ids.reshape(-1), minlength=EXPERTS)
            self.manager.admission.record(layer, ids, np.ones(ids.shape), counts, None)
        if fails:
            self.manager.abandon_step()
        else:
            self.manager.end_step()

    def fail(self) -> None:
        self.decode(fails=True)

    def fail_prefill(self) -> None:
        self.prefill(fails=True)

    def learn(self) -> None:
        record, self.record = self.record, None
        if record is not None:
            before = self.evictions()
            self.manager.learn(record)
            lost = self.evictions() - before + (self.lost if record.landing else 0)
            assert (lost <= self.limit).all(), "residents that one step costs a layer"

    def evictions(self) -> np.ndarray:
        return self.manager.counters.table()[:, COUNTER_NAMES.index("evictions")]

    def any_record(self, landing: bool) -> StepRecord:
        layers = len(self.cache.num_slots)
        ids = [[self.dice.sample(range(EXPERTS), TOP_K)] for _ in range(layers)]
        weights = np.ones((layers, 1, TOP_K), np.float32)
        return StepRecord(np.array(ids, np.int32), weights, np.zeros((layers, 3), np.int64), landing)

    def offered_slots(self, offers: Offers) -> list[tuple[int, int]]:
        """What the device is told, which must be so."""
        flying = {(write.layer, write.slot) for write in [*self.tier.flying, *self.tier._landed]}
        offered = []
        for layer, places in enumerate(offers.places):
            assert len(places) == min(self.places, max(self.cache.num_slots))
            for slot, resident, least in places:
                if slot == ABSENT:
                    continue
                assert 0 <= slot < self.cache.num_slots[layer] < EXPERTS
                assert (layer, slot) not in flying, "a copy is writing there"
                assert self.cache.expert_in[layer, slot] == resident
                assert self.cache.version[layer, slot] % 2 == 1
                assert 0 <= least <= EXPERTS
                offered.append((layer, int(slot)))
        assert len(set(offered)) == len(offered)
        changing = {(int(layer), int(slot)) for layer, slot in np.argwhere(self.cache.version % 2)}
        assert changing == set(offered) | flying
        return offered

    def play(self, offers: Offers, mapped: np.ndarray) -> np.ndarray:
        landed = np.full(offers.places.shape[:2], ABSENT)
        for layer, places in enumerate(offers.places):
            absent = np.flatnonzero(mapped[layer] == ABSENT).tolist()
            self.dice.shuffle(absent)
            for place, (slot, _, least) in enumerate(places):
                if slot != ABSENT and absent and offers.appeal[layer, absent[0]] >= least and self.dice.random() < 0.5:
                    landed[layer, place] = absent.pop(0)
                    self.tier.land(layer, slot, self.store.blocks(layer)[landed[layer, place]])
        self.landed += int((landed != ABSENT).sum())
        return landed

    def check_landed(self, offers: Offers, landed: np.ndarray, held: np.ndarray) -> None:
        for layer, place in np.ndindex(landed.shape):
            slot, expert = offers.places[layer, place, SLOT], landed[layer, place]
            if slot == ABSENT:
                continue
            there = self.cache.expert_in[layer, slot]
            if expert == ABSENT:
                assert there == held[layer, slot], "nothing landed, and what was there is there"
            elif self.cache.being_written()[layer, expert]:
                assert there == ABSENT
            else:
                assert there == expert
            assert self.cache.version[layer, slot] % 2 == 0

    def check(self) -> None:
        """Map, slots, versions; every expert's bytes where the map says; and no slot is lost."""
        self.manager.check_invariants()
        flying = {(write.layer, write.slot) for write in [*self.tier.flying, *self.tier._landed]}
        for layer, count in enumerate(self.cache.num_slots):
            for slot in range(count):
                expert = self.cache.expert_in[layer, slot]
                offered = (layer, slot) in self.tier.offered
                assert (expert != ABSENT) + ((layer, slot) in flying) + bool(
                    self.cache.free_slots()[layer, slot]
                ) == 1 or (offered and expert == ABSENT)
                if expert != ABSENT:
                    assert (self.tier.slot_bytes(layer, slot) == 16 * layer + expert).all(), f"{layer}, {slot}"


def exercise(seed: int, slots: list[int], policy: str, places: int, operations: int) -> Player:
    player = Player(seed, slots, policy, places)
    with player.manager:
        for _ in range(operations):
            player.any_operation()
    return player


@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize(
    ("slots", "places"), [([4, 4, 4], 2), ([1, 2, 3], 2), ([1], 1), ([5, 0, EXPERTS, 1], 3), ([8, 8], 4)]
)
def test_any_order_of_steps(policy, slots, places):
    player = exercise(len(slots) + places, slots, policy, places, 300)
    total = player.manager.counters.total()
    assert player.landed >= total.landed > (20 if sum(slots) > 1 else 5)
    assert min(total.admissions, total.evictions) > 10


def test_steps_begin_with_what_was_chosen_before(monkeypatch):
    """In a row of steps nothing is chosen while the device idles, nor is a place of the step before offered again."""
    player = Player(0, [8, 8], "lru", 2)
    chosen: list[Offers] = []
    real = Admission.offers

    def spy(self, cache, count):
        chosen.append(real(self, cache, count))
        return chosen[-1]

    monkeypatch.setattr(Admission, "offers", spy)
    manager, before = player.manager, set()
    with manager:
        for number in range(12):
            manager.begin_step()
            count = len(chosen)
            offers = manager.offer(2)
            assert offers is chosen[-1]
            assert len(chosen) == count or number < 2, "the first step has none before, the second nothing learnt"
            slots = set(player.offered_slots(offers))
            assert len(slots) == 4, "as many as there may be"
            assert not slots & before or number < 2
            player.learn()
            player.tier.finish(9)
            manager.take_landed(player.play(offers, player.cache.slot_of.copy()))
            manager.leave_step()
            player.record, before = player.any_record(landing=True), slots
            player.check()


def test_a_path_with_other_places_gets_as_many():
    player = Player(0, [4], "lru", 2)
    with player.manager:
        for places in (2, 2, 2, 1, 1, 3, 2):
            player.places = places
            player.decode()


# --- faults that the test must notice


def copies_do_not_drop_the_choice(patch: Patch) -> None:
    real = OffloadManager._admit

    def mutant(self, landing=False):
        kept = self.next_offers
        real(self, landing)
        self.next_offers = kept

    patch.setattr(OffloadManager, "_admit", mutant)


def the_displaced_stays(patch: Patch) -> None:
    patch.setattr(ExpertCache, "_empty", lambda self, layer, slot: False)


def lands_beside_a_copy(patch: Patch) -> None:
    def mutant(self, layer, slot, expert):
        if expert == ABSENT or self.slot_of[layer, expert] != ABSENT:
            return False
        self.expert_in[layer, slot], self.slot_of[layer, expert] = expert, slot
        return True

    patch.setattr(ExpertCache, "_enter", mutant)


MUTANTS: list[Callable[[Patch], None]] = [
    copies_do_not_drop_the_choice,
    the_running_steps_slots_stay_on_offer,
    a_copy_writes_what_is_offered,
    the_displaced_stays,
    lands_beside_a_copy,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_test_notices(mutant, monkeypatch):
    mutant(monkeypatch)
    # The cache's own look at what it is offered must not be what saves the day.
    monkeypatch.setattr(ExpertCache, "_checked", ExpertCache._shape)
    with pytest.raises((AssertionError, ValueError)):
        exercise(1, [4, 4, 4], "lru", 2, 300)
