"""DecodeInputs: one buffer on the device that holds what a pass of few tokens reads, whatever its size."""

from dataclasses import dataclass

import numpy as np
import torch

from greenroom.engine.paged.cache import PagedBatch, PagedCache
from greenroom.engine.paged.packing import Packing
from greenroom.kernels.gpu.word_copy import copy_words

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


@dataclass(frozen=True)
class Staged:
    """A pass's inputs in page-locked memory.

    twin: int64, number ``number`` of the two, as far as it is filled. inputs: its place on the device.
    ids: where the ids of each piece are in the twin, and which of the pass's tokens they are.
    """

    division: Division
    number: int
    twin: torch.Tensor
    inputs: torch.Tensor
    ids: tuple[tuple[np.ndarray, slice], ...]

    def set_ids(self, ids: np.ndarray) -> None:
        """int64 [tokens]: others than those it was filled with."""
        for place, own in self.ids:
            place[:] = ids[own]


class DecodeInputs:
    """The buffer and its page-locked twins, from which one copy fills it.

    There are two, so that one can be filled while a pass runs, whose copy may still read the other one.
    """

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
        self._twins = [torch.zeros(words, dtype=torch.int64, pin_memory=cache.device.type == "cuda") for _ in range(2)]
        self._free = 0  # the twin that was not sent last
        self._padding = np.array([[0], [0], [cache.scratch * cache.block_size], [1]])

    def lay_out(self, rows: int) -> Layout:
        """The first words of the buffer, for passes of ``rows`` tokens."""
        half = rows // 2
        whole, first, second = (self._rows(rows, *part) for part in ((0, rows), (0, half), (half, rows)))
        return Layout(rows, whole, (first, second))

    def padding(self) -> Packing:
        """One token that nobody asked for."""
        nothing = np.zeros(0, dtype=np.int64)
        return Packing(
            ids=np.zeros(1, dtype=np.int64),
            positions=np.zeros(1, dtype=np.int64),
            slots=np.array([self._cache.scratch * self._cache.block_size]),
            last=np.zeros(1, dtype=np.int64),
            singles=1,
            lengths=np.ones(1, dtype=np.int64),
            tables=np.array([[self._cache.scratch]]),
            gather=nothing,
            spans=(),
        )

    def fill(self, layout: Layout, packing: Packing, division: Division) -> Staged:
        """Fills a twin; rows without a token get padding. One pass may run, and no more.

        Returns:
            For ``send``, before anything else is filled.
        """
        rows, columns = layout.rows, packing.tables.shape[1]
        # Tables are stored block after block, so that those in use are one stretch of the buffer.
        twin = self._twins[self._free][: rows * (_WORDS + columns)]
        array = twin.numpy()
        words = array[: _WORDS * rows].reshape(_WORDS, rows)
        tables = array[_WORDS * rows :].reshape(columns, rows).T
        words[:] = self._padding
        tables[:, 0] = self._cache.scratch
        taken, ids = 0, []
        for piece in division.pieces(rows):
            own = slice(taken, taken := taken + piece.stop - piece.start)
            words[0, piece], words[1, piece] = packing.ids[own], packing.positions[own]
            words[2, piece], words[3, piece] = packing.slots[own], packing.lengths[own]
            tables[piece] = packing.tables[own]
            ids.append((words[0, piece], own))
        return Staged(division, self._free, twin, self._inputs[: len(twin)], tuple(ids))

    def send(self, staged: Staged) -> None:
        """Enqueues the copy to the device. No pass runs any more."""
        assert staged.number == self._free
        copy_words(staged.inputs, staged.twin)
        self._free = 1 - self._free

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
            single_lengths=None,
            gather=None,
            spans=(),
        )
        return Rows(start, ids, positions, batch)
