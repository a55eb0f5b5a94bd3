"""Blocks, views and the host store."""

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import MemoryLimitError
from greenroom.experts.formats import ALIGNMENT, Activation, ActivationKind, ExpertFormat
from greenroom.experts.store import HostStore
from greenroom.hardware import HUGE_PAGE

SILU = Activation(ActivationKind.SILU)

formats = st.builds(
    ExpertFormat,
    hidden=st.integers(1, 70),
    inter=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    activation=st.just(SILU),
    gated=st.booleans(),
    bias=st.booleans(),
)


@given(formats, st.integers(1, 4))
def test_parts_cover_the_block_without_overlap(fmt, count):
    blocks = torch.zeros(count, fmt.block_bytes, dtype=torch.uint8)
    views = fmt.views(blocks)
    parts = {name: part for name, part in vars(views).items() if part is not None}
    assert set(parts) == ({"up", "down", "up_bias", "down_bias"} if fmt.bias else {"up", "down"})
    for number, part in enumerate(parts.values(), start=1):
        assert (part == 0).all(), "two parts share bytes"
        part.fill_(number)
    for number, part in enumerate(parts.values(), start=1):
        assert (part == number).all(), "two parts share bytes"
        assert (part.data_ptr() - blocks.data_ptr()) % ALIGNMENT == 0
        assert part.stride(0) * part.element_size() == fmt.block_bytes
    used = sum(part[0].numel() for part in parts.values()) * fmt.dtype.itemsize
    assert used <= fmt.block_bytes < used + len(parts) * ALIGNMENT


def test_qwen3_expert_is_exactly_its_weights():
    fmt = ExpertFormat(2048, 768, torch.bfloat16, SILU)
    assert fmt.block_bytes == 3 * 2048 * 768 * 2
    assert fmt.flops(8) == 8 * 2 * 3 * 2048 * 768


@pytest.mark.parametrize(
    "blocks",
    [
        torch.zeros(2, 64, dtype=torch.int8),
        torch.zeros(2, 65, dtype=torch.uint8),
        torch.zeros(128, dtype=torch.uint8),
        torch.zeros(4, 1 << 10, dtype=torch.uint8)[::2],
    ],
)
def test_wrong_blocks_are_refused(blocks):
    with pytest.raises(ValueError, match=r"expected uint8|contiguous"):
        ExpertFormat(8, 8, torch.bfloat16, SILU).views(blocks)


def test_wrong_formats_are_refused():
    with pytest.raises(ValueError, match="positive"):
        ExpertFormat(0, 8, torch.bfloat16, SILU)
    with pytest.raises(ValueError, match="not supported"):
        ExpertFormat(8, 8, torch.int8, SILU)


def test_store_addresses_are_where_the_blocks_are():
    fmts = [ExpertFormat(8, 8, torch.float32, SILU), ExpertFormat(5, 3, torch.float16, SILU, bias=True)]
    with HostStore(fmts, [3, 4]) as store:
        for layer in range(2):
            blocks = store.blocks(layer)
            addresses = store.addresses(layer)
            assert addresses.dtype == np.uint64
            assert [blocks[e].data_ptr() for e in range(len(blocks))] == addresses.tolist()
            assert blocks.data_ptr() % HUGE_PAGE == 0
        assert store.nbytes == 3 * fmts[0].block_bytes + 4 * fmts[1].block_bytes
        assert not store.locked


def test_store_locks_each_layer_and_unlocks_what_it_locked():
    locked: dict[int, int] = {}
    fmt = ExpertFormat(64, 64, torch.float32, SILU)
    store = HostStore([fmt] * 3, [2] * 3, locked.__setitem__, lambda address: locked.pop(address) and None)
    assert store.locked
    assert sorted(locked) == sorted(int(store.addresses(layer)[0]) for layer in range(3))
    assert all(size >= 2 * fmt.block_bytes and size % mmap.PAGESIZE == 0 for size in locked.values())
    store.close()
    store.close()
    assert not locked


def test_a_refused_lock_leaves_nothing_locked():
    locked: list[int] = []

    def lock(address: int, size: int) -> None:
        if len(locked) == 2:
            raise MemoryLimitError("no more")
        locked.append(address)

    with pytest.raises(MemoryLimitError, match="no more"):
        HostStore([ExpertFormat(8, 8, torch.float32, SILU)] * 3, [2] * 3, lock, locked.remove)
    assert not locked


def test_memory_that_cannot_be_had_is_one_sentence():
    fmt = ExpertFormat(1 << 15, 1 << 15, torch.float32, SILU)
    with pytest.raises(MemoryLimitError, match=r"cannot reserve .* GiB of host memory"):
        HostStore([fmt], [1 << 17])
