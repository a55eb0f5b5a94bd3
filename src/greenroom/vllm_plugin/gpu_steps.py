"""GpuStepDriver: steps of few tokens run without the host, so that vLLM can capture them in its CUDA graphs.

vLLM may enqueue a step while the one before still runs (asynchronous scheduling), and so two may be open here. Of two
that are, the first is closed once the second has been enqueued: the device need not wait for what closing takes.

Two threads: vLLM's, which runs steps, and a watcher. ``_lock`` is held while a step is opened or closed. The watcher
closes steps behind which nothing follows, so that the CPU engine's threads sleep; and without the lock it gives up one
that does not end, which the other thread may be waiting for, or be enqueueing work behind. Whatever changes the steps
holds ``_verdict``, and never waits for the device meanwhile. While a graph is captured no thread may ask the device
anything, so vLLM's warm-up steps, which captures follow, are closed at once.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.decode_steps import MOST_OPEN, DecodeSteps
from greenroom.experts.mailbox import Mailboxes
from greenroom.vllm_plugin.conflicts import MAX_GRAPH_TOKENS
from greenroom.vllm_plugin.rank import RankExperts
from greenroom.vllm_plugin.steps import StepDriver, T
from greenroom.watchdog import Watchdog

IDLE_S = 0.02
"""Behind a step for so long the CPU engine's threads stay awake for the next one."""

WATCHDOG_S = 60.0


class Marker(Protocol):
    """A point in the device's work; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether it has been reached."""

    def synchronize(self) -> None:
        """Waits for it."""


class _Reached:
    """On a CPU, where work is done when it has been called."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True)
class _Open:
    """A step whose work has been enqueued: ``end`` is behind it."""

    end: Marker
    learn: bool
    watchdog: Watchdog


class GpuStepDriver(StepDriver):
    """Steps of up to ``MAX_GRAPH_TOKENS`` tokens through a ``DecodePath``, longer ones by the host.

    Runs on a CPU device too, for tests.
    """

    way = (
        f"steps of up to {MAX_GRAPH_TOKENS} tokens run without the host, in CUDA graphs where vLLM captures them; "
        "longer ones the host decides, layer by layer"
    )

    def __init__(self, experts: RankExperts, watchdog_s: float = WATCHDOG_S) -> None:
        super().__init__(experts)
        manager = self.manager
        assert experts.engine is not None
        self._device = manager.tier.device
        on_gpu = self._device.type == "cuda"
        self._watchdog_s = watchdog_s
        self._mailboxes = Mailboxes(experts.engine, manager.store, MAX_GRAPH_TOKENS, experts.top_k, pin_memory=on_gpu)
        self._path = DecodePath(
            manager.store,
            manager.tier.slots,
            self._mailboxes,
            MAX_GRAPH_TOKENS,
            experts.top_k,
            manager.places,
            manager.admission.cache_topk,
        )
        self._steps = DecodeSteps(manager, self._path)
        self._hostless = False
        self._lock = threading.RLock()
        self._verdict = threading.Lock()  # a step is finished or given up, never both
        self._opened: deque[_Open] = deque()  # the oldest first
        self._given_up: str | None = None
        self._failure: EngineError | None = None
        self._closed = threading.Event()
        self._news = threading.Event()
        self._warm_up()
        self._watcher = threading.Thread(target=self._watch, name="greenroom-steps", daemon=True)
        self._watcher.start()

    def run_layer(self, index: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._hostless:
            return self._run_hostless_layer(index, hidden, ids, weights)
        return super().run_layer(index, hidden, ids, weights)

    def settle(self) -> None:
        with self._lock:
            self._close_steps()
            self._raise_failure()
            self._steps.flush()

    def close(self) -> None:
        if self._closed.is_set():
            return
        # While there is still a watcher, which gives up a step that does not end.
        with self._lock:
            self._close_steps()
        self._closed.set()
        self._news.set()
        self._watcher.join()
        self._mailboxes.close()

    def mark_end(self) -> Marker:
        """A marker behind all that has been enqueued."""
        if self._device.type != "cuda":
            return _Reached()
        end = torch.cuda.Event()
        end.record(torch.cuda.current_stream(self._device))
        return end

    def _run(self, tokens: int, work: Callable[[], T]) -> T:
        self._hostless = tokens <= MAX_GRAPH_TOKENS
        try:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                # Enqueues only; what surrounds a step is done whenever the graph is replayed.
                return self._captured(tokens, work)
            with self._lock:
                ahead = self._hostless and self.rows is not None
                self._close_steps(leave=MOST_OPEN - 1 if ahead else 0)
                self._raise_failure()
                return self._hostless_step(tokens, work) if self._hostless else super()._run(tokens, work)
        finally:
            self._hostless = False

    def _captured(self, tokens: int, work: Callable[[], T]) -> T:
        if not self._hostless:
            raise EngineError(
                f"--moe-offload captures CUDA graphs of up to {MAX_GRAPH_TOKENS} tokens, and vLLM captures {tokens}; "
                "give smaller cudagraph_capture_sizes"
            )
        return work()

    def _hostless_step(self, tokens: int, work: Callable[[], T]) -> T:
        with self._verdict:
            if self._given_up is None:
                rows = tokens if self.rows is None else min(self.rows, tokens)
                self._steps.begin(rows, land=self.rows is not None)
        self._raise_failure()
        try:
            result = work()
        except BaseException:
            with self._verdict:
                if self._given_up is None:
                    self._given_up = self._steps.abandon(self.mark_end().query)
            raise
        with self._verdict:
            if self._given_up is None:
                self._steps.enqueued()
                end = self.mark_end()
                self._opened.append(_Open(end, self.rows is not None, Watchdog(self._watchdog_s)))
        if self._given_up is not None:
            # While this one was enqueued: it may wait for answers, too.
            self._steps.release(self.mark_end().query)
        self._raise_failure()
        self._close_ended()
        if self.rows is None:
            self._close_steps()
        self._news.set()
        return result

    def _run_hostless_layer(
        self, index: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Rounds the batch up to a power of two, so that kernels are compiled for few sizes; padding goes nowhere."""
        tokens = len(hidden)
        inner = hidden.to(self.manager.store.formats[index].dtype).contiguous()
        if padding := _bucket(tokens) - tokens:
            inner = F.pad(inner, (0, 0, 0, padding))
            ids = F.pad(ids, (0, 0, 0, padding), value=-1)
            weights = F.pad(weights, (0, 0, 0, padding))
        return self._path.run(index, inner, ids, weights)[:tokens].to(hidden.dtype)

    def _close_steps(self, leave: int = 0) -> None:
        """Waits for the steps under way, the last ``leave`` excepted. The lock is held."""
        while self._given_up is None and len(self._opened) > leave:
            self._opened[0].end.synchronize()
            self._close_oldest()

    def _close_ended(self) -> None:
        """While the last one runs. The lock is held."""
        while self._given_up is None and len(self._opened) > 1 and self._opened[0].end.query():
            self._close_oldest()

    def _close_oldest(self) -> None:
        """It has ended, or was given up."""
        with self._verdict:
            if self._given_up is not None:
                return
            try:
                self._steps.finish(self._opened.popleft().learn)
            except EngineError as error:
                self._failure = error

    def _raise_failure(self) -> None:
        if self._given_up is not None:
            raise EngineError(f"expert offloading was given up: {self._given_up}")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._news.wait()
            self._news.clear()
            while self._opened and self._given_up is None and not self._closed.is_set():
                if self._news.wait(IDLE_S):
                    break  # another step has begun, or the end
                self._look_after()

    def _look_after(self) -> None:
        """Closes steps that have ended if the last one has, or gives up all when one lasts too long."""
        if self._lock.acquire(blocking=False):
            try:
                if self._opened and self._opened[-1].end.query():
                    self._close_steps()
            finally:
                self._lock.release()
        with self._verdict:
            if self._given_up is None and self._opened and self._opened[0].watchdog.expired():
                where = self._steps.abandon(self._opened[-1].end.query)
                self._given_up = f"{where} within {self._watchdog_s:g} s"

    def _warm_up(self) -> None:
        """Compiles the kernels for all sizes, and has buffers of libraries allocated, before memory is profiled."""
        store, slots = self.manager.store, self.manager.tier.slots
        kinds = {
            (store.formats[layer], store.num_experts[layer], len(slots[layer])): layer for layer in range(len(store))
        }
        tokens = 1
        while tokens <= MAX_GRAPH_TOKENS:
            self._steps.begin(tokens, land=False)
            for layer in kinds.values():
                fmt = store.formats[layer]
                hidden = torch.zeros(tokens, fmt.hidden, dtype=fmt.dtype, device=self._device)
                ids = torch.zeros(tokens, self._path.top_k, dtype=torch.int32, device=self._device)
                weights = torch.zeros(tokens, self._path.top_k, dtype=torch.float32, device=self._device)
                self._path.run(layer, hidden, ids, weights)
            self._steps.enqueued()
            self.mark_end().synchronize()
            self._steps.finish(learn=False)
            tokens *= 2


def _bucket(tokens: int) -> int:
    """The power of two from ``tokens`` on."""
    return 1 << (tokens - 1).bit_length()
