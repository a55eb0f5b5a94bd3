"""HostlessSteps: forward passes of a few tokens whose experts do not need the host, with a watchdog.

The passes run eagerly or are captured as CUDA graphs; what they compute, and into which tensors, is their caller's.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from greenroom.engine.attach import RoutedExperts
from greenroom.engine.offload import offload_of
from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.decode_steps import DecodeSteps
from greenroom.experts.mailbox import Mailboxes
from greenroom.watchdog import wait_until

WARM_UP_STEPS = 2
"""Before a capture: they compile kernels, and let libraries allocate what they keep."""


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
        self._end = torch.cuda.Event() if self._device.type == "cuda" else None  # of the step that is waited for
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
        if self.given_up is not None:
            raise EngineError(self.given_up)
        steps = self.steps
        steps.begin(rows, second_rows, land=learn)
        try:
            work()
            steps.enqueued()
            self._mark_end()
            if meanwhile is not None:
                meanwhile()
            self._wait()
        except BaseException as error:
            self.given_up = f"the runner was given up: {error!r}"
            where = steps.abandon()
            if isinstance(error, TimeoutError):
                late = f"{where} within {self._watchdog_s:g} s"
                self.given_up = f"the runner was given up: {late}"
                raise EngineError(late) from error
            raise
        steps.finish(learn)

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
        """Counts the last step, which is otherwise done while the next one runs."""
        if self.given_up is None:
            self.steps.flush()

    def close(self) -> None:
        """Waits for the device and frees the mailboxes. Idempotent."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.steps.path.mailboxes.close()
        if self._second is not None:
            self._second.mailboxes.close()

    def _make_path(self, max_rows: int, places: int = 0) -> DecodePath:
        manager, on_gpu = self._manager, self._device.type == "cuda"
        mailboxes = Mailboxes(self._engine, manager.store, max_rows, self._top_k, on_gpu)
        try:
            slot_of = manager.tier.device_map(manager.cache.slot_of)
            path = DecodePath(
                manager.store,
                manager.tier.slots,
                slot_of,
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

    def _mark_end(self) -> None:
        """The step ends here, whatever is enqueued behind it."""
        if self._end is not None:
            self._end.record(torch.cuda.current_stream(self._device))

    def _wait(self) -> None:
        """Until the device has come to the step's end.

        Raises:
            TimeoutError: it takes too long.
        """
        if self._end is not None:
            wait_until(self._end.query, self._watchdog_s, "the device did not come to the step's end")


def _top_k(model: PreTrainedModel) -> int:
    """Choices a token."""
    experts = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    assert experts.top_k is not None
    return experts.top_k
