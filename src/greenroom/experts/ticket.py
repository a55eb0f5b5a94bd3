"""Ticket: a job of the CPU engine, for whoever waits for it; Ending: how a device learns of its end."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import torch

from greenroom.errors import EngineError


class LateJobError(EngineError):
    """The CPU engine has not got on with its work for as long as somebody was ready to wait."""


class Ticket:
    """A submitted job. Holds its tensors alive until the engine is done with them."""

    def __init__(self, settle: Callable[[float], str | None], keep: tuple[object, ...], limit_s: float) -> None:
        """
        Args:
            settle: waits until the engine is done with the job and forgets it; returns the error's sentence, or None.
                Raises LateJobError if the engine gets nothing done for as many seconds as it is given.
            keep: what the job reads and writes.
            limit_s: these seconds, for ``wait``.
        """
        self._settle_job: Callable[[float], str | None] | None = settle
        self._keep: tuple[object, ...] = keep
        self._limit_s = limit_s
        self._lock = Lock()
        self._error: str | None = None
        self._waited = False

    def wait(self) -> None:
        """Blocks until the job is done; the output tensor is complete then.

        Raises:
            LateJobError: the engine got nothing done for too long. The job may still end, and be waited for again.
            EngineError: the job failed, or was waited for before.
        """
        with self._lock:
            if self._waited:
                raise EngineError("this job was already waited for; each job is waited for once")
            self._settle_locked(self._limit_s)
            self._waited = True
            if self._error is not None:
                raise EngineError(self._error)

    def settle(self, limit_s: float) -> bool:
        """Waits for the job without reporting: for whoever gives it up. A closing engine does so with every job.

        Returns:
            Whether it has ended. It may not have if the engine got nothing done for ``limit_s``.
        """
        with self._lock:
            try:
                self._settle_locked(limit_s)
            except LateJobError:
                return False
            return True

    def _settle_locked(self, limit_s: float) -> None:
        if self._settle_job is None:
            return
        self._error = self._settle_job(limit_s)
        self._settle_job = None
        self._keep = ()


@dataclass(frozen=True)
class Ending:
    """Where a job tells a device that it has ended.

    done: int32 [1] in host memory; ``value`` is stored there once the output is complete. busy_ns: int64 [1], written
    before that: nanoseconds from the job's turn to its end.
    """

    done: torch.Tensor
    value: int
    busy_ns: torch.Tensor
