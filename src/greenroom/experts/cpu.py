"""Routed experts on the CPU: the face of the native engine.

An engine owns its worker threads. Jobs run in the order in which they were submitted, each shared by all
threads; threads without work sleep. Any Python thread may submit, and waiting releases the interpreter lock.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch

from greenroom.errors import ConfigError, EngineError
from greenroom.experts.attention import native_attention
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.job_checks import check_job
from greenroom.experts.linear import native_linear
from greenroom.experts.native import Isa, native_format
from greenroom.experts.sequence import StepSequence
from greenroom.experts.ticket import Ending, LateJobError, Ticket
from greenroom.kernels.cpu.library import (
    NativeJob,
    NativeMailbox,
    last_error,
    load_library,
)

logger = logging.getLogger(__name__)


_LATE_JOB_S = 5.0
"""Seconds without any progress after which ``close`` leaves a job to itself."""


class Closeable(Protocol):
    """What an engine closes before it ends. It is forgotten by then, unless a job that was given up still runs."""

    def close(self) -> None: ...


class CpuExperts:
    """The native engine: ``threads`` workers that compute routed experts.

    Args:
        threads: number of workers, at least 1. Leave a core to the program itself.
        cores: core numbers, one a worker, to which they are pinned; None leaves them to the scheduler.
        isa: instruction set; ``AUTO`` takes the best one.
        batch_invariant: a token's result does not depend, by a single bit, on the other tokens of its job.
        watchdog_s: seconds without any progress after which a job is no longer waited for.
        callers_help: a thread that waits for a job works meanwhile, as one of ``threads`` and on the first core. What
            hangs in its own part of the work it cannot stop waiting for.

    Raises:
        ConfigError: ``cores`` has another length.
        EngineError: the engine cannot be created with these arguments on this machine.
    """

    def __init__(
        self,
        threads: int,
        cores: Sequence[int] | None = None,
        isa: Isa = Isa.AUTO,
        batch_invariant: bool = False,
        watchdog_s: float = 60.0,
        callers_help: bool = False,
    ) -> None:
        self._handle: ctypes.c_void_p | None = None
        self._lock = Lock()
        self._tickets: dict[int, Ticket] = {}
        self._mailboxes: list[Closeable] = []
        if cores is not None and len(cores) != threads:
            raise ConfigError(f"{threads} CPU threads need as many core numbers, not {len(cores)}")
        self._library = load_library()
        handle = ctypes.c_void_p()
        numbers = None if cores is None else (ctypes.c_int32 * threads)(*cores)
        choices = int(isa), batch_invariant, callers_help
        if self._library.gr_engine_create(threads, numbers, *choices, ctypes.byref(handle)):
            raise EngineError(last_error(self._library))
        self._native = handle  # for jobs that are still waited for while the engine closes
        self._threads = threads
        self._watchdog_s = watchdog_s
        self._isa = Isa(self._library.gr_engine_isa(handle))
        self._handle = handle

    @property
    def threads(self) -> int:
        """Number of workers."""
        return self._threads

    @property
    def isa(self) -> Isa:
        """The instruction set in use; never ``AUTO``."""
        return self._isa

    def submit(
        self,
        format: ExpertFormat,
        experts: np.ndarray,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        divided: tuple[int, int] | None = None,
        ending: Ending | None = None,
        memory: tuple[object, ...] = (),
    ) -> Ticket:
        """Queues ``out[t] = sum over k of weights[t, k] * expert ids[t, k] (hidden[t])`` and returns at once.

        Args:
            experts: uint64 [E], address of each expert's block; 0 for those that are not chosen. The blocks'
                memory may be page-locked, and the same blocks may serve other jobs.
            hidden: ``format.dtype`` [T, format.hidden].
            ids: int32 [T, K]. Negative ones and those >= E are skipped.
            weights: float32 [T, K].
            out: float32 [T, format.hidden], overwritten; it must not overlap the inputs.
            divided: an expert of which somebody else computes the first rows of the inner width, and the first
                row that is computed here, a multiple of 32. The bias of its second projection is added here.
            ending: told when the job has ended, well or not.
            memory: holds the blocks; kept alive until the job has ended, as all other arguments are.

        All are contiguous CPU tensors, page-locked or not, and must not change until the job is done.

        Raises:
            ValueError: a tensor has another shape, dtype, device or stride.
            EngineError: the engine is closed or refuses the job.
        """
        tokens, top_k = check_job(format, experts, hidden, ids, weights, out)
        native = native_format(format)
        words = None if divided is None else (ctypes.c_int32 * 2)(*divided)
        job = NativeJob(
            format=ctypes.pointer(native),
            experts=experts.ctypes.data,
            num_experts=experts.shape[0],
            top_k=top_k,
            tokens=tokens,
            hidden=hidden.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
            divided=None if words is None else ctypes.addressof(words),
            done=None if ending is None else ending.done.data_ptr(),
            done_value=0 if ending is None else ending.value,
            busy_ns=None if ending is None else ending.busy_ns.data_ptr(),
        )
        return self._queue(
            self._library.gr_submit, (ctypes.byref(job),), (experts, hidden, ids, weights, out, words, ending, memory)
        )

    def run(
        self,
        format: ExpertFormat,
        experts: np.ndarray,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        divided: tuple[int, int] | None = None,
        memory: tuple[object, ...] = (),
    ) -> None:
        """``submit`` and ``wait`` in one."""
        self.submit(format, experts, hidden, ids, weights, out, divided, memory=memory).wait()

    def linear(
        self,
        weight: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x @ weight.T + bias`` for a few rows, after the jobs that were submitted before; blocks until it is done.

        Sums are kept in fp32. A row of ``x`` gives the same bits whichever other rows are there.

        Args:
            weight: [rows, width] of bfloat16, float16 or float32.
            x: [..., width].
            bias: [rows].
            out: [..., rows], overwritten and returned; it must not overlap the inputs. None makes one.

        All are contiguous CPU tensors of one dtype, and must not change meanwhile.

        Raises:
            ValueError: a tensor has another shape, dtype, device or stride.
            EngineError: the engine is closed or refuses the product.
        """
        if out is None:
            out = x.new_empty((*x.shape[:-1], weight.shape[0]))
        job = native_linear(weight, x, bias, out)
        self._queue(self._library.gr_linear_submit, (ctypes.byref(job),), (weight, x, bias, out)).wait()
        return out

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """``softmax(scale * query key^T) value`` of one new token; blocks until it is done. Sums are kept in fp32.

        Args:
            query: [Hq, D], contiguous.
            key: [Hk, S, D], of which a row lies in one piece. Each of its heads serves Hq / Hk of the query's.
            value: [Hk, S, Dv], the same.

        All are CPU tensors of one dtype, BF16 or float32, that ``can_attend`` takes.

        Returns:
            [Hq, Dv].

        Raises:
            ValueError: a tensor has another shape, dtype, device or stride.
            EngineError: the engine is closed.
        """
        out = query.new_empty(query.shape[0], value.shape[-1])
        job = native_attention(query, key, value, scale, out)
        self._queue(self._library.gr_attention_submit, (ctypes.byref(job),), (query, key, value, out)).wait()
        return out

    def run_sequence(self, sequence: StepSequence, keep: tuple[object, ...]) -> None:
        """Runs its steps after the jobs that were submitted before; blocks until they are done.

        Args:
            keep: what they read and write. Only that they make sense by themselves is checked.

        Raises:
            EngineError: the engine is closed or refuses a step.
        """
        self._queue(self._library.gr_sequence_submit, (sequence.native, len(sequence.native)), (sequence, keep)).wait()

    def throttle(self, factor: float) -> None:
        """Makes all work take ``factor`` (at least 1) times as long, for tests and benchmarks of slow machines.

        A change ends the pauses that the factor before it made.

        Raises:
            EngineError: the engine is closed, or ``factor`` is below 1 or not finite.
        """
        with self._lock:
            if self._handle is None:
                raise EngineError("the CPU engine is closed")
            if self._library.gr_engine_throttle(self._handle, factor):
                raise EngineError(last_error(self._library))

    def open_mailboxes(self, boxes: "ctypes.Array[NativeMailbox]", owner: Closeable) -> ctypes.c_void_p:
        """The handle of new native mailboxes. ``owner`` is kept alive, and closed by ``close``, until it is forgotten.

        Raises:
            EngineError: the engine is closed or refuses one of them.
        """
        handle = ctypes.c_void_p()
        with self._lock:
            if self._handle is None:
                raise EngineError("the CPU engine is closed")
            if self._library.gr_mailboxes_create(self._handle, boxes, len(boxes), ctypes.byref(handle)):
                raise EngineError(last_error(self._library))
            self._mailboxes.append(owner)
        return handle

    def forget_mailboxes(self, owner: Closeable) -> None:
        """Lets go of what ``open_mailboxes`` was given; unknown ones are ignored."""
        with self._lock:
            self._mailboxes = [other for other in self._mailboxes if other is not owner]

    def close(self) -> None:
        """Closes its mailboxes, waits for submitted jobs and ends the threads. Closing twice is fine.

        A job that hangs, of abandoned mailboxes or any other, is not waited for, nor are those behind it: the threads
        go on then, all that they may touch is kept until the process ends, and a warning says so.
        """
        with self._lock:
            handle, self._handle = self._handle, None
            tickets = list(self._tickets.values())
            mailboxes = list(self._mailboxes)
        for owner in mailboxes:
            owner.close()
        with self._lock:
            late = len(self._mailboxes) > 0
        # Nothing new can be submitted now, and nobody is inside the native engine once these are settled.
        if late or not all(ticket.settle(_LATE_JOB_S) for ticket in tickets):
            if handle is not None:
                keep_for_ever(self)  # and with it tickets and mailboxes, and the memory of their jobs
                logger.warning("the CPU engine's threads are left running: a job that was given up does not end")
            return
        if handle is not None:
            self._library.gr_engine_destroy(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _queue(self, submit: Callable[..., int], arguments: tuple[object, ...], keep: tuple[object, ...]) -> Ticket:
        """The ticket of a job that the native ``submit`` has queued. keep: what the job reads and writes."""
        number = ctypes.c_uint64()
        with self._lock:
            if self._handle is None:
                raise EngineError("the CPU engine is closed")
            if submit(self._handle, *arguments, ctypes.byref(number)):
                raise EngineError(last_error(self._library))
            ticket = Ticket(partial(self._settle, number.value), keep, self._watchdog_s)
            self._tickets[number.value] = ticket
        return ticket

    def _settle(self, number: int, limit_s: float) -> str | None:
        """Waits for job ``number``; its error sentence, or None.

        Raises:
            LateJobError: the engine got nothing done for ``limit_s``.
        """
        late = ctypes.c_int32()
        status = self._library.gr_wait(self._native, number, int(limit_s * 1000), ctypes.byref(late))
        error = last_error(self._library) if status else None
        if late.value:
            raise LateJobError(f"the CPU engine has not got on with its work for {limit_s:g} s")
        with self._lock:
            del self._tickets[number]
        return error


def keep_for_ever(used: object) -> None:
    """Never frees ``used``, nor what it holds: native threads that nobody can stop may read and write it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(used))
