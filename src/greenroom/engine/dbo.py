"""DBO, dual batch overlap: whether a decode batch runs as two halves at once. Pure.

An expert that both halves need is read twice, so as long as bytes bound a step, halves can only lose. Where most
experts are on the GPU they may win: one half's small kernels and handoffs fill the other's gaps. So it is measured, on
steps that somebody wants anyway.
"""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from greenroom.errors import ConfigError

MODES = ("auto", "on", "off")

LEAST_ROWS = 8
"""Of a batch for which it is tried at all: smaller ones have no time to win."""

_BLOCK = 4
"""Steps in a row that are run one way: whole, halves, halves, whole is a round, so that what drifts cancels."""

_ROUNDS = 4
"""Thirty-two steps each way."""

_CLEAR = 0.1
"""Part of the time by which one way must lead to be chosen after any round."""

_WORTH = 0.01
"""Part of the time that halves must save in the end; they take memory of their own."""


def check_dbo(mode: str) -> None:
    """
    Raises:
        ConfigError: no such mode.
    """
    if mode not in MODES:
        raise ConfigError(f"dbo is auto, on or off, not '{mode}'")


@dataclass(frozen=True)
class DboChoice:
    """How batches of up to ``rows`` sequences run.

    halves: as two halves at once; None while that is being measured. because: in words. whole_ms, halves_ms: medians of
    measured steps.
    """

    rows: int
    halves: bool | None
    because: str
    whole_ms: float | None = None
    halves_ms: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class DboTrial:
    """Runs steps both ways in turns until one has won.

    Attributes:
        choice: what is known so far.
    """

    def __init__(self, rows: int) -> None:
        """``rows``: sequences of the batches."""
        self.choice = DboChoice(rows, None, "being measured")
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    @property
    def halves(self) -> bool:
        """Whether the next step shall run as two halves."""
        if self.choice.halves is not None:
            return self.choice.halves
        block = sum(map(len, self._seconds.values())) // _BLOCK
        return block % 4 in (1, 2)

    def took(self, seconds: float) -> bool:
        """A step has run the way that ``halves`` said; returns whether that has decided it."""
        if self.choice.halves is not None:
            return False
        self._seconds[self.halves].append(seconds)
        steps = sum(map(len, self._seconds.values()))
        if steps % (4 * _BLOCK):
            return False
        whole, halves = (statistics.median(self._seconds[way]) for way in (False, True))
        clear = max(whole, halves) > (1 + _CLEAR) * min(whole, halves)
        if not clear and steps < 4 * _BLOCK * _ROUNDS:
            return False
        won = halves < (1 - _WORTH) * whole
        because = f"measured over {steps // 2} steps each way"
        self.choice = DboChoice(self.choice.rows, won, because, whole * 1e3, halves * 1e3)
        return True
