"""OffloadManager: all expert layers of one model on one device, step by step."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from greenroom.experts.admission import Admission, count_pairs
from greenroom.experts.cache import ExpertCache
from greenroom.experts.counters import Counters
from greenroom.experts.dispatch import CostModel, Dispatch
from greenroom.experts.landing import MOST_PLACES, Offers
from greenroom.experts.layer import OffloadedExperts, RunLayer
from greenroom.experts.policies import Policy
from greenroom.experts.residency import ABSENT, Swap, hold_back_replacements, most_wanted, within_limit
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier, HostRouting

_WRITE_BYTES = 256 << 20
"""Of copies into cache slots under way at once, at most: some five milliseconds of PCIe. With a quarter of it a cold
cache of Qwen3-30B-A3B filled so slowly that a step of a recorded trace took 20% longer."""

_LEAST_WRITES = 2
"""So many may be under way however large experts are."""

_WRITES_BESIDE_LANDING = 2
"""Copies under way beside which no further resident is replaced by a copy, in decode steps whose experts land in
passing: by a simulation more of them take more from the misses than they bring hits (docs/measurements.md)."""


@dataclass(frozen=True)
class StepRecord:
    """What all layers did in a step that ran without the host.

    ids: int32 [layers, T, K], -1 where there is no choice. weights: float32 [layers, T, K].
    lanes: int [layers, 3], experts that were resident, streamed, on the CPU. landing: slots were offered to it.
    """

    ids: np.ndarray
    weights: np.ndarray
    lanes: np.ndarray
    landing: bool = False


class OffloadManager:
    """Runs steps. Between two steps it changes what is cached; within one nothing changes.

    One thread at a time may run steps. The manager owns the tier and the store and closes both.

    Attributes:
        layers: one ``OffloadedExperts`` for each layer of the store.
        runs_without_host: inside ``without_host``.
        places: slots a layer that are offered to a decode step, for experts to land in.
        next_offers: chosen while a step runs, for the next one if nothing happens before.
    """

    def __init__(
        self,
        store: HostStore,
        tier: DeviceTier,
        num_slots: list[int],
        policy: Policy,
        cache_topk: int,
        update_expert_num: int,
        costs: CostModel | None = None,
    ) -> None:
        """
        Args:
            store: filled.
            tier: made for this store and these slots.
            num_slots: cache slots of each layer.
            policy: decides what stays in them.
            cache_topk: only a token's so many heaviest choices admit or refresh an expert.
            update_expert_num: replacements a layer a step at most.
            costs: of absent experts; measured by the tier if not given.

        Raises:
            ConfigError: the policy does not fit the model.
        """
        self.store = store
        self.tier = tier
        self.cache = ExpertCache(store.num_experts, num_slots)
        self.counters = Counters(len(store))
        self.admission = Admission(store.num_experts, policy, cache_topk, update_expert_num)
        self.costs = costs or tier.measure_costs()
        self.layers = [
            OffloadedExperts(layer, fmt, count, tier, self.cache, self.costs, self.expect_step, self.record)
            for layer, (fmt, count) in enumerate(zip(store.formats, store.num_experts, strict=True))
        ]
        largest = max(fmt.block_bytes for fmt in store.formats)
        self._most_writes = max(_WRITE_BYTES // largest, _LEAST_WRITES)
        self._step_lock = threading.Lock()
        self._counting = True
        self._valid_rows: np.ndarray | None = None
        self.runs_without_host = False
        self.places = min(update_expert_num, MOST_PLACES)
        self._update_expert_num = update_expert_num
        self._displaced: list[int] = []  # by what landed in the last step: layers, one entry a resident
        self.next_offers: Offers | None = None
        self._offered_places = 0  # a layer, of the last step that was offered any
        self._preload()

    def __enter__(self) -> "OffloadManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def step(self, valid_rows: np.ndarray | None = None) -> Iterator[None]:
        """``begin_step`` and ``end_step`` around a block; an error inside abandons the step."""
        self.begin_step(valid_rows)
        try:
            yield
        except BaseException:
            self.abandon_step()
            raise
        self.end_step()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Steps inside the block touch neither statistics nor counters nor the cache."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    def begin_step(self, valid_rows: np.ndarray | None = None) -> None:
        """Opens a step: experts that have landed enter the map, which then stands still.

        Args:
            valid_rows: bool [T] on the host; rows of padding are computed but not counted.
        """
        if not self._step_lock.acquire(blocking=False):
            raise RuntimeError("a step is running already; one thread at a time may run the model")
        try:
            self.map_landed()
            self.tier.begin_step(self.cache.slot_of)
        except BaseException:
            self._step_lock.release()
            raise
        self._valid_rows = valid_rows

    def map_landed(self, wait: bool = False) -> None:
        """Copies that have arrived, or with ``wait`` all, enter the map; also between two steps that follow each other
        closely, of which the first one has not been closed."""
        for write in self.tier.landed_writes(wait):
            self.cache.map_landed(write)

    def expect_step(self) -> None:
        """Raises RuntimeError outside a step."""
        if not self._step_lock.locked():
            raise RuntimeError("experts ran outside a step; call begin_step first")

    def record(self, layer: int, routing: HostRouting, plan: Dispatch) -> None:
        """Takes note of one layer's routing within a step."""
        if not self._counting:
            return
        streamed = sum(len(group) for group in plan.streamed)
        self.counters.add(
            layer,
            hits=len(plan.resident),
            misses=streamed + len(plan.cpu),
            streamed=streamed,
            cpu=len(plan.cpu),
        )
        self.admission.record(layer, routing.ids, routing.weights, plan.counts, self._valid_rows)

    def end_step(self) -> None:
        """Closes the step and starts the copies of what enters the cache."""
        try:
            self.tier.end_step()
            if self._counting:
                self._record_late()
                self._admit()
        finally:
            self._clear_step()

    def _record_late(self) -> None:
        """Takes note of the layers that the host did not decide."""
        late = self.tier.late_routing()
        if len(late) == len(self.layers) and self._valid_rows is None and _are_alike(late):
            ids = np.stack([routing.ids for _, routing in late])
            self._count_late(slice(None), self.admission.record_all(ids, np.stack([r.weights for _, r in late])))
            return
        for layer, routing in late:
            counts = count_pairs(routing.ids, self.store.num_experts[layer])
            self.admission.record(layer, routing.ids, routing.weights, counts, self._valid_rows)
            self._count_late(slice(layer, layer + 1), counts[None])

    def _count_late(self, layers: slice, counts: np.ndarray) -> None:
        """counts: int [layers, experts], pairs of each. Without a decision, what has no slot runs on the CPU."""
        slot_of = self.cache.slot_of[layers, : counts.shape[1]]
        hits = np.count_nonzero((counts > 0) & (slot_of != ABSENT), axis=1)
        misses = np.count_nonzero(counts > 0, axis=1) - hits
        self.counters.add_all(layers, hits=hits, misses=misses, cpu=misses)

    def abandon_step(self) -> None:
        """Closes a step that failed, without learning from it."""
        try:
            self.tier.abandon_step()
        finally:
            self.next_offers = None
            self._count_landed([], self.cache.forfeit())
            self._clear_step()

    def offer(self, places: int) -> Offers:
        """Lets the decode step that begins write cache slots of its choice, until ``take_landed``.

        Args:
            places: slots a layer at most.
        """
        offers, self.next_offers = self.next_offers, None
        if offers is None or places != self._offered_places:
            offers = self.admission.offers(self.cache, places)
        self._offered_places = places
        self.cache.offer(offers.slots)
        return offers

    def withdraw_offer(self) -> None:
        """The last offer: its step does not begin after all."""
        self.cache.withdraw()

    def take_landed(self, landed: np.ndarray) -> None:
        """The oldest step that was offered slots has ended; from here on, what has landed is in the map.

        Args:
            landed: int [layers, places], the expert in each place that was offered, ABSENT for none.
        """
        entered, self._displaced = self.cache.settle(landed)
        self._count_landed(entered, self._displaced)

    def _count_landed(self, entered: list[int], left: list[int]) -> None:
        """Layers, one entry an expert."""
        for layer in entered:
            self.counters.add(layer, landed=1)
        for layer in left:
            self.counters.add(layer, evictions=1)

    def leave_step(self) -> None:
        """Closes a step whose end the tier has been told already; ``learn`` may follow later."""
        self._clear_step()

    def learn(self, record: StepRecord) -> None:
        """Counts a step that ran without the host, and starts the copies of what enters the cache.

        A later step may be running: the copies wait for the end that the tier was told last.
        """
        resident, streamed, cpu = record.lanes.T
        self.counters.add_all(hits=resident, misses=streamed + cpu, streamed=streamed, cpu=cpu)
        self.admission.record_all(record.ids, record.weights)
        self._admit(record.landing)
        if record.landing:
            # Behind the copies that were started now, and none of the slots that the running step may write: so the
            # next step finds what is chosen as it is, unless copies are started in between (``_admit``).
            self.next_offers = self.admission.offers(self.cache, self._offered_places)
            self.cache.prepare_offer(self.next_offers.slots)

    @contextmanager
    def without_host(self, run: RunLayer) -> Iterator[None]:
        """Layers inside the block go through ``run``; whoever opened it also opens and closes the steps."""
        self.runs_without_host = True
        for layer in self.layers:
            layer.run_instead = run
        try:
            yield
        finally:
            self.runs_without_host = False
            for layer in self.layers:
                layer.run_instead = None

    def _clear_step(self) -> None:
        self._valid_rows = None
        self.admission.forget_step()
        self._step_lock.release()

    def check_invariants(self) -> None:
        """Raises AssertionError if map, slots and versions disagree."""
        self.cache.check()
        for number, layer in enumerate(self.layers):
            slot_of = self.cache.layer_map(number)
            assert not layer.complete or (slot_of == np.arange(len(slot_of))).all(), f"layer {number} is not complete"

    def close(self) -> None:
        """Waits for what is under way and frees device and host memory. Idempotent."""
        self.tier.close()
        self.store.close()

    def _admit(self, landing: bool = False) -> None:
        """Starts the copies that the step makes worth while, as long as those under way are few.

        More would take the link from the misses of the next steps for longer than they help; what is
        worth a slot will be asked for again.
        """
        self.next_offers = None
        under_way = int(self.cache.being_written().sum())
        swaps = self.admission.end_step(self.cache)
        if landing:
            swaps = within_limit(swaps, self._displaced, self._update_expert_num)
            swaps = hold_back_replacements(swaps, _WRITES_BESIDE_LANDING - under_way)
        for layer, swap in most_wanted(swaps, self._most_writes - under_way):
            self._start(layer, swap)

    def _start(self, layer: int, swap: Swap) -> None:
        self.tier.start_write(self.cache.unmap_and_write(layer, swap))
        self.counters.add(layer, admissions=1, evictions=int(swap.victim != ABSENT))

    def _preload(self) -> None:
        """Fills the cache of every layer whose experts all fit, so that it never misses."""
        for layer, (experts, slots) in enumerate(zip(self.store.num_experts, self.cache.num_slots, strict=True)):
            if slots == experts:
                for expert in range(experts):
                    self._start(layer, Swap(expert, expert, ABSENT))
        self.map_landed(wait=True)


def _are_alike(late: list[tuple[int, HostRouting]]) -> bool:
    """Layers in their order, each with as many tokens and choices."""
    shape = late[0][1].ids.shape
    return all(layer == number and routing.ids.shape == shape for number, (layer, routing) in enumerate(late))
