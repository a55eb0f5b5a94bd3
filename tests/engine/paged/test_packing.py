"""Packing against a dictionary of where every token is."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.paged.packing import Limits, pack, pack_rows
from greenroom.errors import ConfigError

LIMITS = Limits(block_size=4, num_blocks=8, max_sequences=3, max_tokens=10, max_context=24, vocabulary=50)


SIZES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=6)
"""Of chunks: where they start, and their tokens."""


def drawn_chunks(sizes, block_size, seed):
    """Token ids say whose they are and where: chunk ``n`` has 1000 * n + position."""
    pool = list(range(240))  # six sequences of 39 tokens, half of them with a block more
    random.Random(seed).shuffle(pool)
    chunks = []
    for number, (start, count) in enumerate(sizes):
        blocks = [pool.pop() for _ in range(-(-(start + count) // block_size) + number % 2)]
        chunks.append(SequenceChunk([1000 * number + start + i for i in range(count)], start, blocks))

    def slot(chunk, position):
        return chunk.blocks[position // block_size] * block_size + position % block_size

    return chunks, slot


@given(sizes=SIZES, block_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 100))
def test_every_token_is_a_row(sizes, block_size, seed):
    chunks, slot = drawn_chunks(sizes, block_size, seed)
    packing = pack_rows(chunks, Limits(block_size, 240, 6, 60, 40, 10_000))
    rows = [(chunk, chunk.start + place) for chunk in chunks for place in range(len(chunk.token_ids))]
    assert packing.ids.tolist() == [token for chunk in chunks for token in chunk.token_ids]
    assert packing.positions.tolist() == [position for _, position in rows]
    assert packing.slots.tolist() == [slot(*row) for row in rows]
    assert packing.lengths.tolist() == [position + 1 for _, position in rows]
    for table, (chunk, position) in zip(packing.tables, rows, strict=True):
        for seen in range(position + 1):
            assert table[seen // block_size] * block_size + seen % block_size == slot(chunk, seen)
    assert [packing.ids[last] for last in packing.last] == [chunk.token_ids[-1] for chunk in chunks]
    assert packing.singles == len(rows)
    assert packing.is_decode == all(count == 1 for _, count in sizes)
    assert not packing.spans
    assert not len(packing.gather)


@given(sizes=SIZES, block_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 100))
def test_every_token_is_where_its_sequence_has_it(sizes, block_size, seed):
    chunks, slot = drawn_chunks(sizes, block_size, seed)
    packing = pack(chunks, Limits(block_size, 240, 6, 60, 40, 10_000))
    owner = {
        start + 1000 * number + i: (number, start + i) for number, (start, n) in enumerate(sizes) for i in range(n)
    }
    assert sorted(packing.ids) == sorted(owner)
    for token, position, place in zip(packing.ids, packing.positions, packing.slots, strict=True):
        number, expected = owner[token]
        assert position == expected
        assert place == slot(chunks[number], position)
    assert [packing.ids[last] for last in packing.last] == [chunk.token_ids[-1] for chunk in chunks]
    assert packing.singles == sum(count == 1 for _, count in sizes)
    assert packing.is_decode == (packing.singles == len(chunks))
    for index in range(packing.singles):
        chunk = chunks[owner[packing.ids[index]][0]]
        assert packing.lengths[index] == chunk.start + 1
        for position in range(chunk.start + 1):
            table = packing.tables[index]
            assert table[position // block_size] * block_size + position % block_size == slot(chunk, position)
    seen = packing.singles
    for span in packing.spans:
        assert span.query_start == seen
        seen += span.query_num
        chunk = chunks[owner[packing.ids[span.query_start]][0]]
        assert span.query_num == len(chunk.token_ids)
        keys = packing.gather[span.key_start : span.key_start + span.key_num]
        assert keys.tolist() == [slot(chunk, position) for position in range(chunk.start + span.query_num)]
    assert seen == len(packing.ids)
    assert sum(span.key_num for span in packing.spans) == len(packing.gather)


def test_what_fits_exactly_is_taken():
    pack(
        [SequenceChunk([1] * 8, 0, [0, 7]), SequenceChunk([49], 23, range(1, 7)), SequenceChunk([0], 4, [2, 3, 50])],
        LIMITS,
    )


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([], "1 to 3 sequences, not 0"),
        ([SequenceChunk([1], 0, [index]) for index in range(4)], "1 to 3 sequences, not 4"),
        ([SequenceChunk([1] * 8, 0, [0, 1]), SequenceChunk([1] * 3, 0, [2])], "10 tokens at most, not 11; split it"),
        ([SequenceChunk([], 0, [0])], "at least one token and starts at 0 or later, not 0 tokens at 0"),
        ([SequenceChunk([1], -1, [0])], "not 1 tokens at -1"),
        ([SequenceChunk([1], 24, range(7))], "24 tokens at most, not 25"),
        ([SequenceChunk([1], 4, [0])], "5 tokens need 2 blocks, not 1"),
        ([SequenceChunk([1], 0, [8])], "blocks are 0 to 7, not 8 to 8"),
        ([SequenceChunk([1], 0, [-1])], "blocks are 0 to 7, not -1 to -1"),
        ([SequenceChunk([1, 50], 0, [1])], "token ids are 0 to 49, not 1 to 50"),
        ([SequenceChunk([-1], 0, [1])], "token ids are 0 to 49, not -1 to -1"),
    ],
)
@pytest.mark.parametrize("packed", [pack, pack_rows])
def test_what_a_runner_does_not_take(chunks, said, packed):
    with pytest.raises(ConfigError, match=said):
        packed(chunks, LIMITS)


@pytest.mark.parametrize("packed", [pack, pack_rows])
def test_a_block_is_written_by_one_sequence(packed):
    with pytest.raises(ConfigError, match="would be written to the same place"):
        packed([SequenceChunk([1], 3, [5]), SequenceChunk([1, 2, 3, 4], 0, [5])], LIMITS)
    both = packed([SequenceChunk([1], 4, [5, 0]), SequenceChunk([1], 4, [5, 1])], LIMITS)
    assert np.array_equal(both.slots, [0, 4]), "what is only read may be shared"
