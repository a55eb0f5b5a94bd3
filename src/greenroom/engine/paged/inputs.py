"""DecodeInputs: one buffer on the device that holds what a pass of few tokens reads, whatever its size."""

from dataclasses import dataclass

import numpy as np
import torch

from greenroom.engine.paged.cache import PagedBatch, PagedCache
from greenroom.engine.paged.packing import Packing

_WORDS = 4
"""Of a row beside its table: id, position, slot, length."""


@dataclass(frozen=True)
class Rows:
    """Rows of a pass from number ``start`` on. ids, positions: int64 [n] on the device, as all of ``batch``."""

    start: int
    ids: torch.Tensor
    positions: torch.Tensor
    batch: PagedBatch


@dataclass(frozen=True)
class Layout:
    """Where the inputs of passes of ``rows`` tokens are. whole: all rows; halves: the same rows as two."""

    rows: int
    whole: Rows
    halves: tuple[Rows, Rows]


@dataclass(frozen=True)
class Division:
    """A pass's tokens: the first half's and the second one's; all of them and None for a pass in one piece."""

    first: int
    second: int | None = None

    @classmethod
    def of(cls, tokens: int, halves: bool) -> "Division":
        """As equal as can be: the first half gets the odd one."""
        return cls(tokens - tokens // 2, tokens // 2) if halves else cls(tokens)

    @property
    def halves(self) -> bool:
        """Whether there are two pieces."""
        return self.second is not None

    def pieces(self, rows: int) -> list[slice]:
        """Where the tokens lie in a pass of ``rows``, in their order: each half begins with them."""
        if self.second is None:
            return [slice(0, self.first)]
        return [slice(0, self.first), slice(rows // 2, rows // 2 + self.second)]


class DecodeInputs:
    """The buffer and its page-locked twin, from which one copy fills it."""

    def __init__(self, cache: PagedCache, largest: int, width: int) -> None:
        """
        Args:
            largest: tokens of a pass.
            width: blocks of a sequence.
        """
        words = largest * (_WORDS + width)
        self._cache = cache
        self._width = width
        self._inputs = torch.zeros(words, dtype=torch.int64, device=cache.device)
        self._twin = torch.zeros(words, dtype=torch.int64, pin_memory=cache.device.type == "cuda")

    def lay_out(self, rows: int) -> Layout:
        """The first words of the buffer, for passes of ``rows`` tokens."""
        half = rows // 2
        whole, first, second = (self._rows(rows, *part) for part in ((0, rows), (0, half), (half, rows)))
        return Layout(rows, whole, (first, second))

    def stage(self, layout: Layout, packing: Packing, division: Division) -> None:
        """Fills the inputs; rows without a token get padding. Nobody may be reading the twin any more."""
        rows, columns = layout.rows, packing.tables.shape[1]
        # Tables are stored block after block, so that those in use are one stretch of the buffer.
        twin = self._twin[: rows * (_WORDS + columns)]
        words = twin[: _WORDS * rows].view(_WORDS, rows).numpy()
        tables = twin[_WORDS * rows :].view(columns, rows).T.numpy()
        words[:] = np.array([[0], [0], [self._cache.scratch * self._cache.block_size], [1]])
        tables[:, 0] = self._cache.scratch
        taken = 0
        for piece in division.pieces(rows):
            own = slice(taken, taken := taken + piece.stop - piece.start)
            words[0, piece], words[1, piece] = packing.ids[own], packing.positions[own]
            words[2, piece], words[3, piece] = packing.slots[own], packing.lengths[own]
            tables[piece] = packing.tables[own]
        self._inputs[: len(twin)].copy_(twin, non_blocking=True)

    def _rows(self, rows: int, start: int, end: int) -> Rows:
        """Rows ``start`` to ``end`` of a pass of ``rows``."""
        inputs = self._inputs[: rows * (_WORDS + self._width)]
        ids, positions, slots, lengths = inputs[: _WORDS * rows].view(_WORDS, rows)[:, start:end]
        batch = PagedBatch(
            cache=self._cache,
            slots=slots,
            singles=end - start,
            tables=inputs[_WORDS * rows :].view(self._width, rows).T[start:end],
            lengths=lengths,
            single_keys=None,
            gather=None,
            spans=(),
        )
        return Rows(start, ids, positions, batch)
