"""HostlessSteps: forward passes of a few tokens whose experts do not need the host, with a watchdog.

The passes run eagerly or are captured as CUDA graphs; what they compute, and into which tensors, is their caller's.
A pass may be enqueued while the one before still runs, so that the device need not wait for the host.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from greenroom.engine.attach import RoutedExperts
from greenroom.engine.offload import offload_of
from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.decode_steps import MOST_OPEN, DecodeSteps
from greenroom.experts.mailbox import Mailboxes
from greenroom.watchdog import wait_until

WARM_UP_STEPS = 2
"""Before a capture: they compile kernels, and let libraries allocate what they keep."""


@dataclass(frozen=True)
class _Started:
    """A step whose work has been enqueued, up to ``end``; None on a CPU device, where it has been done."""

    end: torch.cuda.Event | None
    learn: bool


class HostlessSteps:
    """Runs steps of one model. One thread at a time; the model must not be closed before.

    Attributes:
        steps: the experts' side.
        given_up: why no step can be run any more, once a step has failed halfway; None before.
    """

    def __init__(self, model: PreTrainedModel, max_rows: int, watchdog_s: float) -> None:
        """
        Args:
            model: offloaded; it has run before.
            max_rows: tokens of a step at most.
            watchdog_s: seconds after which a step that has not ended (on a CPU device: a layer) is given up.
        """
        offload = offload_of(model)
        manager = offload.manager
        self._device = offload.device
        self._engine = offload.engine
        self._manager = manager
        self._top_k = _top_k(model)
        self._watchdog_s = watchdog_s
        self.given_up: str | None = None
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._ends = [torch.cuda.Event() for _ in range(MOST_OPEN)] if self._device.type == "cuda" else []
        self._started: deque[_Started] = deque()  # the oldest first
        self._second: DecodePath | None = None
        path = self._make_path(max_rows, manager.places)
        try:
            self.steps = DecodeSteps(manager, path, offload.weights.bytes_beside_experts)
        except BaseException:
            path.mailboxes.close()
            raise

    def open_second(self, max_rows: int) -> None:
        """Makes ready for steps that run as two halves.

        Args:
            max_rows: tokens of a second half at most.

        Raises:
            torch.OutOfMemoryError: the device has no memory for their buffers.
        """
        self._second = self._make_path(max_rows)
        self.steps.use_second(self._second)

    def close_second(self) -> None:
        """Frees what ``open_second`` made, between steps; graphs of halves must be gone. Idempotent."""
        second, self._second = self._second, None
        self.steps.use_second(None)
        if second is not None:
            second.mailboxes.close()

    def run(
        self,
        work: Callable[[], None],
        rows: int,
        learn: bool = True,
        second_rows: int | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """One step.

        Args:
            work: enqueues the step: calls what ``hostless`` or ``capture`` returned.
            rows: tokens that are no padding; they come first.
            learn: False for warm-up passes: nothing is counted.
            second_rows: of a step of two halves, the second one's; ``rows`` are then the first one's.
            meanwhile: called while the device works, once all of the step has been enqueued. What it enqueues itself
                is not waited for.

        Raises:
            EngineError: the CPU engine failed, and another step may be run. Or the step did not end in time:
                nothing can be run any more. Both name layer and step.
        """
        self.wait()
        self.start(work, rows, learn, second_rows)
        if meanwhile is not None:
            with self._giving_up():
                meanwhile()
        self.wait()

    def start(self, work: Callable[[], None], rows: int, learn: bool = True, second_rows: int | None = None) -> None:
        """Enqueues one step, and lets the device begin; the one before may still run. ``wait`` must follow.

        Args: those of ``run``.

        Raises:
            EngineError: nothing can be run any more.
            RuntimeError: MOST_OPEN have been started already, or one if this one is to run as halves.
        """
        if self.given_up is not None:
            raise EngineError(self.given_up)
        self.steps.begin(rows, second_rows, land=learn)
        with self._giving_up():
            work()
            self.steps.enqueued()
            self._started.append(_Started(self._mark_end(), learn))

    def wait(self, leave: int = 0) -> None:
        """Waits for the steps that have been started, the last ``leave`` excepted.

        Raises:
            EngineError: as ``run``. Then nothing is left.
        """
        while len(self._started) > leave:
            with self._giving_up():
                self._wait_for(self._started[0])
            try:
                self.steps.finish(self._started.popleft().learn)
            except EngineError:
                self.discard()
                raise

    def discard(self) -> None:
        """Waits for the steps that have been started, whose results nobody wants: they are not counted.

        Raises:
            EngineError: they do not end.
        """
        while self._started:
            with self._giving_up():
                self._wait_for(self._started[0])
            self._started.popleft()
            # A job that has failed in it concerns nobody.
            with suppress(EngineError):
                self.steps.finish(learn=False)

    def hostless(self, forward: Callable[[], None], second: Callable[[], None] | None = None) -> Callable[[], None]:
        """``forward`` with the experts inside going through the decode path.

        With ``second`` both are halves of one step, on two streams: they must share nothing that either writes.
        """

        def work() -> None:
            if second is None:
                with self._manager.without_host(self.steps.path.run):
                    forward()
            else:
                self._run_halves(forward, second)

        return work

    def capture(
        self,
        forward: Callable[[], None],
        second: Callable[[], None] | None = None,
        *,
        pool: "torch.cuda._POOL_HANDLE | None" = None,
    ) -> torch.cuda.CUDAGraph:
        """``hostless`` as a graph. Its kernels have run before; graphs that share ``pool`` never run at once."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.hostless(forward, second)()
        return graph

    def flush(self) -> None:
        """Waits for what has been started, and counts the last step, which is otherwise done while the next one runs.

        Raises:
            EngineError: as ``run``.
        """
        self.wait()
        if self.given_up is None:
            self.steps.flush()

    def close(self) -> None:
        """Waits for the device and frees the mailboxes. Idempotent."""
        try:
            self.discard()
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.steps.path.mailboxes.close()
            if self._second is not None:
                self._second.mailboxes.close()

    def _make_path(self, max_rows: int, places: int = 0) -> DecodePath:
        manager, on_gpu = self._manager, self._device.type == "cuda"
        mailboxes = Mailboxes(self._engine, manager.store, max_rows, self._top_k, on_gpu)
        try:
            path = DecodePath(
                manager.store,
                manager.tier.slots,
                mailboxes,
                max_rows,
                self._top_k,
                places,
                manager.admission.cache_topk,
            )
        except BaseException:
            mailboxes.close()
            raise
        path.wait_limit_s = self._watchdog_s
        return path

    def _run_halves(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """The second half goes to a stream that leaves the current one before the first half and joins it behind.

        Neither half waits for the other: each waits for its own mailboxes, which the CPU engine answers in any order.
        So they end, however their work is interleaved.
        """
        path, side = self._second, self._side
        assert path is not None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with self._manager.without_host(self.steps.path.run):
                first()
            with nullcontext() if side is None else torch.cuda.stream(side), self._manager.without_host(path.run):
                second()
        finally:
            if side is not None:
                torch.cuda.current_stream(self._device).wait_stream(side)

    def _mark_end(self) -> torch.cuda.Event | None:
        """The step ends here, whatever is enqueued behind it."""
        if not self._ends:
            return None
        # That of the step before the one before, which has been waited for.
        end = self._ends.pop(0)
        self._ends.append(end)
        end.record(torch.cuda.current_stream(self._device))
        return end

    def _wait_for(self, started: _Started) -> None:
        """Until the device has come to the step's end.

        Raises:
            TimeoutError: it takes too long.
        """
        if started.end is not None:
            wait_until(started.end.query, self._watchdog_s, "the device did not come to the step's end")

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Whatever fails inside, while steps are open: no step can be run any more."""
        try:
            yield
        except BaseException as error:
            self._started.clear()
            self.given_up = f"the runner was given up: {error!r}"
            where = self.steps.abandon(self._all_ended())
            if isinstance(error, TimeoutError):
                late = f"{where} within {self._watchdog_s:g} s"
                self.given_up = f"the runner was given up: {late}"
                raise EngineError(late) from error
            raise

    def _all_ended(self) -> Callable[[], bool]:
        """Whether the device has done all that has been enqueued so far."""
        if self._device.type != "cuda":
            return lambda: True
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(self._device))
        return end.query


def _top_k(model: PreTrainedModel) -> int:
    """Choices a token."""
    experts = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    assert experts.top_k is not None
    return experts.top_k
