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


def check_chunks(chunks: Sequence[SequenceChunk], limits: Limits) -> None:
    """
    Raises:
        ConfigError: the chunks are not what the runner takes.
    """
    if not 1 <= len(chunks) <= limits.max_sequences:
        raise ConfigError(f"a batch has 1 to {limits.max_sequences} sequences, not {len(chunks)}")
    total = sum(len(chunk.token_ids) for chunk in chunks)
    if total > limits.max_tokens:
        raise ConfigError(f"a batch has {limits.max_tokens} tokens at most, not {total}; split it")
    for chunk in chunks:
        _check_chunk(chunk, limits)


def pack(chunks: Sequence[SequenceChunk], block_size: int) -> Packing:
    """
    Args:
        chunks: as ``check_chunks`` wants them.

    Raises:
        ConfigError: two tokens would be written to the same place.
    """
    order = sorted(range(len(chunks)), key=lambda index: len(chunks[index].token_ids) > 1)
    last = np.zeros(len(chunks), dtype=np.int64)
    ids, positions, slots, gather = [], [], [], []
    spans: list[Span] = []
    tokens = keys = 0
    for index in order:
        chunk = chunks[index]
        count = len(chunk.token_ids)
        own = slots_of(chunk, block_size)
        ids.append(np.asarray(chunk.token_ids, dtype=np.int64))
        positions.append(np.arange(chunk.start, chunk.start + count))
        slots.append(own[chunk.start :])
        if count > 1:
            spans.append(Span(tokens, count, keys, len(own)))
            gather.append(own)
            keys += len(own)
        tokens += count
        last[index] = tokens - 1
    single = [chunks[index] for index in order if len(chunks[index].token_ids) == 1]
    written = np.concatenate(slots)
    if len(np.unique(written)) < len(written):
        raise ConfigError(
            "two tokens of a batch would be written to the same place; blocks that are written have one owner"
        )
    return Packing(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        slots=written,
        last=last,
        singles=len(single),
        lengths=np.array([chunk.start + 1 for chunk in single], dtype=np.int64),
        tables=_tables([chunk.blocks[: -(-(chunk.start + 1) // block_size)] for chunk in single]),
        gather=np.concatenate(gather) if gather else np.zeros(0, dtype=np.int64),
        spans=tuple(spans),
    )


def slots_of(chunk: SequenceChunk, block_size: int) -> np.ndarray:
    """int64 [start + tokens]: where the keys and values of each of its tokens are, new ones included."""
    blocks = np.asarray(chunk.blocks, dtype=np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size)
    flat: np.ndarray = slots.reshape(-1)[: chunk.start + len(chunk.token_ids)]
    return flat


def _tables(blocks: list[Sequence[int]]) -> np.ndarray:
    width = max((len(row) for row in blocks), default=0)
    tables = np.zeros((len(blocks), width), dtype=np.int64)
    for row, own in zip(tables, blocks, strict=True):
        row[: len(own)] = own
        row[len(own) :] = own[-1]
    return tables


def _check_chunk(chunk: SequenceChunk, limits: Limits) -> None:
    tokens, end = len(chunk.token_ids), chunk.start + len(chunk.token_ids)
    if tokens == 0 or chunk.start < 0:
        raise ConfigError(
            f"a chunk has at least one token and starts at 0 or later, not {tokens} tokens at {chunk.start}"
        )
    if end > limits.max_context:
        raise ConfigError(f"a sequence has {limits.max_context} tokens at most, not {end}")
    if len(chunk.blocks) * limits.block_size < end:
        raise ConfigError(f"{end} tokens need {-(-end // limits.block_size)} blocks, not {len(chunk.blocks)}")
    blocks = np.asarray(chunk.blocks)
    if blocks.min() < 0 or blocks.max() >= limits.num_blocks:
        raise ConfigError(f"blocks are 0 to {limits.num_blocks - 1}, not {blocks.min()} to {blocks.max()}")
    ids = np.asarray(chunk.token_ids)
    if ids.min() < 0 or ids.max() >= limits.vocabulary:
        raise ConfigError(f"token ids are 0 to {limits.vocabulary - 1}, not {ids.min()} to {ids.max()}")
