"""DecodeSteps: what the host does around decode steps whose layers run without it.

The order of one step, the device's work between ``begin`` and ``finish``::

    begin(rows)   copied experts enter the map; map, split and offered slots are published; CPU threads start polling
    ...           the caller enqueues the step's work, or replays its graph
    enqueued()    marks its end; then, while the device works, learns from the step before
    ...           the caller waits for the work's end
    finish()      what landed in offered slots enters the map; CPU threads park; errors surface

The next step may begin, and be enqueued, before the one before is finished: so the device need not idle while the host
does all this. Two steps may be open at most. What both write on the device, its order keeps apart; what the host reads
of a step, the device copies into one of two places by turns. CPU threads then poll until no step is open.

A step may run as two halves at once, each through a path of its own with mailboxes of its own. They share the map, the
split and what is learnt: the host treats them as one step.

So statistics and swaps are off the step's path. A victim that is chosen while step N runs leaves the map at
N + 1, and its slot is written after the end of N, which is the last step that may read it. With two steps open, N is
the later one.

What lands in passing, in slots that were offered to step N, is in the map of N + 1: by ``finish``, or if N is still
open then, the device itself completes the map by what it has noted of N. A step that runs as two halves is offered
none: each half writes where it does not read, but the other may. Nor does it begin while another step is open.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.finished_step import FinishedStep
from greenroom.experts.idle_gap import IdleGap
from greenroom.experts.landing import Offers
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.manager import OffloadManager, StepRecord
from greenroom.experts.split import SplitController
from greenroom.experts.step_part import StepPart, take_failure
from greenroom.experts.step_table import StepOrder

MOST_OPEN = 2
"""Steps that may be open at once."""

_NUMBERS = 1 << 30
"""Steps after which numbers that the device is told begin anew."""

_LATE_JOB_S = 0.5
"""How long a step that is given up waits for CPU jobs that were begun."""


@dataclass(frozen=True)
class _Open:
    """A step that has begun and is not finished. landing: slots are offered to it."""

    number: int
    parts: tuple[StepPart, ...]
    landing: bool

    @property
    def told_number(self) -> int:
        """For the device: at least 1."""
        return self.number % _NUMBERS + 1


class DecodeSteps:
    """Runs steps through a ``DecodePath``. One thread at a time, the one that runs the model."""

    def __init__(self, manager: OffloadManager, path: DecodePath, link_bytes: float = 0) -> None:
        """``link_bytes``: that cross PCIe besides, while a layer's experts do; the mean of all layers."""
        self.path = path
        self.split = _first_split(manager, link_bytes)
        self._gap = IdleGap()
        self._manager = manager
        self._second: DecodePath | None = None
        self._inter = np.array([fmt.inter for fmt in manager.store.formats])
        self._number = 0  # of the next step
        self._open: deque[_Open] = deque()  # the oldest first
        self._marked: _Open | None = None  # whose work was enqueued last
        self._given_up: list[Mailboxes] = []
        self._finished: _Open | None = None  # what it has noted has not been learnt from

    @property
    def last(self) -> FinishedStep | None:
        """What the last finished step left, until it has been learnt from; None if it teaches nothing."""
        return None if self._finished is None else FinishedStep.of(self._finished.parts, self._finished.landing)

    @property
    def num_open(self) -> int:
        """Steps that have begun and are not finished."""
        return len(self._open)

    def use_second(self, path: DecodePath | None) -> None:
        """The path of second halves, or None for none any more. Between steps."""
        self._second = path

    def begin(self, rows: int, second_rows: int | None = None, land: bool = True) -> None:
        """Opens a step of ``rows`` sequences; rows of padding come behind them.

        Args:
            second_rows: of a step that runs as two halves, the second one's; ``rows`` are then the first one's.
            land: whether its experts may land in cache slots, as far as its path lets them.

        Raises:
            RuntimeError: too many steps are open.
        """
        if len(self._open) >= (MOST_OPEN if second_rows is None else 1):
            raise RuntimeError(f"too many steps are open ({len(self._open)}); finish one first")
        step = self._next_step(rows, second_rows, land)
        if self._open:
            self._manager.map_landed()
        else:
            self._manager.begin_step()
        offers = None
        try:
            if step.landing:
                offers = self._manager.offer(self.path.places)
            for part in step.parts:
                part.begin(self._order(step, part, offers))
        except BaseException:
            if offers is not None:
                self._manager.withdraw_offer()
            self._leave(step.parts)
            if not self._open:
                self._manager.leave_step()
            raise
        self._open.append(step)
        self._number += 1

    def enqueued(self) -> None:
        """All of the work of the step that was opened last has been enqueued on the device's current stream."""
        for part in self._open[-1].parts:
            part.enqueued()
        self._manager.tier.end_step()
        self._marked = self._open[-1]
        self.flush()

    def finish(self, learn: bool = True) -> None:
        """The work of the oldest open step has ended, and its notes are on the host.

        Args:
            learn: False for warm-up passes: nothing is counted.

        Raises:
            EngineError: the CPU engine failed in one of its layers, or in one of the step behind it if that is open;
                the sentence names step and layer.
        """
        step = self._open.popleft()
        try:
            failed = self._leave(step.parts)
            if step.landing:
                self._manager.take_landed(step.parts[0].notes.landed(step.told_number))
        finally:
            if not self._open:
                self._manager.leave_step()
        if failed:
            self._raise_failure(step)
        if learn:
            self._finished = step
        if self._open and self._open[-1] is self._marked:
            self.flush()  # while that one runs

    def abandon(self, ended: Callable[[], bool] = lambda: True) -> str:
        """Gives up all steps that are open, since one failed or does not end: answers every wait, and says where the
        oldest stood. The last steps.

        Returns soon, whatever the CPU engine does. A job that was begun may still write its layer's output and raise
        done again, long after this. Only the device may read that, in these steps, whose results are void.

        Args:
            ended: whether the device has come to the end of all that was enqueued.
        """
        where = f"decode step {self._open[0].number}: {self._waiting()}"
        deadline = time.monotonic() + _LATE_JOB_S
        paths = {part.path for step in self._open for part in step.parts}
        self._given_up = [path.mailboxes for path in paths]
        # Each part's stream waits for its own mailboxes: all are released before any is waited for.
        for mailboxes in self._given_up:
            mailboxes.abandon(0)
        self.release(ended)
        for mailboxes in self._given_up:
            mailboxes.abandon(max(0.0, deadline - time.monotonic()))
        self._open.clear()
        # Also marks the end of what was enqueued so far: it still reads slots.
        self._manager.abandon_step()
        return where

    def release(self, ended: Callable[[], bool]) -> None:
        """Of steps that were given up: answers what the device asks until it has come to their end, or does not."""
        deadline = time.monotonic() + _LATE_JOB_S
        # A step behind another one waits for the same words once more.
        while not ended() and time.monotonic() < deadline:
            for mailboxes in self._given_up:
                mailboxes.release_device()

    def flush(self) -> None:
        """Learns from the last finished step, if that has not been done. No step is open whose work is not enqueued."""
        finished, self._finished = self.last, None
        if finished is None:
            return
        self._manager.learn(
            StepRecord(finished.ids, finished.weights, finished.lanes[..., :3].sum(axis=0), finished.landing)
        )
        self.split.observe(finished.times(self._inter, self.path.timed, self._gap))
        # Most likely the next step is like this one.
        self.path.prepare_step(self.split.stream_parts(), self._manager.next_offers)

    def _next_step(self, rows: int, second_rows: int | None, land: bool) -> _Open:
        turn = self._number % MOST_OPEN
        parts = [StepPart(self.path, rows, turn)]
        if second_rows is not None:
            assert self._second is not None
            parts.append(StepPart(self._second, second_rows, turn))
        return _Open(self._number, tuple(parts), land and second_rows is None and self.path.places > 0)

    def _order(self, step: _Open, part: StepPart, offers: Offers | None) -> StepOrder:
        before = self._open[-1] if self._open else None
        # Where nothing lands the device need not tell one step from another.
        numbered = part.path.places > 0
        return StepOrder(
            part.rows,
            self.split.stream_parts(),
            self._manager.cache.told_map(),
            offers,
            step.told_number if numbered else 0,
            before.told_number if before is not None and before.landing else 0,
        )

    def _leave(self, parts: Sequence[StepPart]) -> bool:
        """Of a step of which nothing runs any more. The last one's CPU threads may sleep.

        Returns:
            Whether a job may have failed.
        """
        if self._open:
            return True
        failed = [part.path.mailboxes.disarm() for part in parts]
        return any(failed)

    def _raise_failure(self, step: _Open) -> None:
        """Of all failures the first one, if there is any; the others would otherwise be taken for the next step's."""
        failures = [(part, error) for part in step.parts if (error := take_failure(part.path)) is not None]
        number = f"{step.number} or {step.number + 1}" if self._open else f"{step.number}"
        for part, error in failures:
            raise EngineError(f"decode step {number}, {_half(step, part)}{error}") from error

    def _waiting(self) -> str:
        for step in self._open:
            for part in step.parts:
                if (layer := part.path.mailboxes.pending()) is not None:
                    return f"{_half(step, part)}layer {layer} has not been answered"
        return "no layer has a request open"


def _half(step: _Open, part: StepPart) -> str:
    """Where a step ran as halves, which one ``part`` was."""
    if len(step.parts) == 1:
        return ""
    return f"{'first' if part is step.parts[0] else 'second'} half, "


def _first_split(manager: OffloadManager, link_bytes: float) -> SplitController:
    """From the rates measured at load, for an expert of average size."""
    costs, formats = manager.costs, manager.store.formats
    size = sum(fmt.block_bytes for fmt in formats) / len(formats)
    streamed_s = size / costs.copy_bytes_per_s if costs.copy_bytes_per_s > 0 else float("inf")
    cpu_s = size / costs.cpu_bytes_per_s if costs.cpu_bytes_per_s > 0 else float("inf")
    return SplitController(streamed_s, cpu_s, max(manager.store.num_experts), link_bytes / size)
