"""No kernel of a decode step reads a slot while it is written, whatever the order in time.

Slots are written by copies, and by the steps themselves where experts land in passing.

The device is played by hand: it works through a step's layers when it likes, also behind ``enqueued``, where
the host learns from the step before and starts writes. A write begins some time after the end of the steps
that it must wait for, leaves garbage that is NaN in every kernel, and lands some time later.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from greenroom.experts.cache import ExpertCache, SlotWrite
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.decode_steps import DecodeSteps
from greenroom.experts.dispatch import CostModel
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.host_tier import HostTier
from greenroom.experts.landing import RESIDENT
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.manager import OffloadManager
from greenroom.experts.policies import make_policy
from greenroom.experts.residency import ABSENT
from greenroom.experts.split import PARTS, SplitController
from greenroom.experts.step_table import StepTable
from greenroom.experts.store import HostStore
from tests.reference.expert_math import moe_float64
from tests.reference.slow_tier import GARBAGE

pytest.importorskip("triton")

from greenroom.experts import expert_launches
from greenroom.experts.decode_path import DecodePath
from greenroom.kernels.gpu.tiling import Tiling
from tests.experts.offer_mutants import Patch, a_copy_writes_what_is_offered, the_running_steps_slots_stay_on_offer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plays the device on the CPU, by the interpreter")

FMT = ExpertFormat(8, 6, torch.float32, Activation(ActivationKind.SILU))
EXPERTS, SLOTS, LAYERS, TOP_K = 7, 3, 2, 2


@dataclass
class _Flight:
    """A write on its way. ``after``: steps that must have ended before it may begin."""

    write: SlotWrite
    after: int
    begun: bool = False


class HandPlayedTier(HostTier):
    """Behaves like a device with streams of its own: a published map, and writes behind the ends of steps.

    Attributes:
        opened, ended: steps that the host has published a map for, and that the device has worked through.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.opened = self.ended = 0
        self.flights: list[_Flight] = []
        self._marked = 0
        self._published = torch.full((LAYERS, EXPERTS), ABSENT, dtype=torch.int32)
        for slots in self._slots:
            slots.fill_(GARBAGE)

    def device_map(self, slot_of: np.ndarray) -> torch.Tensor:
        return self._published

    def begin_step(self, slot_of: np.ndarray) -> None:
        self.opened += 1
        self._published.copy_(torch.from_numpy(slot_of))

    def end_step(self) -> None:
        self._marked = self.opened

    def start_write(self, write: SlotWrite) -> None:
        self.flights.append(_Flight(write, self._marked))

    def move(self, dice: random.Random) -> None:
        """Time passes: writes that may begin do so, or not; some that have begun land."""
        for flight in list(self.flights):
            if not flight.begun and flight.after <= self.ended and dice.random() < 0.6:
                flight.begun = True
                self._slots[flight.write.layer][flight.write.slot].fill_(GARBAGE)
            elif flight.begun and dice.random() < 0.4:
                super().start_write(flight.write)
                self.flights.remove(flight)

    def slot_bytes(self, layer: int, slot: int) -> np.ndarray:
        return self._slots[layer][slot].numpy()


class DrawnSplit(SplitController):
    """Any split at all, another one in each step."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(1.0, 1.0, EXPERTS)
        self._dice = dice

    def stream_parts(self) -> np.ndarray:
        return np.array([self._dice.randint(0, n) * PARTS for n in range(EXPERTS + 1)], dtype=np.int32)


class Stage:
    """Steps of random batches; checks every result, the map and the slots."""

    def __init__(self, manager: OffloadManager, tier: HandPlayedTier, steps: DecodeSteps, dice: random.Random) -> None:
        self.manager, self.tier, self.steps, self._dice = manager, tier, steps, dice
        self._generator = torch.Generator().manual_seed(dice.getrandbits(30))
        self.landed = 0  # experts that were written into slots

    def step(self) -> None:
        rows = self._dice.randint(1, 2)
        self.steps.begin(rows)
        version = self.manager.cache.version.copy()
        mapped = self.tier._published.clone()
        told = self._dice.randint(0, LAYERS)  # layers that the device has done when the host goes on
        for layer in range(LAYERS):
            if layer == told:
                self.steps.enqueued()
            self.tier.move(self._dice)
            self._run_layer(layer, rows)
        if told == LAYERS:
            self.steps.enqueued()
        self.tier.ended += 1
        self.tier.move(self._dice)
        assert (self.tier._published == mapped).all(), "the map changed within a step"
        self._check_versions(version, mapped)
        self.steps.finish(learn=self._dice.random() < 0.95)
        self.tier.move(self._dice)
        self.check()

    def _check_versions(self, version: np.ndarray, mapped: torch.Tensor) -> None:
        """Of slots that the step could read: none was written and mapped again, none that a copy writes was offered."""
        held = mapped != ABSENT
        for layer, expert in zip(*np.nonzero(held.numpy()), strict=True):
            slot = int(mapped[layer, expert])
            changed = self.manager.cache.version[layer, slot] - version[layer, slot]
            assert changed in (0, 1), "a slot of the step's map was written and mapped again within the step"
            assert changed == 0 or version[layer, slot] % 2 == 0, "a copy was started into a slot that was offered"

    def check(self) -> None:
        """The map, versions and contents of slots."""
        self.manager.check_invariants()
        cache = self.manager.cache
        for layer, expert in zip(*np.nonzero(cache.slot_of != ABSENT), strict=True):
            there = self.tier.slot_bytes(layer, cache.slot_of[layer, expert])
            source = self.manager.store.blocks(layer)[expert].numpy()
            assert (there == source).all(), f"slot of expert {expert} of layer {layer}"

    def _run_layer(self, layer: int, rows: int) -> None:
        hidden = torch.randn(2, FMT.hidden, generator=self._generator)
        # The low ids more often, so that a cache has something to find, and a favourite that moves.
        shift = self.tier.opened // 20
        keys = [[self._dice.random() * (1 + (e + shift) % EXPERTS) for e in range(EXPERTS)] for _ in range(2)]
        ids = torch.tensor(keys).argsort(1)[:, :TOP_K]
        weights = torch.rand(2, TOP_K, generator=self._generator)
        out = self.steps.path.run(layer, hidden, ids, weights)
        self._check_slots(layer)
        expected = moe_float64(hidden[:rows], ids[:rows], weights[:rows], self.manager.store.views(layer), FMT)
        # Of float32, whose terms may cancel; another expert's bytes give something else altogether.
        torch.testing.assert_close(out[:rows].double(), expected, rtol=1e-4, atol=1e-4)
        assert not out[rows:].any()

    def _check_slots(self, layer: int) -> None:
        """What the layer's kernels have written, they have not read, and no copy was writing either."""
        path, versions = self.steps.path, self.manager.cache.version[layer]
        entries, crossing, copied = path._buffers.entries.num.tolist()
        read = {self._slot_at(layer, int(address)) for address in path._buffers.entries.address[crossing:entries]}
        targets = [self._slot_at(layer, int(address)) for address in path._buffers.fetch_target[:copied]]
        written = [slot for slot in targets if slot is not None]
        self.landed += len(written)
        copied_into = {
            flight.write.slot for flight in self.tier.flights if flight.write.layer == layer and flight.begun
        }
        assert len(set(written)) == len(written)
        assert not read & set(written), "the step has read and written a slot"
        assert not copied_into & (read | set(written)), "a copy was writing the slot"
        assert all(versions[slot] % 2 for slot in written), "a slot was written whose version stood still"

    def _slot_at(self, layer: int, address: int) -> int | None:
        slots = self.tier.slots[layer]
        place = (address - slots.data_ptr()) // FMT.block_bytes
        return place if 0 <= place < len(slots) else None


@contextmanager
def stage(seed: int, policy: str = "lru", update: int = 2) -> Iterator[Stage]:
    dice = random.Random(seed)
    store = HostStore([FMT] * LAYERS, [EXPERTS] * LAYERS)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        views = store.views(layer)
        views.up.copy_(torch.randn(views.up.shape, generator=generator))
        views.down.copy_(torch.randn(views.down.shape, generator=generator))
    with CpuExperts(1) as engine:
        tier = HandPlayedTier(store, [SLOTS] * LAYERS, engine, 2)
        manager = OffloadManager(
            store, tier, [SLOTS] * LAYERS, make_policy(policy), TOP_K, update, CostModel(1e9, 1e9, 1e12)
        )
        with manager:
            boxes = Mailboxes(engine, store, 2, TOP_K, pin_memory=False)
            slot_of = tier.device_map(manager.cache.slot_of)
            path = DecodePath(store, tier.slots, slot_of, boxes, 2, TOP_K, manager.places)
            steps = DecodeSteps(manager, path)
            steps.split = DrawnSplit(dice)
            try:
                yield Stage(manager, tier, steps, dice)
            finally:
                boxes.close()


@pytest.fixture(autouse=True)
def one_program_an_expert(monkeypatch):
    """The interpreter runs program after program."""
    monkeypatch.setattr(expert_launches, "choose_tilings", lambda tokens, itemsize: (Tiling(16, 16, 16, 4, 3),) * 2)


def exercise(steps: int, seed: int, policy: str = "lru", update: int = 2) -> Stage:
    with stage(seed, policy, update) as player:
        for _ in range(steps):
            player.step()
        return player


@pytest.mark.parametrize(("policy", "update"), [("lru", 2), ("lfru", 1), ("lfu", 3)])
def test_hundreds_of_steps_in_random_timing(policy, update):
    player = exercise(100, seed=update, policy=policy, update=update)
    total = player.manager.counters.total()
    # The test is about nothing unless all of this happens, often.
    assert min(total.hits, total.streamed, total.cpu) > 40
    assert min(player.landed, total.landed) > 3
    assert total.evictions > 3
    if policy == "lru":  # the others keep to their favourites
        assert min(total.admissions, total.landed) > 20
        assert total.evictions > 60


# --- faults that the test must notice


def mapped_before_it_landed(patch: Patch) -> None:
    real = OffloadManager._start

    def mutant(self, layer, swap):
        real(self, layer, swap)
        self.cache.map_landed(SlotWrite(layer, swap.slot, swap.expert))

    patch.setattr(OffloadManager, "_start", mutant)
    patch.setattr(HandPlayedTier, "landed_writes", lambda self, wait=False: [])


def written_while_the_step_runs(patch: Patch) -> None:
    """The write does not wait for the end of the step that may still read the victim."""

    def mutant(self, write):
        self.flights.append(_Flight(write, 0))

    patch.setattr(HandPlayedTier, "start_write", mutant)


def learned_before_the_end_is_marked(patch: Patch) -> None:
    """Writes wait for the end of the step before the one that runs."""

    def mutant(self):
        self.flush()
        self._manager.tier.end_step()

    patch.setattr(DecodeSteps, "enqueued", mutant)


def map_is_published_late(patch: Patch) -> None:
    """The device sees the map of the step before."""
    real = HandPlayedTier.begin_step

    def mutant(self, slot_of):
        kept = getattr(self, "kept", np.full_like(slot_of, ABSENT))
        self.kept = slot_of.copy()
        real(self, kept)

    patch.setattr(HandPlayedTier, "begin_step", mutant)


def what_has_landed_stays_unknown(patch: Patch) -> None:
    """The map still names the expert that was overwritten."""
    real = ExpertCache.settle

    def mutant(self, landed):
        offered = self._offered.slots
        layer, place, slot = offered.layer, offered.place, offered.slot
        landed = landed.copy()
        full = self.expert_in[layer, slot] != ABSENT
        landed[layer[full], place[full]] = ABSENT
        return real(self, landed)

    patch.setattr(ExpertCache, "settle", mutant)


def lands_on_what_the_step_uses(patch: Patch) -> None:
    """The device is not told what the places hold."""
    real = StepTable.publish

    def mutant(self, rows, stream_parts, offers):
        if offers is not None:
            places = offers.places.copy()
            places[:, :, RESIDENT] = ABSENT
            offers = replace(offers, places=places)
        real(self, rows, stream_parts, offers)

    patch.setattr(StepTable, "publish", mutant)


def lands_where_a_copy_writes(patch: Patch) -> None:
    """A slot that a copy is writing stays on offer."""
    patch.setattr(ExpertCache, "may_be_offered", lambda self: self._is_slot)


MUTANTS: list[Callable[[Patch], None]] = [
    mapped_before_it_landed,
    written_while_the_step_runs,
    learned_before_the_end_is_marked,
    map_is_published_late,
    what_has_landed_stays_unknown,
    lands_on_what_the_step_uses,
    a_copy_writes_what_is_offered,
    lands_where_a_copy_writes,
    the_running_steps_slots_stay_on_offer,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_test_notices(mutant, monkeypatch):
    mutant(monkeypatch)
    # Within a step: wrong results, or a slot that is written and read.
    monkeypatch.setattr(Stage, "check", lambda self: None)
    with pytest.raises((AssertionError, ValueError)):
        exercise(150, seed=1)
