"""From chunks of several sequences to the arrays of one forward pass. Pure; numpy on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
    """One forward pass. Tokens that attend each on its own come first, then chunks of several, in the order given.

    ids, positions, slots: int64 [T]; a slot is ``block * block_size + place``.
    last: int64 [chunks], where each chunk's last token is, in the order given.
    singles: tokens that attend each on its own.
    lengths: int64 [singles], tokens that each one sees, itself included.
    tables: int64 [singles, W], the blocks of each one's chunk, the last one repeated.
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
        """Whether every chunk is one token, so that no token sees another one of the pass."""
        return len(self.last) == len(self.ids)


def pack_rows(chunks: Sequence[SequenceChunk], limits: Limits) -> Packing:
    """A pass in which every token attends on its own, chunk after chunk, each chunk in its order.

    A token finds those before it in the blocks, also those of its own chunk: a layer writes all keys and values before
    any token attends, and the token's length keeps it from seeing what comes behind it.

    Raises:
        ConfigError: as ``pack``.
    """
    _check_sizes(chunks, limits)
    rows = _rows(chunks, limits.block_size)
    _check_range("token ids", rows.ids, limits.vocabulary)
    _check_range("blocks", rows.tables, limits.num_blocks)
    _check_owners(rows.slots)
    nothing = np.zeros(0, dtype=np.int64)
    return Packing(
        ids=rows.ids,
        positions=rows.positions,
        slots=rows.slots,
        last=np.cumsum(rows.counts) - 1,
        singles=len(rows.ids),
        lengths=rows.positions + 1,
        tables=rows.tables,
        gather=nothing,
        spans=(),
    )


def set_ids(packing: Packing, chunks: Sequence[SequenceChunk], limits: Limits) -> None:
    """Changes the ids of a packing of one token a chunk to those that its chunks have now.

    Raises:
        ConfigError: a chunk has not one token, or one that is not there.
    """
    ids = [token for chunk in chunks for token in chunk.token_ids]
    if not len(ids) == len(chunks) == len(packing.ids):
        raise ConfigError(f"{len(packing.ids)} chunks of one token each were announced, not {len(ids)} tokens")
    packing.ids[:] = ids
    # The device idles: without numpy, for few numbers.
    if min(ids) < 0 or max(ids) >= limits.vocabulary:
        _check_range("token ids", packing.ids, limits.vocabulary)


def pack(chunks: Sequence[SequenceChunk], limits: Limits) -> Packing:
    """A pass in which chunks of several tokens attend as one.

    Raises:
        ConfigError: the chunks are more than ``limits`` allow, name tokens or blocks that are not there, or two
            tokens would be written to the same place.
    """
    _check_sizes(chunks, limits)
    single = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
    longer = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
    singles = _rows(single, limits.block_size)
    spans, own_slots = _lay_out(longer, len(single), limits.block_size)
    slots = np.concatenate([singles.slots, *(own[chunk.start :] for chunk, own in zip(longer, own_slots, strict=True))])
    gather = np.concatenate([np.zeros(0, dtype=np.int64), *own_slots])
    ids = np.concatenate([singles.ids, *(np.asarray(chunk.token_ids, dtype=np.int64) for chunk in longer)])
    positions = np.concatenate(
        [singles.positions, *(np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in longer)]
    )
    _check_range("token ids", ids, limits.vocabulary)
    _check_range("blocks", np.concatenate([singles.tables.reshape(-1), gather // limits.block_size]), limits.num_blocks)
    _check_owners(slots)
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
class _Rows:
    """Tokens one by one.

    counts: int64 [chunks], tokens of each. ids, positions, slots: int64 [n]; tables: int64 [n, W].
    """

    counts: np.ndarray
    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray


def _rows(chunks: Sequence[SequenceChunk], block_size: int) -> _Rows:
    """Decode steps come here, while the device waits: few operations a chunk."""
    counts = [len(chunk.token_ids) for chunk in chunks]
    ids = [*chain.from_iterable(chunk.token_ids for chunk in chunks)]
    positions = [*chain.from_iterable(range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks)]
    widths = [(chunk.start + count - 1) // block_size + 1 for chunk, count in zip(chunks, counts, strict=True)]
    tables = np.empty((len(ids), max(widths, default=0)), dtype=np.int64)
    row = 0
    for chunk, width, count in zip(chunks, widths, counts, strict=True):
        own = tables[row : row + count]
        own[:, :width] = chunk.blocks[:width]
        own[:, width:] = own[:, width - 1 : width]
        row += count
    places = np.array(positions, dtype=np.int64)
    block, place = np.divmod(places, block_size)
    return _Rows(
        counts=np.array(counts, dtype=np.int64),
        ids=np.array(ids, dtype=np.int64),
        positions=places,
        slots=tables[np.arange(len(ids)), block] * block_size + place,
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
    # On a GPU, a wrong index would end the process's use of it. Negative numbers are large ones without a sign.
    if numbers.view(np.uint64).max() >= count:
        lowest, highest = numbers.min(), numbers.max()
        raise ConfigError(f"{what} are 0 to {count - 1}, not {lowest} to {highest}")


def _check_owners(slots: np.ndarray) -> None:
    if len(set(slots.tolist())) < len(slots):
        raise ConfigError(
            "two tokens of a batch would be written to the same place; a block that is written has one owner"
        )
