"""DecodeSteps: what the host does around decode steps whose layers run without it.

The order of one step, the device's work between ``begin`` and ``finish``::

    begin(rows)   landed experts enter the map; map and split are published; CPU threads start polling
    ...           the caller enqueues the step's work, or replays its graph
    enqueued()    marks its end; then, while the device works, learns from the step before
    ...           the caller waits for the work's end
    finish()      keeps what the step's mailboxes say; CPU threads park; errors surface

So statistics and swaps are off the step's path. A victim that is chosen while step N runs leaves the map at
N + 1, and its slot is written after the end of N, which is the last step that may read it.
"""

from dataclasses import dataclass

import numpy as np

from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.manager import OffloadManager, StepRecord
from greenroom.experts.split import LaneTimes, SplitController


@dataclass(frozen=True)
class _Finished:
    """Copies of what a step left in the mailboxes.

    ids: int32 [layers, rows, K]. weights: float32 [layers, rows, K].
    lanes: int32 [layers, 5], experts that were resident, streamed, on the CPU; the divided one, or -1, and how
        many rows of its inner width were streamed.
    busy_ns: int64 [layers], the CPU's time. spans: int64 [layers, 8], the device's clock.
    """

    ids: np.ndarray
    weights: np.ndarray
    lanes: np.ndarray
    busy_ns: np.ndarray
    spans: np.ndarray

    def times(self, inter: np.ndarray, timed: bool) -> LaneTimes:
        """
        Args:
            inter: int [layers], inner width of the experts.
            timed: whether the device has a clock; without one nothing is known about its lane.
        """
        divided = self.lanes[:, 4] / inter
        crossing = self.lanes[:, 1] + divided
        streamed, on_cpu = crossing > 0, self.lanes[:, 2] > 0
        return LaneTimes(
            streamed=float(crossing.sum()) if timed else 0,
            streamed_s=float((self.spans[streamed, 1] - self.spans[streamed, 0]).sum()) / 1e9,
            cpu=float((self.lanes[:, 2] - divided).sum()),
            cpu_s=float(self.busy_ns[on_cpu].sum()) / 1e9,
        )


class DecodeSteps:
    """Runs steps through a ``DecodePath``. One thread at a time, the one that runs the model."""

    def __init__(self, manager: OffloadManager, path: DecodePath, mailboxes: Mailboxes) -> None:
        self.path = path
        self.split = _first_split(manager)
        self._manager = manager
        self._mailboxes = mailboxes
        # Made once: a view costs more than the copy of what it shows, and the device idles meanwhile.
        self._views = (
            mailboxes.ids.numpy(),
            mailboxes.weights.numpy(),
            mailboxes.request.numpy()[:, 1:6],
            mailboxes.busy_ns.numpy()[:, 0],
            path.lane_spans.numpy(),
        )
        self._inter = np.array([fmt.inter for fmt in manager.store.formats])
        self._rows = 0
        self._number = 0
        self._finished: _Finished | None = None

    def begin(self, rows: int) -> None:
        """Opens a step of ``rows`` sequences; rows of padding come behind them."""
        self._manager.begin_step()
        try:
            self.path.begin_step(rows, self.split.stream_parts())
            self._mailboxes.arm()
        except BaseException:
            self._manager.leave_step()
            raise
        self._rows = rows

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
            self._mailboxes.disarm()
            try:
                self._mailboxes.raise_failure()
            except EngineError as error:
                raise EngineError(f"decode step {number}, {error}") from error
            if learn:
                self._keep()
        finally:
            self._manager.leave_step()

    def abandon(self) -> str:
        """Gives up a step that failed or does not end: answers every wait, and says where it stood. The last step."""
        layer = self._mailboxes.pending()
        self._mailboxes.disarm()
        self._mailboxes.release()
        # Also marks the end of what was enqueued so far: it still reads slots.
        self._manager.abandon_step()
        where = "no layer has a request open" if layer is None else f"layer {layer} has not been answered"
        return f"decode step {self._number}: {where}"

    def flush(self) -> None:
        """Learns from the last finished step, if that has not been done."""
        finished, self._finished = self._finished, None
        if finished is None:
            return
        self._manager.learn(StepRecord(finished.ids, finished.weights, finished.lanes[:, :3]))
        self.split.observe(finished.times(self._inter, self.path.timed))

    def _keep(self) -> None:
        ids, weights, lanes, busy_ns, spans = self._views
        rows = self._rows
        self._finished = _Finished(
            ids[:, :rows].copy(), weights[:, :rows].copy(), lanes.copy(), busy_ns.copy(), spans.copy()
        )


def _first_split(manager: OffloadManager) -> SplitController:
    """From the rates measured at load, for an expert of average size."""
    costs, formats = manager.costs, manager.store.formats
    size = sum(fmt.block_bytes for fmt in formats) / len(formats)
    streamed_s = size / costs.copy_bytes_per_s if costs.copy_bytes_per_s > 0 else float("inf")
    cpu_s = size / costs.cpu_bytes_per_s if costs.cpu_bytes_per_s > 0 else float("inf")
    return SplitController(streamed_s, cpu_s, max(manager.store.num_experts))
