"""HostlessSteps: forward passes of a few tokens whose experts do not need the host, with a watchdog.

The passes run eagerly or are captured as CUDA graphs; what they compute, and into which tensors, is their caller's.
"""

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from greenroom.engine.attach import RoutedExperts
from greenroom.engine.offload import offload_of
from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.decode_steps import DecodeSteps
from greenroom.experts.mailbox import Mailboxes

BUCKETS = (1, 2, 4, 8, 16, 32)
"""Tokens that a step is made for; a batch takes the next larger one, its last rows are padding."""

WARM_UP_STEPS = 2
"""Before a capture: they compile kernels, and let libraries allocate what they keep."""


def bucket_for(rows: int) -> int:
    """The smallest bucket that holds ``rows``, which is at most the largest one."""
    return next(size for size in BUCKETS if size >= rows)


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
        manager, top_k = offload.manager, _top_k(model)
        self._device = offload.device
        self._manager = manager
        self._watchdog_s = watchdog_s
        self.given_up: str | None = None
        pin = self._device.type == "cuda"
        self._mailboxes = Mailboxes(offload.engine, manager.store, max_rows, top_k, pin)
        try:
            slot_of = manager.tier.device_map(manager.cache.slot_of)
            path = DecodePath(manager.store, manager.tier.slots, slot_of, self._mailboxes, max_rows, top_k)
            path.wait_limit_s = watchdog_s
            self.steps = DecodeSteps(manager, path, self._mailboxes)
        except BaseException:
            self._mailboxes.close()
            raise

    def run(self, work: Callable[[], None], rows: int, learn: bool = True) -> None:
        """One step.

        Args:
            work: enqueues the step: calls what ``hostless`` or ``capture`` returned.
            rows: tokens that are no padding; they come first.
            learn: False for warm-up passes: nothing is counted.

        Raises:
            EngineError: the CPU engine failed, and another step may be run. Or the step did not end in time:
                nothing can be run any more. Both name layer and step.
        """
        if self.given_up is not None:
            raise EngineError(self.given_up)
        steps = self.steps
        steps.begin(rows)
        try:
            work()
            steps.enqueued()
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

    def hostless(self, forward: Callable[[], None]) -> Callable[[], None]:
        """``forward`` with the experts inside going through the decode path."""

        def work() -> None:
            with self._manager.without_host(self.steps.path.run):
                forward()

        return work

    def capture(
        self, forward: Callable[[], None], pool: "torch.cuda._POOL_HANDLE | None" = None
    ) -> torch.cuda.CUDAGraph:
        """``forward`` as a graph. Its kernels have run before; graphs that share ``pool`` never run at once."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.hostless(forward)()
        return graph

    def flush(self) -> None:
        """Counts the last step, which is otherwise done while the next one runs."""
        if self.given_up is None:
            self.steps.flush()

    def close(self) -> None:
        """Waits for the device and frees the mailboxes. Idempotent."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._mailboxes.close()

    def _wait(self) -> None:
        """Until the device has done what was enqueued.

        Raises:
            TimeoutError: it takes too long.
        """
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + self._watchdog_s
        while not event.query():
            if time.monotonic() > deadline:
                raise TimeoutError


def _top_k(model: PreTrainedModel) -> int:
    """Choices a token."""
    experts = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    assert experts.top_k is not None
    return experts.top_k
