"""Ticket: a job of the CPU engine, for whoever waits for it; Ending: how a device learns of its end."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import torch

from greenroom.errors import EngineError


class Ticket:
    """A submitted job. Holds its tensors alive until the engine is done with them."""

    def __init__(self, settle: Callable[[], str | None], keep: tuple[object, ...]) -> None:
        """
        Args:
            settle: waits until the engine is done with the job and forgets it; returns the error's sentence, or None.
            keep: what the job reads and writes.
        """
        self._settle_job: Callable[[], str | None] | None = settle
        self._keep: tuple[object, ...] = keep
        self._lock = Lock()
        self._error: str | None = None
        self._waited = False

    def wait(self) -> None:
        """Blocks until the job is done; the output tensor is complete then.

        Raises:
            EngineError: the job failed, or was waited for before.
        """
        with self._lock:
            if self._waited:
                raise EngineError("this job was already waited for; each job is waited for once")
            self._waited = True
            self._settle_locked()
            if self._error is not None:
                raise EngineError(self._error)

    def settle(self) -> None:
        """Waits for the job without reporting: for whoever gives it up. A closing engine does so with every job."""
        with self._lock:
            self._settle_locked()

    def _settle_locked(self) -> None:
        if self._settle_job is None:
            return
        self._error = self._settle_job()
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
