"""No kernel of a decode step reads a slot while it is written, whatever the order in time.

Slots are written by copies, and by the steps themselves where experts land in passing.

The device is played by hand: it works through what is enqueued, in its order, when it likes: while the host enqueues
more, learns from the step before and starts writes, or begins the next step. A write begins some time after the end of
the steps that it must wait for, leaves garbage that is NaN in every kernel, and lands some time later.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from greenroom.experts.cache import ExpertCache, SlotWrite
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.decode_steps import DecodeSteps, _Open
from greenroom.experts.dispatch import CostModel
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.host_tier import HostTier
from greenroom.experts.landing import RESIDENT
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.manager import OffloadManager
from greenroom.experts.path_record import PathRecord
from greenroom.experts.policies import make_policy
from greenroom.experts.residency import ABSENT
from greenroom.experts.split import PARTS, SplitController
from greenroom.experts.step_table import StepOrder, StepTable
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


@dataclass(frozen=True)
class _Begun:
    """A step, and what was so at its begin: the map and the versions. offered: (layer, slot)."""

    number: int
    mapped: np.ndarray
    version: np.ndarray
    offered: set[tuple[int, int]]


@dataclass
class _Flight:
    """A write on its way. ``after``: steps that must have ended before it may begin."""

    write: SlotWrite
    after: int
    begun: bool = False


class HandPlayedTier(HostTier):
    """Behaves like a device with streams of its own: writes behind the ends of steps.

    Attributes:
        stream: what has been enqueued and not been done.
        enqueued, ended: steps whose work has been enqueued, and that the device has worked through.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.stream: deque[Callable[[], object]] = deque()
        self.enqueued = self.ended = 0
        self.flights: list[_Flight] = []
        self._marked = 0
        for slots in self._slots:
            slots.fill_(GARBAGE)

    def end_step(self) -> None:
        self._marked = self.enqueued

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
        self._open: deque[_Begun] = deque()
        self.landed = 0  # experts that were written into slots
        self.ahead = 0  # steps that began while one was open

    def step(self) -> None:
        """Begins one, and finishes it and those before it, or some of them."""
        self.ahead += len(self._open)
        rows = self._dice.randint(1, 2)
        self.steps.begin(rows)
        self._open.append(self._note())
        for layer in range(LAYERS):
            self.tier.stream.append(partial(self._run_layer, layer, rows))
            self._time_passes()
        self.tier.enqueued += 1
        self.steps.enqueued()
        self.tier.stream.append(self._end)
        self._time_passes()
        self.finish(leave=self._dice.randint(0, 1))
        if not self._open and self._dice.random() < 0.2:
            self.steps.flush()  # as before a prefill
            for _ in range(self._dice.randint(0, 6)):
                self._time_passes()

    def finish(self, leave: int = 0) -> None:
        while len(self._open) > leave:
            step = self._open[0]
            while self.tier.ended < step.number:
                self._do_next()
            self._check_versions(self._open.popleft())
            self.steps.finish(learn=self._dice.random() < 0.95)
            self._time_passes()
            self.check()

    def _note(self) -> "_Begun":
        cache = self.manager.cache
        places = cache._offered[-1].slot_at
        own = {(layer, slot) for (layer, _), slot in places.items()}
        return _Begun(self.tier.enqueued + 1, cache.slot_of.copy(), cache.version.copy(), own)

    def _check_versions(self, step: "_Begun") -> None:
        """Of slots that the step could read: none was written by a copy and mapped again, and a copy was started into
        none that was offered."""
        for layer, expert in zip(*np.nonzero(step.mapped != ABSENT), strict=True):
            slot = int(step.mapped[layer, expert])
            changed = self.manager.cache.version[layer, slot] - step.version[layer, slot]
            if (layer, slot) in step.offered:
                assert changed == 0, "a copy was started into a slot that was offered"
            else:
                # Those that the step before was offered have been settled since.
                assert changed <= 1 + step.version[layer, slot] % 2, "a slot was written and mapped again"

    def _end(self) -> None:
        self.tier.ended += 1

    def _do_next(self) -> None:
        """The device goes on by one piece of work."""
        self.tier.stream.popleft()()
        self.tier.move(self._dice)

    def _time_passes(self) -> None:
        self.tier.move(self._dice)
        pace = self._dice.choice([0.0, 0.5, 0.95])
        while self.tier.stream and self._dice.random() < pace:
            self._do_next()

    def check(self) -> None:
        """The map, versions and contents of slots, those excepted that an open step may write."""
        self.manager.check_invariants()
        cache = self.manager.cache
        for layer, expert in zip(*np.nonzero(cache.slot_of != ABSENT), strict=True):
            if cache.version[layer, cache.slot_of[layer, expert]] % 2:
                continue
            there = self.tier.slot_bytes(layer, cache.slot_of[layer, expert])
            source = self.manager.store.blocks(layer)[expert].numpy()
            assert (there == source).all(), f"slot of expert {expert} of layer {layer}"

    def _run_layer(self, layer: int, rows: int) -> None:
        hidden = torch.randn(2, FMT.hidden, generator=self._generator)
        # The low ids more often, so that a cache has something to find, and a favourite that moves.
        shift = self.tier.ended // 20
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
            path = DecodePath(store, tier.slots, boxes, 2, TOP_K, manager.places)
            steps = DecodeSteps(manager, path)
            steps.split = DrawnSplit(dice)
            with enqueueing(tier.stream):
                yield Stage(manager, tier, steps, dice)
            boxes.close()


@contextmanager
def enqueueing(stream: deque[Callable[[], object]]) -> Iterator[None]:
    """Copies that need not be waited for go to the stream."""
    real = torch.Tensor.copy_

    def copy(self, source, non_blocking=False):
        if not non_blocking:
            return real(self, source)
        stream.append(partial(real, self, source))
        return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy)
        yield


@pytest.fixture(autouse=True)
def one_program_an_expert(monkeypatch):
    """The interpreter runs program after program."""
    monkeypatch.setattr(expert_launches, "choose_tilings", lambda tokens, itemsize: (Tiling(16, 16, 16, 4, 3),) * 2)


def exercise(steps: int, seed: int, policy: str = "lru", update: int = 2) -> Stage:
    with stage(seed, policy, update) as player:
        for _ in range(steps):
            player.step()
        player.finish()
        return player


@pytest.mark.parametrize(("policy", "update"), [("lru", 2), ("lfru", 1), ("lfu", 3)])
def test_hundreds_of_steps_in_random_timing(policy, update):
    player = exercise(100, seed=update, policy=policy, update=update)
    total = player.manager.counters.total()
    # The test is about nothing unless all of this happens, often.
    assert min(total.hits, total.streamed, total.cpu) > 40
    assert min(player.landed, total.landed) > 3
    assert player.ahead > 30
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
    real = DecodeSteps.enqueued

    def mutant(self):
        self.flush()
        real(self)

    patch.setattr(DecodeSteps, "enqueued", mutant)


def map_is_published_late(patch: Patch) -> None:
    """The device sees the map of the step before."""
    real = ExpertCache.told_map

    def mutant(self):
        kept = getattr(self, "kept", np.full_like(self.slot_of, ABSENT))
        self.kept = real(self)
        return kept

    patch.setattr(ExpertCache, "told_map", mutant)


def what_has_landed_stays_unknown(patch: Patch) -> None:
    """The map still names the expert that was overwritten."""
    real = ExpertCache.settle

    def mutant(self, landed):
        offered = self._offered[0].slots
        layer, place, slot = offered.layer, offered.place, offered.slot
        landed = landed.copy()
        full = self.expert_in[layer, slot] != ABSENT
        landed[layer[full], place[full]] = ABSENT
        return real(self, landed)

    patch.setattr(ExpertCache, "settle", mutant)


def lands_on_what_the_step_uses(patch: Patch) -> None:
    """The device is not told what the places hold."""

    def blind(order):
        if order.offers is None:
            return order
        places = order.offers.places.copy()
        places[:, :, RESIDENT] = ABSENT
        return replace(order, offers=replace(order.offers, places=places))

    _change_orders(patch, blind)


def the_device_does_not_complete_the_map(patch: Patch) -> None:
    """Of two steps that are open the later one does not know what has landed in the other."""
    _change_orders(patch, lambda order: replace(order, unsettled=0))


def the_map_is_completed_by_what_is_known(patch: Patch) -> None:
    """Steps have one number: where none is open before, the host knows what has landed, and may have changed it."""
    _change_orders(patch, lambda order: replace(order, number=1, unsettled=1))
    patch.setattr(_Open, "told_number", 1)


def _change_orders(patch: Patch, change: Callable[[StepOrder], StepOrder]) -> None:
    real = StepTable.publish
    patch.setattr(StepTable, "publish", lambda self, order: real(self, change(order)))


def the_notes_of_two_steps_share_a_place(patch: Patch) -> None:
    """What the host reads of one step may be what the next one has noted."""
    real = PathRecord.keep
    patch.setattr(PathRecord, "keep", lambda self, turn: [real(self, each) for each in (0, 1)])


def two_steps_are_offered_the_same(patch: Patch) -> None:
    """A step is offered what the one before may still write."""
    patch.setattr(ExpertCache, "may_be_offered", lambda self: self._is_slot & ~_copied(self))


def _copied(cache: ExpertCache) -> np.ndarray:
    mask = np.zeros(cache.version.shape, dtype=bool)
    for layer, slots in enumerate(cache._writing):
        mask[layer, list(slots)] = True
    return mask


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
    the_device_does_not_complete_the_map,
    the_map_is_completed_by_what_is_known,
    the_notes_of_two_steps_share_a_place,
    two_steps_are_offered_the_same,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_test_notices(mutant, monkeypatch):
    mutant(monkeypatch)
    # Within a step: wrong results, or a slot that is written and read.
    monkeypatch.setattr(Stage, "check", lambda self: None)
    with pytest.raises((AssertionError, ValueError)):
        exercise(150, seed=1)
