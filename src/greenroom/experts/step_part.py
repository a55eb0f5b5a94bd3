"""StepPart: the rows of a decode step that go through one path, as the host sees them."""

from dataclasses import dataclass

import numpy as np

from greenroom.errors import EngineError
from greenroom.experts.decode_path import DecodePath
from greenroom.experts.path_record import Notes
from greenroom.experts.step_table import StepOrder


@dataclass(frozen=True)
class StepPart:
    """Parts of one step may be under way at once: each has a path of its own, with its mailboxes and its memory.

    turn: which of the two places it leaves its notes in.
    """

    path: DecodePath
    rows: int
    turn: int

    @property
    def notes(self) -> Notes[np.ndarray]:
        """What it has done: there once it has ended, until the step behind the next one is enqueued."""
        return self.path.record.host[self.turn]

    def begin(self, order: StepOrder) -> None:
        """See ``DecodePath.begin_step``; from here on the CPU engine looks for requests, if any can come."""
        self.path.begin_step(order)
        if self.path.may_miss:
            self.path.mailboxes.arm()

    def enqueued(self) -> None:
        """Behind all of its work: its notes are to be brought to the host."""
        self.path.record.keep(self.turn)


def take_failure(path: DecodePath) -> EngineError | None:
    """The first one since the last call, and no longer."""
    try:
        path.mailboxes.raise_failure()
    except EngineError as error:
        return error
    return None
