"""OpenJob: a layer's share that a GPU waits for while the CPU engine computes it."""

from dataclasses import dataclass

from greenroom.errors import EngineError
from greenroom.experts.ticket import Ending, LateJobError, Ticket

_ABANDON_S = 5.0
"""Seconds without any progress of the engine after which a step that failed leaves its job to itself."""


@dataclass(frozen=True)
class OpenJob:
    """The device waits for ``ending``, the host for ``ticket``, neither of them for ever: if the engine hangs, the
    device is told that the job has ended. It may yet: then it only writes what nobody makes anything of, in memory that
    its ticket keeps, and before any later job begins.

    predicted_s: by the cost model; 0 if unknown.
    """

    layer: int
    ticket: Ticket
    ending: Ending
    tokens: int
    predicted_s: float

    def wait(self) -> float:
        """Seconds that the engine took.

        Raises:
            EngineError: the job failed, or the engine hangs; the sentence then names the layer.
        """
        try:
            self.ticket.wait()
        except LateJobError as error:
            self._release_device()
            raise EngineError(f"layer {self.layer}: {error}") from error
        return float(self.ending.busy_ns[0]) * 1e-9

    def abandon(self) -> None:
        """Of a step that failed. The job reads staging memory, which should not be reused under it."""
        if not self.ticket.settle(_ABANDON_S):
            self._release_device()

    def _release_device(self) -> None:
        self.ending.done.fill_(self.ending.value)
