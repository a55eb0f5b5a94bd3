"""DBO, dual batch overlap: whether a decode batch runs as two halves at once. Pure.

An expert that both halves need is read twice, so as long as bytes bound a step, halves can only lose. Where most
experts are on the GPU they may win: one half's small kernels and handoffs fill the other's gaps. So it is measured, on
steps that somebody wants anyway.
"""

import statistics
from collections.abc import Iterable
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

DECIDED_AFTER = 4 * _BLOCK * _ROUNDS
"""Steps of one size at most, until it is known how they run."""

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


def halvable(mode: str, rows: Iterable[int]) -> list[int]:
    """Of passes of so many rows, those that may run as halves."""
    least = {"auto": LEAST_ROWS, "on": 2}.get(mode)
    return [] if least is None else [size for size in rows if size >= least]


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

    def __str__(self) -> str:
        way = {None: "both ways in turns", True: "as two halves at once", False: "in one piece"}[self.halves]
        if self.whole_ms is None:
            return f"{way}, {self.because}"
        return f"{way}, {self.because} (halves {self.halves_ms:.2f} ms, in one piece {self.whole_ms:.2f} ms)"

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
        if not clear and steps < DECIDED_AFTER:
            return False
        won = halves < (1 - _WORTH) * whole
        because = f"measured over {steps // 2} steps each way"
        self.choice = DboChoice(self.choice.rows, won, because, whole * 1e3, halves * 1e3)
        return True


class DboPolicy:
    """Which passes run as halves, by the rows that they are made for.

    Attributes:
        mode: as asked for.
        off_because: why none do; None if some do or may.
    """

    def __init__(self, mode: str, rows: Iterable[int], off_because: str | None = None) -> None:
        """
        Args:
            mode: "auto", "on" or "off".
            rows: of all passes that could.

        Raises:
            ConfigError: no such mode, or halves are forced where there is nothing to halve.
        """
        check_dbo(mode)
        sizes = halvable(mode, rows)
        if off_because is None and mode == "off":
            off_because = "not asked for"
        if off_because is None and not sizes:
            off_because = f"batches have fewer than {LEAST_ROWS // 2 + 1 if mode == 'auto' else 2} sequences"
        if mode == "on" and off_because is not None:
            raise ConfigError(f"dbo cannot be on: {off_because}; leave it out, or say auto")
        self.mode = mode
        self.off_because = off_because
        self._fixed: dict[int, DboChoice] = {}
        self._trials: dict[int, DboTrial] = {}
        if off_because is None and mode == "on":
            self._fixed = {size: DboChoice(size, True, "as asked for") for size in sizes}
        elif off_because is None:
            self._trials = {size: DboTrial(size) for size in sizes}

    @classmethod
    def off(cls, because: str) -> "DboPolicy":
        """No pass."""
        return cls("off", (), because)

    @property
    def choices(self) -> tuple[DboChoice, ...]:
        """What is known so far, one entry for each size that could run as halves."""
        return (*self._fixed.values(), *(trial.choice for trial in self._trials.values()))

    @property
    def in_use(self) -> bool:
        """Whether any pass does or may."""
        return any(choice.halves is not False for choice in self.choices)

    @property
    def most_rows(self) -> int:
        """Of the largest pass that does or may; 0 without."""
        return max((choice.rows for choice in self.choices if choice.halves is not False), default=0)

    def choice(self, rows: int) -> DboChoice:
        """What is known of passes of ``rows``, which are among the sizes."""
        return self._fixed.get(rows) or self._trials[rows].choice

    def may_halve(self, rows: int) -> bool:
        """Whether passes of ``rows`` do or may."""
        return any(choice.rows == rows and choice.halves is not False for choice in self.choices)

    def halves(self, rows: int) -> bool:
        """Whether the next pass of ``rows`` shall, if ``may_halve``."""
        return rows in self._fixed or self._trials[rows].halves

    def took(self, rows: int, seconds: float) -> bool:
        """A pass has run as ``halves`` said; returns whether that has decided something."""
        return rows in self._trials and self._trials[rows].took(seconds)

    def give_up(self, because: str) -> bool:
        """None after all; returns False if they were forced."""
        if self._fixed:
            return False
        self.off_because, self._trials = because, {}
        return True

    def __str__(self) -> str:
        if self.off_because is not None:
            return f"off: {self.off_because}"
        return "; ".join(f"up to {choice.rows} sequences {choice}" for choice in self.choices)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        choices = [choice.to_dict() for choice in self.choices]
        return {"mode": self.mode, "off_because": self.off_because, "choices": choices}
