"""Ways to copy KV blocks between the device's tensors and their images in host memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch
import triton.language as tl

from greenroom.errors import ConfigError
from greenroom.kernels.gpu.batch_copy import copy_batch, has_batch_copy
from greenroom.kernels.gpu.block_copy import block_copy_kernel
from greenroom.kv.layouts import BlockLayout, run_addresses, stretches

_PROGRAMS = 64
_WORDS = 2048
"""Of the copy kernel: at 8 bytes a word, 1 MiB is under way at once."""

_WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

_STAGING_BYTES = 32 << 20


class Direction(StrEnum):
    """LOAD: from host memory to the device. STORE: from the device to host memory."""

    LOAD = "load"
    STORE = "store"


class BlockCopies(ABC):
    """Copies of whole blocks. ``start`` may be called from two threads at once, one for each direction."""

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor], parts: torch.Tensor) -> None:
        """
        Args:
            tensors: the device's.
            parts: uint8 [parts, layout.block_bytes], images in host memory, page-locked beside a GPU.
        """
        self._layout = layout
        self._tensors = tuple(tensors)
        self._parts = parts

    @abstractmethod
    def start(self, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> Any:
        """Copies on the current stream, behind its work so far.

        Args:
            blocks: int64 [n], on the device, none twice.
            parts: int64 [n], their images.

        Returns:
            Whatever has to live until the copies have ended.
        """


class IndexCopies(BlockCopies):
    """A run of all blocks at a time, with torch's own indexing; for tensors in host memory. Done when it returns."""

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor], parts: torch.Tensor) -> None:
        super().__init__(layout, tensors, parts)
        self._pairs = []
        for run, offset in zip(layout.runs, layout.image_offsets.tolist(), strict=True):
            tensor = tensors[run.tensor]
            first = tensor.storage_offset() * tensor.element_size() + run.offset
            view = torch.empty(0, dtype=torch.uint8).set_(
                tensor.untyped_storage(), first, (layout.num_blocks, run.size), (run.pitch, 1)
            )
            self._pairs.append((view, parts[:, offset : offset + run.size]))

    def start(self, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> None:
        """See ``BlockCopies``."""
        device, host = torch.from_numpy(blocks), torch.from_numpy(parts)
        for view, images in self._pairs:
            if direction is Direction.LOAD:
                view[device] = images[host]
            else:
                images[host] = view[device]


class BatchCopies(BlockCopies):
    """The copy engine, a piece for each run of each block, all in one call of the driver."""

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor], parts: torch.Tensor) -> None:
        super().__init__(layout, tensors, parts)
        self._device_runs = layout.device_addresses(tensors)
        self._host_runs = parts.data_ptr() + layout.image_offsets

    def start(self, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> None:
        """See ``BlockCopies``."""
        device = np.empty((len(blocks), len(self._layout.runs)), dtype=np.int64)
        host, sizes = np.empty_like(device), np.empty_like(device)
        run_addresses(self._device_runs, self._layout.pitches, blocks, device)
        run_addresses(self._host_runs, self._layout.block_bytes, parts, host)
        sizes[:] = self._layout.sizes
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        stream = torch.cuda.current_stream(self._tensors[0].device).cuda_stream
        copy_batch(target.ravel(), source.ravel(), sizes.ravel(), stream)


class KernelCopies(BlockCopies):
    """A kernel that reads or writes host memory itself."""

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor], parts: torch.Tensor) -> None:
        super().__init__(layout, tensors, parts)
        self._table = _RunTable(layout, tensors, parts.data_ptr())

    def start(self, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> Any:
        """See ``BlockCopies``."""
        return self._table.copy(direction, blocks, parts)


class StagedCopies(BlockCopies):
    """A kernel gathers images on the device, and the copy engine moves these: long pieces, however short the runs."""

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor], parts: torch.Tensor) -> None:
        super().__init__(layout, tensors, parts)
        self._room = max(1, _STAGING_BYTES // layout.block_bytes)
        # One for each direction: their streams are not ordered.
        self._staging = {
            direction: torch.empty(self._room, layout.block_bytes, dtype=torch.uint8, device=tensors[0].device)
            for direction in Direction
        }
        self._tables = {
            direction: _RunTable(layout, tensors, staging.data_ptr()) for direction, staging in self._staging.items()
        }

    def start(self, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> Any:
        """See ``BlockCopies``."""
        alive = []
        for first in range(0, len(blocks), self._room):
            some, images = blocks[first : first + self._room], parts[first : first + self._room]
            places = np.arange(len(some))
            if direction is Direction.STORE:
                alive.append(self._tables[direction].copy(direction, some, places))
            self._move(direction, images)
            if direction is Direction.LOAD:
                alive.append(self._tables[direction].copy(direction, some, places))
        return alive

    def _move(self, direction: Direction, images: np.ndarray) -> None:
        """Between host memory and the first places of the staging buffer; images side by side go as one piece."""
        starts, lengths = stretches(images)
        size = self._layout.block_bytes
        host = self._parts.data_ptr() + images[starts] * size
        device = self._staging[direction].data_ptr() + starts * size
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        stream = torch.cuda.current_stream(self._tensors[0].device).cuda_stream
        copy_batch(target, source, lengths * size, stream)


class _RunTable:
    """What the copy kernel needs to know of a layout and of the images' place."""

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor], images: int) -> None:
        device = tensors[0].device
        first = layout.device_addresses(tensors)
        own = images + layout.image_offsets
        pitches = np.full(len(layout.runs), layout.block_bytes, dtype=np.int64)
        # Addresses of tensors and mappings count as well: a slice may start anywhere.
        addresses = np.concatenate([first, own])
        self._word = int(np.gcd.reduce(np.append(addresses, layout.word_bytes)))
        table = np.stack([first, layout.pitches, own, pitches, layout.sizes])
        self._device_runs, self._device_pitches, self._host_runs, self._host_pitches, self._sizes = torch.from_numpy(
            table
        ).to(device)
        self._longest = int(layout.sizes.max())

    def copy(self, direction: Direction, blocks: np.ndarray, images: np.ndarray) -> torch.Tensor:
        """Returns the numbers that the kernel reads. They were allocated on the current stream."""
        device = self._sizes.device
        numbers = torch.from_numpy(np.stack([blocks, images]))
        if device.type == "cuda":
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        sides = [
            (self._device_runs, self._device_pitches, numbers[0]),
            (self._host_runs, self._host_pitches, numbers[1]),
        ]
        source, target = reversed(sides) if direction is Direction.LOAD else sides
        block_copy_kernel[(_PROGRAMS,)](
            source[0],
            source[1],
            target[0],
            target[1],
            self._sizes,
            source[2],
            target[2],
            len(blocks),
            len(self._sizes),
            self._longest,
            WORD_BYTES=self._word,
            WORD=_WORD_TYPES[self._word],
            BLOCK=_WORDS,
            num_warps=8,
        )
        return numbers


WAYS: dict[str, type[BlockCopies]] = {"batch": BatchCopies, "kernel": KernelCopies, "staged": StagedCopies}
"""On a GPU, by name."""


def default_way() -> str:
    """What moves blocks fastest on this machine's GPU."""
    return "staged" if has_batch_copy() else "kernel"


def make_copies(
    layout: BlockLayout, tensors: Sequence[torch.Tensor], parts: torch.Tensor, way: str | None = None
) -> BlockCopies:
    """
    Args:
        way: one of ``WAYS`` on a GPU; None for the default.

    Raises:
        ConfigError: an unknown way, or one that the driver does not have.
    """
    if tensors[0].device.type != "cuda":
        return IndexCopies(layout, tensors, parts)
    way = way or default_way()
    if way not in WAYS:
        raise ConfigError(f"KV blocks can be copied by {', '.join(WAYS)}, not '{way}'")
    if way != "kernel" and not has_batch_copy():
        raise ConfigError(f"this CUDA driver cannot copy in batches, as '{way}' does; use 'kernel', or a newer driver")
    return WAYS[way](layout, tensors, parts)
