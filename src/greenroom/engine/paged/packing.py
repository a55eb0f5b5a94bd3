"""From chunks of several sequences to the arrays of one forward pass. Pure; numpy on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from greenroom.engine.batch import SequenceChunk
from greenroom.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What a call may ask for.

    max_context: tokens of one sequence at most.
    """

    block_size: int
    num_blocks: int
    max_sequences: int
    max_tokens: int
    max_context: int
    vocabulary: int


@dataclass(frozen=True)
class Span:
    """One chunk of several tokens: its queries in the packed batch, all its keys among those gathered."""

    query_start: int
    query_num: int
    key_start: int
    key_num: int


@dataclass(frozen=True)
class Packing:
    """One forward pass. The chunks of a single token come first, then the others, each in the order given.

    ids, positions, slots: int64 [T]; a slot is ``block * block_size + place``.
    last: int64 [chunks], where each chunk's last token is, in the order given.
    singles: chunks of one token.
    lengths: int64 [singles], tokens that each one sees, itself included.
    tables: int64 [singles, W], the blocks of each, its last one repeated.
    gather: int64 [S], slots of the keys of every chunk of several tokens, one chunk after another.
    spans: of those chunks.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    last: np.ndarray
    singles: int
    lengths: np.ndarray
    tables: np.ndarray
    gather: np.ndarray
    spans: tuple[Span, ...]

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token."""
        return not self.spans


def pack(chunks: Sequence[SequenceChunk], limits: Limits) -> Packing:
    """
    Raises:
        ConfigError: the chunks are more than ``limits`` allow, name tokens or blocks that are not there, or two
            tokens would be written to the same place.
    """
    _check_sizes(chunks, limits)
    single = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
    longer = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
    singles = _pack_singles(single, limits.block_size)
    spans, own_slots = _lay_out(longer, len(single), limits.block_size)
    slots = np.concatenate([singles.slots, *(own[chunk.start :] for chunk, own in zip(longer, own_slots, strict=True))])
    gather = np.concatenate([np.zeros(0, dtype=np.int64), *own_slots])
    ids = np.concatenate([singles.ids, *(np.asarray(chunk.token_ids, dtype=np.int64) for chunk in longer)])
    positions = np.concatenate(
        [singles.positions, *(np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in longer)]
    )
    _check_range("token ids", ids, limits.vocabulary)
    _check_range("blocks", np.concatenate([singles.tables.reshape(-1), gather // limits.block_size]), limits.num_blocks)
    if len(np.unique(slots)) < len(slots):
        raise ConfigError(
            "two tokens of a batch would be written to the same place; a block that is written has one owner"
        )
    return Packing(
        ids=ids,
        positions=positions,
        slots=slots,
        last=_last_tokens(chunks, len(single)),
        singles=len(single),
        lengths=singles.positions + 1,
        tables=singles.tables,
        gather=gather,
        spans=spans,
    )


@dataclass(frozen=True)
class _Singles:
    """Of chunks of one token: ids, positions, slots: int64 [n]; tables: int64 [n, W]."""

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray


def _pack_singles(chunks: Sequence[SequenceChunk], block_size: int) -> _Singles:
    """Decode steps come here, while the device waits: few operations a row."""
    rows = len(chunks)
    positions = np.fromiter((chunk.start for chunk in chunks), np.int64, rows)
    counts = positions // block_size + 1
    tables = np.zeros((rows, counts.max(initial=0)), dtype=np.int64)
    for row, chunk, count in zip(tables, chunks, counts.tolist(), strict=True):
        row[:count] = chunk.blocks[:count]
        row[count:] = row[count - 1]
    return _Singles(
        ids=np.fromiter((chunk.token_ids[0] for chunk in chunks), np.int64, rows),
        positions=positions,
        slots=tables[np.arange(rows), counts - 1] * block_size + positions % block_size,
        tables=tables,
    )


def _lay_out(chunks: Sequence[SequenceChunk], first: int, block_size: int) -> tuple[tuple[Span, ...], list[np.ndarray]]:
    """Chunks of several tokens behind the ``first`` ones of the batch: their spans, and each one's slots."""
    spans, slots, keys = [], [], 0
    for chunk in chunks:
        end = chunk.start + len(chunk.token_ids)
        blocks = np.asarray(chunk.blocks[: -(-end // block_size)], dtype=np.int64)
        slots.append((blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:end])
        spans.append(Span(first, len(chunk.token_ids), keys, end))
        first, keys = first + len(chunk.token_ids), keys + end
    return tuple(spans), slots


def _last_tokens(chunks: Sequence[SequenceChunk], singles: int) -> np.ndarray:
    """int64 [chunks]: where each one's last token is in the packed batch."""
    last = np.zeros(len(chunks), dtype=np.int64)
    single, end = 0, singles
    for index, chunk in enumerate(chunks):
        if len(chunk.token_ids) == 1:
            last[index], single = single, single + 1
        else:
            end += len(chunk.token_ids)
            last[index] = end - 1
    return last


def _check_sizes(chunks: Sequence[SequenceChunk], limits: Limits) -> None:
    if not 1 <= len(chunks) <= limits.max_sequences:
        raise ConfigError(f"a batch has 1 to {limits.max_sequences} sequences, not {len(chunks)}")
    total = sum(len(chunk.token_ids) for chunk in chunks)
    if total > limits.max_tokens:
        raise ConfigError(f"a batch has {limits.max_tokens} tokens at most, not {total}; split it")
    for chunk in chunks:
        tokens, end = len(chunk.token_ids), chunk.start + len(chunk.token_ids)
        if tokens == 0 or chunk.start < 0:
            raise ConfigError(
                f"a chunk has at least one token and starts at 0 or later, not {tokens} tokens at {chunk.start}"
            )
        if end > limits.max_context:
            raise ConfigError(f"a sequence has {limits.max_context} tokens at most, not {end}")
        if len(chunk.blocks) * limits.block_size < end:
            raise ConfigError(f"{end} tokens need {-(-end // limits.block_size)} blocks, not {len(chunk.blocks)}")


def _check_range(what: str, numbers: np.ndarray, count: int) -> None:
    # On a GPU, a wrong index would end the process's use of it.
    lowest, highest = numbers.min(), numbers.max()
    if lowest < 0 or highest >= count:
        raise ConfigError(f"{what} are 0 to {count - 1}, not {lowest} to {highest}")
