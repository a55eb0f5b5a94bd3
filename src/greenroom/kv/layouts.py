"""Where a KV block's bytes lie: in the device's tensors, and in its image in host memory. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from greenroom.errors import ConfigError


class TensorLayout(StrEnum):
    """Which dimension of a tensor counts the blocks.

    KV_FIRST: [2, blocks, ...], a block's keys and values far apart.
    BLOCKS_FIRST: [blocks, ...]: keys and values of a block together ([blocks, 2, ...]), one of the two alone, or
    the latents of multi-head latent attention ([blocks, block_size, latent]).
    """

    KV_FIRST = "kv_first"
    BLOCKS_FIRST = "blocks_first"


@dataclass(frozen=True)
class Run:
    """Bytes that lie together in every block: ``size`` of them at ``offset + block * pitch`` of tensor ``tensor``."""

    tensor: int
    offset: int
    pitch: int
    size: int


@dataclass(frozen=True)
class BlockLayout:
    """Runs of a block in all tensors. A block's image in host memory is its runs one after another.

    num_blocks: that every tensor has.
    """

    runs: tuple[Run, ...]
    num_blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of an image."""
        return sum(run.size for run in self.runs)

    @property
    def image_offsets(self) -> np.ndarray:
        """int64 [runs]: where each run starts in an image."""
        sizes = self.sizes
        offsets: np.ndarray = np.cumsum(sizes) - sizes
        return offsets

    @property
    def sizes(self) -> np.ndarray:
        """int64 [runs]: bytes."""
        return np.array([run.size for run in self.runs], dtype=np.int64)

    @property
    def pitches(self) -> np.ndarray:
        """int64 [runs]: bytes from one block to the next on the device."""
        return np.array([run.pitch for run in self.runs], dtype=np.int64)

    @property
    def word_bytes(self) -> int:
        """The widest power of two, 8 at most, that divides every size, offset and pitch."""
        return math.gcd(8, *(number for run in self.runs for number in (run.offset, run.pitch, run.size)))

    def device_addresses(self, tensors: Sequence[torch.Tensor]) -> np.ndarray:
        """int64 [runs]: address of each run of block 0."""
        return np.array([tensors[run.tensor].data_ptr() + run.offset for run in self.runs], dtype=np.int64)


def block_layout(tensors: Sequence[torch.Tensor], layouts: Sequence[TensorLayout]) -> BlockLayout:
    """
    Args:
        tensors: of any widths and element types; only shapes and strides are looked at.
        layouts: one for each tensor.

    Raises:
        ConfigError: a tensor is not what its layout says, or they have different numbers of blocks.
    """
    runs: list[Run] = []
    counts = set()
    for index, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        own, count = _runs(index, tensor, layout)
        runs += own
        counts.add(count)
    if len(counts) != 1:
        raise ConfigError(f"KV tensors must have one number of blocks, not {sorted(counts)}")
    return BlockLayout(tuple(runs), counts.pop())


def sub_blocks(host_blocks: np.ndarray, factor: int, skip: int, out: np.ndarray) -> None:
    """Numbers of the device-sized parts of host blocks; part s of host block h has number ``h * factor + s``.

    Args:
        host_blocks: int64 [n].
        skip: parts of the first host block that are left out, fewer than ``factor``.
        out: int64 [n * factor - skip], written.
    """
    if len(host_blocks) == 0:
        return
    head = factor - skip
    np.add(host_blocks[0] * factor, np.arange(skip, factor), out=out[:head])
    np.add(host_blocks[1:, None] * factor, np.arange(factor), out=out[head:].reshape(-1, factor))


def run_addresses(first: np.ndarray, pitches: np.ndarray | int, blocks: np.ndarray, out: np.ndarray) -> None:
    """
    Args:
        first: int64 [runs], addresses of block 0's runs.
        pitches: int64 [runs], or one for all.
        blocks: int64 [n].
        out: int64 [n, runs], written: the address of each run of each block.
    """
    np.multiply(blocks[:, None], pitches, out=out)
    np.add(out, first, out=out)


def stretches(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where consecutive numbers lie one behind another: int64 starts and lengths of such stretches, in order."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = np.concatenate([np.zeros(min(len(numbers), 1), dtype=np.int64), breaks])
    return starts, np.diff(np.append(starts, len(numbers)))


def _runs(index: int, tensor: torch.Tensor, layout: TensorLayout) -> tuple[list[Run], int]:
    shape, strides, width = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    dimension = 1 if layout is TensorLayout.KV_FIRST else 0
    if len(shape) <= dimension + 1 or (layout is TensorLayout.KV_FIRST and shape[0] != 2):
        wanted = "[2, blocks, ...]" if layout is TensorLayout.KV_FIRST else "[blocks, ...]"
        raise ConfigError(f"a {layout} KV tensor has the shape {wanted}, not {list(shape)}")
    inner = math.prod(shape[dimension + 1 :])
    if inner == 0 or not _is_dense(shape[dimension + 1 :], strides[dimension + 1 :]):
        raise ConfigError(f"a block of KV tensor {index} ({list(shape)}) must lie in one piece and hold something")
    leading = [0, strides[0]] if layout is TensorLayout.KV_FIRST else [0]
    pitch = strides[dimension] * width
    return [Run(index, offset * width, pitch, inner * width) for offset in leading], shape[dimension]


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
