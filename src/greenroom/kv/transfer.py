"""TransferWorker: KV blocks on their way between device and host memory, each direction in order."""

import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from greenroom.kv.copies import BlockCopies, Direction

_POLL_S = 100e-6


@dataclass(frozen=True)
class TransferResult:
    """A job that has ended.

    nbytes: that it was to copy. seconds: from its first copy's start to its last one's end.
    error: why it failed; then what it was to write is undefined.
    """

    job: int
    direction: Direction
    nbytes: int
    seconds: float
    error: Exception | None


class TransferWorker(ABC):
    """Jobs of two directions, which run side by side; those of one direction run, and are reported, in order.

    Called by one thread.
    """

    def __init__(self, copies: BlockCopies, block_bytes: int) -> None:
        self._copies = copies
        self._block_bytes = block_bytes
        self._jobs = 0

    def submit(self, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> int:
        """Begins a job behind all device work enqueued so far; returns its number, counting from 0.

        Nobody else may write what it reads, or touch what it writes, until ``poll`` has reported it. A job that
        cannot begin is reported as failed.

        Args:
            blocks: int64 [n], on the device.
            parts: int64 [n], in host memory.
        """
        job, self._jobs = self._jobs, self._jobs + 1
        self._submit(job, direction, blocks, parts)
        return job

    @abstractmethod
    def _submit(self, job: int, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> None:
        pass

    @abstractmethod
    def poll(self) -> list[TransferResult]:
        """Jobs that have ended since the last call. Does not wait."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Returns once ``poll`` has something to report, at once if nothing is under way, or after the timeout."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all jobs. Idempotent."""


class ThreadWorker(TransferWorker):
    """For tensors in host memory: a thread for each direction."""

    def __init__(self, copies: BlockCopies, block_bytes: int) -> None:
        super().__init__(copies, block_bytes)
        self._threads = {direction: ThreadPoolExecutor(1, f"kv-{direction}") for direction in Direction}
        self._pending: dict[Direction, deque[Future[TransferResult]]] = {direction: deque() for direction in Direction}

    def _submit(self, job: int, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> None:
        # Device work of a CPU is done when its call returns, so there is nothing to order this behind.
        future = self._threads[direction].submit(self._run, job, direction, blocks.copy(), parts.copy())
        self._pending[direction].append(future)

    def _run(self, job: int, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> TransferResult:
        error = None
        started = time.perf_counter()
        try:
            self._copies.start(direction, blocks, parts)
        except Exception as reason:  # whatever it was, the job is over and its blocks must be given back
            error = reason
        seconds = time.perf_counter() - started
        return TransferResult(job, direction, len(blocks) * self._block_bytes, seconds, error)

    def poll(self) -> list[TransferResult]:
        """See ``TransferWorker``."""
        ended = []
        for pending in self._pending.values():
            while pending and pending[0].done():
                ended.append(pending.popleft().result())
        return ended

    def wait(self, timeout_s: float) -> None:
        """See ``TransferWorker``."""
        wait([pending[0] for pending in self._pending.values() if pending], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """See ``TransferWorker``."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)


@dataclass
class _StreamJob:
    """``alive`` is memory that the job's kernels read."""

    number: int
    nbytes: int
    start: torch.cuda.Event
    end: torch.cuda.Event
    alive: Any
    error: Exception | None


class StreamWorker(TransferWorker):
    """On a GPU: a stream for each direction.

    A job's stream first waits for the compute stream as it was at ``submit``: a store's blocks have been written by
    then, and a load's have been read by all that read them before they were given away. In the other direction
    nothing waits on the GPU: work that needs a load is enqueued after ``poll`` has seen the load's end.
    """

    def __init__(self, copies: BlockCopies, block_bytes: int, device: torch.device) -> None:
        super().__init__(copies, block_bytes)
        self._device = device
        self._streams = {direction: torch.cuda.Stream(device) for direction in Direction}
        self._pending: dict[Direction, deque[_StreamJob]] = {direction: deque() for direction in Direction}
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def _submit(self, job: int, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> None:
        stream = self._streams[direction]
        start, end = self._spare.pop() if self._spare else _timed_events()
        alive, error = None, None
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                start.record(stream)
                try:
                    alive = self._copies.start(direction, blocks, parts)
                except Exception as reason:
                    # Some copies may be under way: the job ends behind them like any other, but as a failure.
                    error = reason
                end.record(stream)
        self._pending[direction].append(
            _StreamJob(job, len(blocks) * self._block_bytes, start, end, alive, error),
        )

    def poll(self) -> list[TransferResult]:
        """See ``TransferWorker``."""
        ended = []
        for direction, pending in self._pending.items():
            while pending and _has_ended(pending[0]):
                job = pending.popleft()
                seconds = 0.0 if job.error else job.start.elapsed_time(job.end) / 1e3
                self._spare.append((job.start, job.end))
                ended.append(TransferResult(job.number, direction, job.nbytes, seconds, job.error))
        return ended

    def wait(self, timeout_s: float) -> None:
        """See ``TransferWorker``."""
        deadline = time.monotonic() + timeout_s
        first = [pending[0] for pending in self._pending.values() if pending]
        while first and not any(_has_ended(job) for job in first) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """See ``TransferWorker``."""
        for stream in self._streams.values():
            stream.synchronize()


def _has_ended(job: _StreamJob) -> bool:
    try:
        return job.end.query()
    except RuntimeError as error:  # the device has failed, and with it everything that it was to do
        job.error = error
        return True


def _timed_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def make_worker(copies: BlockCopies, block_bytes: int, device: torch.device) -> TransferWorker:
    """The worker for a device."""
    if device.type == "cuda":
        return StreamWorker(copies, block_bytes, device)
    return ThreadWorker(copies, block_bytes)
