"""DecodeSteps: what the host does around decode steps whose layers run without it.

The order of one step, the device's work between ``begin`` and ``finish``::

    begin(rows)   copied experts enter the map; map, split and offered slots are published; CPU threads start polling
    ...           the caller enqueues the step's work, or replays its graph
    enqueued()    marks its end; then, while the device works, learns from the step before
    ...           the caller waits for the work's end
    finish()      what landed in offered slots enters the map; keeps what the step's mailboxes say; CPU threads park;
                  errors surface

A step may run as two halves at once, each through a path of its own with mailboxes of its own. They share the map, the
split and what is learnt: the host treats them as one step.

So statistics and swaps are off the step's path. A victim that is chosen while step N runs leaves the map at
N + 1, and its slot is written after the end of N, which is the last step that may read it.

What lands in passing, in slots that were offered to step N, is in the map of N + 1. A step that runs as two halves is
offered none: each half writes where it does not read, but the other may.
"""

import time
from dataclasses import dataclass

import numpy as np

from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.landing import Offers
from greenroom.experts.manager import OffloadManager, StepRecord
from greenroom.experts.split import AskedLayers, LaneTimes, SplitController
from greenroom.experts.step_part import StepPart, busy_s

_WAITED_NS = 10_000
"""The device's clock between the GPU's experts and combine's end, if it did not wait for the CPU: less than this."""

_LATE_JOB_S = 0.5
"""How long a step that is given up waits for CPU jobs that were begun."""


@dataclass(frozen=True)
class FinishedStep:
    """Copies of what a step left in the mailboxes of its parts.

    ids: int32 [layers, rows, K]. weights: float32 [layers, rows, K]. All parts' rows.
    lanes: int32 [parts, layers, 5], experts that were resident, streamed, on the CPU; the divided one, or -1, and how
        many rows of its inner width were streamed.
    busy_ns: int64 [parts, layers], the CPU's time. spans: int64 [parts, layers, 8], the device's clock.
    landing: slots were offered to the step.
    """

    ids: np.ndarray
    weights: np.ndarray
    lanes: np.ndarray
    busy_ns: np.ndarray
    spans: np.ndarray
    landing: bool

    @classmethod
    def of(cls, parts: list[StepPart], landing: bool) -> "FinishedStep":
        if len(parts) > 1:
            return cls(
                np.concatenate([part.ids[:, : part.rows] for part in parts], axis=1),
                np.concatenate([part.weights[:, : part.rows] for part in parts], axis=1),
                np.stack([part.lanes for part in parts]),
                np.stack([part.busy_ns for part in parts]),
                np.stack([part.spans for part in parts]),
                landing,
            )
        # The usual case, and the device idles: copies, and nothing else.
        part = parts[0]
        return cls(
            part.ids[:, : part.rows].copy(),
            part.weights[:, : part.rows].copy(),
            part.lanes[None].copy(),
            part.busy_ns[None].copy(),
            part.spans[None].copy(),
            landing,
        )

    def times(self, inter: np.ndarray, timed: bool) -> LaneTimes:
        """
        Args:
            inter: int [layers], inner width of the experts.
            timed: whether the device has a clock; without one nothing is known about its lane.
        """
        divided = self.lanes[..., 4] / inter
        crossing = self.lanes[..., 1] + divided
        streamed, on_cpu = crossing > 0, self.lanes[..., 2] > 0
        spans = self.spans[streamed]
        return LaneTimes(
            streamed=float(crossing.sum()) if timed else 0,
            # Halves share the link while both read from it; their CPU jobs take turns.
            streamed_s=busy_s(spans[:, 0], spans[:, 1]),
            cpu=float((self.lanes[..., 2] - divided).sum()),
            cpu_s=float(self.busy_ns[on_cpu].sum()) / 1e9,
            streaming_layers=int(streamed.any(axis=0).sum()),
            asked=self._asked(on_cpu[0], crossing[0], divided[0]) if timed and len(self.lanes) == 1 else None,
        )

    def _asked(self, on_cpu: np.ndarray, crossing: np.ndarray, divided: np.ndarray) -> AskedLayers:
        """Of a step in one piece: in halves one's answer also waits for the other's job.

        Args:
            on_cpu: bool [layers], which ones. crossing, divided: float [layers].
        """
        posted, crossed, combined = (self.spans[0, on_cpu, moment] for moment in range(3))
        # An older time means that nothing crossed.
        waited = combined - np.maximum(posted, crossed) > _WAITED_NS
        work = self.busy_ns[0, on_cpu]
        delays = np.where(waited, np.maximum(combined - posted - work, 0), 0)
        return AskedLayers(
            streamed=crossing[on_cpu],
            cpu=(self.lanes[0, :, 2] - divided)[on_cpu],
            work_s=work / 1e9,
            delays_s=delays / 1e9,
            seconds=np.maximum(combined - posted, 0) / 1e9,
        )


class DecodeSteps:
    """Runs steps through a ``DecodePath``. One thread at a time, the one that runs the model."""

    def __init__(self, manager: OffloadManager, path: DecodePath, link_bytes: float = 0) -> None:
        """``link_bytes``: that cross PCIe besides, while a layer's experts do; the mean of all layers."""
        self.path = path
        self.split = _first_split(manager, link_bytes)
        self._manager = manager
        self._first = StepPart(path)
        self._second: StepPart | None = None
        self._parts = [self._first]  # of the step that is open, or was last
        self._inter = np.array([fmt.inter for fmt in manager.store.formats])
        self._number = 0
        self._landing = False  # slots are offered to the step that is open
        self._finished: FinishedStep | None = None

    @property
    def last(self) -> FinishedStep | None:
        """What the last step left, until the next one has been enqueued; None if it taught nothing."""
        return self._finished

    def use_second(self, path: DecodePath | None) -> None:
        """The path of second halves, or None for none any more. Between steps."""
        self._second = None if path is None else StepPart(path)

    def begin(self, rows: int, second_rows: int | None = None, land: bool = True) -> None:
        """Opens a step of ``rows`` sequences; rows of padding come behind them.

        Args:
            second_rows: of a step that runs as two halves, the second one's; ``rows`` are then the first one's.
            land: whether its experts may land in cache slots, as far as its path lets them.
        """
        self._manager.begin_step()
        self._parts = []
        self._landing = land and second_rows is None and self.path.places > 0
        try:
            stream_parts = self.split.stream_parts()
            offers = self._manager.offer(self.path.places) if self._landing else None
            self._open(self._first, rows, stream_parts, offers)
            if second_rows is not None:
                assert self._second is not None
                self._open(self._second, second_rows, stream_parts)
        except BaseException:
            self._disarm()
            self._leave()
            raise

    def enqueued(self) -> None:
        """All of the step's work has been enqueued on the device's current stream."""
        self._manager.tier.end_step()
        self.flush()

    def finish(self, learn: bool = True) -> None:
        """The step's work has ended.

        Args:
            learn: False for warm-up passes: nothing is counted.

        Raises:
            EngineError: the CPU engine failed in one of its layers; the sentence names step and layer.
        """
        number, self._number = self._number, self._number + 1
        try:
            if self._disarm():
                self._raise_failure(number)
            if learn:
                self._keep()
        finally:
            self._leave()

    def abandon(self) -> str:
        """Gives up a step that failed or does not end: answers every wait, and says where it stood. The last step.

        Returns soon, whatever the CPU engine does. A job that was begun may still write its layer's output and raise
        done again, long after this. Only the device may read that, in this step, whose results are void.
        """
        waiting = self._waiting()
        deadline = time.monotonic() + _LATE_JOB_S
        # Each part's stream waits for its own mailboxes: all are released before any is waited for.
        for part in self._parts:
            part.path.mailboxes.abandon(0)
        for part in self._parts:
            part.path.mailboxes.abandon(max(0.0, deadline - time.monotonic()))
        # Also marks the end of what was enqueued so far: it still reads slots.
        self._manager.abandon_step()
        return f"decode step {self._number}: {waiting}"

    def flush(self) -> None:
        """Learns from the last finished step, if that has not been done."""
        finished, self._finished = self._finished, None
        if finished is None:
            return
        self._manager.learn(
            StepRecord(finished.ids, finished.weights, finished.lanes[..., :3].sum(axis=0), finished.landing)
        )
        self.split.observe(finished.times(self._inter, self.path.timed))
        # Most likely the next step is like this one.
        self.path.prepare_step(finished.ids.shape[1], self.split.stream_parts(), self._manager.next_offers)

    def _keep(self) -> None:
        self._finished = FinishedStep.of(self._parts, self._landing)

    def _open(self, part: StepPart, rows: int, stream_parts: np.ndarray, offers: Offers | None = None) -> None:
        self._parts.append(part)
        part.begin(rows, stream_parts, offers)

    def _leave(self) -> None:
        """Closes a step of which nothing runs any more."""
        try:
            if self._landing:
                self._manager.take_landed(self._first.landed)
        finally:
            self._manager.leave_step()

    def _disarm(self) -> bool:
        """Whether a job has failed."""
        failed = [part.path.mailboxes.disarm() for part in self._parts]
        return any(failed)

    def _raise_failure(self, number: int) -> None:
        """Of all failures the first one; the others would otherwise be taken for the next step's."""
        failures = [(part, error) for part in self._parts if (error := part.failure()) is not None]
        for part, error in failures:
            raise EngineError(f"decode step {number}, {self._of_half(part)}{error}") from error

    def _waiting(self) -> str:
        for part in self._parts:
            if (layer := part.path.mailboxes.pending()) is not None:
                return f"{self._of_half(part)}layer {layer} has not been answered"
        return "no layer has a request open"

    def _of_half(self, part: StepPart) -> str:
        """Where a step ran as halves, which one ``part`` was."""
        if len(self._parts) == 1:
            return ""
        return f"{'first' if part is self._parts[0] else 'second'} half, "


def _first_split(manager: OffloadManager, link_bytes: float) -> SplitController:
    """From the rates measured at load, for an expert of average size."""
    costs, formats = manager.costs, manager.store.formats
    size = sum(fmt.block_bytes for fmt in formats) / len(formats)
    streamed_s = size / costs.copy_bytes_per_s if costs.copy_bytes_per_s > 0 else float("inf")
    cpu_s = size / costs.cpu_bytes_per_s if costs.cpu_bytes_per_s > 0 else float("inf")
    return SplitController(streamed_s, cpu_s, max(manager.store.num_experts), link_bytes / size)
