"""Layouts against a copy of bytes one by one, and every way of copying against plain indexing."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from greenroom.errors import ConfigError
from greenroom.kv import cuda_copies
from greenroom.kv.copies import BlockCopies, Direction, IndexCopies
from greenroom.kv.layouts import TensorLayout, block_layout, run_addresses, stretches, sub_blocks

KV_FIRST, BLOCKS_FIRST = TensorLayout.KV_FIRST, TensorLayout.BLOCKS_FIRST
BLOCKS = 6


def cases() -> dict[str, tuple[list[torch.Tensor], list[TensorLayout]]]:
    wide = torch.randn(BLOCKS, 4, 24)
    return {
        "keys and values first": ([torch.randn(2, BLOCKS, 4, 2, 8).to(torch.bfloat16)], [KV_FIRST]),
        "blocks first": ([torch.randn(BLOCKS, 2, 4, 2, 8)], [BLOCKS_FIRST]),
        "latents": ([torch.randn(BLOCKS, 4, 9).to(torch.bfloat16)], [BLOCKS_FIRST]),
        "bytes": ([torch.randint(0, 255, (BLOCKS, 5), dtype=torch.uint8)], [BLOCKS_FIRST]),
        "several": (
            [torch.randn(2, BLOCKS, 4, 3), torch.randn(BLOCKS, 2, 4, 5), torch.randn(BLOCKS, 4, 6)],
            [KV_FIRST, BLOCKS_FIRST, BLOCKS_FIRST],
        ),
        "part of a tensor": ([wide[:, 1:3], torch.randn(3, BLOCKS, 7)[1:]], [BLOCKS_FIRST, KV_FIRST]),
        "longer than a kernel's step": ([torch.randn(BLOCKS, 5000)], [BLOCKS_FIRST]),
    }


def block_bytes_of(tensors: list[torch.Tensor], layouts: list[TensorLayout], block: int) -> bytes:
    """The block's image, in torch's own words."""
    pieces = []
    for tensor, layout in zip(tensors, layouts, strict=True):
        rows = [tensor[0, block], tensor[1, block]] if layout is KV_FIRST else [tensor[block]]
        pieces += [row.contiguous().flatten().view(torch.uint8).numpy().tobytes() for row in rows]
    return b"".join(pieces)


@pytest.fixture
def copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of copies as a driver makes it, from last to first."""

    def copy_batch(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        for target, source, size in [*zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)][::-1]:
            ctypes.memmove(target, source, size)

    monkeypatch.setattr(cuda_copies, "copy_batch", copy_batch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize("copies", [IndexCopies, *cuda_copies.WAYS.values()])
@pytest.mark.parametrize("case", cases())
def test_copies_move_whole_blocks_and_nothing_else(
    copies: type[BlockCopies], case: str, copy_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, layouts = cases()[case]
    if copies is not IndexCopies and torch.cuda.is_available():
        pytest.skip("kernels are not interpreted here; see test_transfer_cuda.py")
    layout = block_layout(tensors, layouts)
    before = [block_bytes_of(tensors, layouts, block) for block in range(BLOCKS)]
    assert layout.num_blocks == BLOCKS
    assert layout.block_bytes == len(before[0])
    monkeypatch.setattr(cuda_copies, "_STAGING_BYTES", 2 * layout.block_bytes)  # three blocks take two rounds
    parts = torch.full((9, layout.block_bytes), 7, dtype=torch.uint8)
    way = copies(layout, tensors, parts)
    way.start(Direction.STORE, np.array([4, 5, 0]), np.array([2, 3, 8]))
    images = {2: before[4], 8: before[0], 3: before[5]}
    for part in range(len(parts)):
        assert parts[part].numpy().tobytes() == images.get(part, bytes([7]) * layout.block_bytes)
    way.start(Direction.LOAD, np.array([1, 2]), np.array([8, 2]))
    expected = [before[0], before[0], before[4], *before[3:]]
    assert [block_bytes_of(tensors, layouts, block) for block in range(BLOCKS)] == expected
    way.start(Direction.LOAD, np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    assert [block_bytes_of(tensors, layouts, block) for block in range(BLOCKS)] == expected


@pytest.mark.parametrize(
    ("tensors", "layouts", "sentence"),
    [
        ([torch.zeros(3, BLOCKS, 4)], [KV_FIRST], r"has the shape \[2, blocks, ...\]"),
        ([torch.zeros(2, BLOCKS)], [KV_FIRST], r"has the shape \[2, blocks, ...\]"),
        ([torch.zeros(BLOCKS)], [BLOCKS_FIRST], r"has the shape \[blocks, ...\]"),
        ([torch.zeros(BLOCKS, 4), torch.zeros(BLOCKS + 1, 4)], [BLOCKS_FIRST] * 2, "one number of blocks"),
        ([torch.zeros(BLOCKS, 4, 8)[:, :, :4]], [BLOCKS_FIRST], "in one piece"),
        ([torch.zeros(BLOCKS, 0)], [BLOCKS_FIRST], "hold something"),
    ],
)
def test_tensors_that_do_not_fit_their_layout(
    tensors: list[torch.Tensor], layouts: list[TensorLayout], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        block_layout(tensors, layouts)


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_parts_of_host_blocks(factor: int) -> None:
    rng = np.random.default_rng(factor)
    for count in range(4):
        blocks = rng.permutation(10)[:count].astype(np.int64)
        for skip in range(factor if count else 1):
            expected = [block * factor + part for block in blocks for part in range(factor)][skip:]
            out = np.full(len(expected), -1, dtype=np.int64)
            sub_blocks(blocks, factor, skip, out)
            assert out.tolist() == expected


def test_addresses_of_runs() -> None:
    out = np.empty((3, 2), dtype=np.int64)
    run_addresses(np.array([100, 9000]), np.array([10, 20]), np.array([5, 0, 1]), out)
    assert out.tolist() == [[150, 9100], [100, 9000], [110, 9020]]


def test_stretches() -> None:
    starts, lengths = stretches(np.array([4, 5, 6, 2, 3, 9, 8]))
    assert (starts.tolist(), lengths.tolist()) == ([0, 3, 5, 6], [3, 2, 1, 1])
    assert [array.tolist() for array in stretches(np.array([], dtype=np.int64))] == [[], []]
