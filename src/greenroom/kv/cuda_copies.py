"""Ways to copy KV blocks between a GPU and page-locked host memory. Needs triton, which GPU builds of torch bring."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl

from greenroom.kernels.gpu.batch_copy import copy_batch, has_batch_copy
from greenroom.kernels.gpu.block_copy import block_copy_kernel
from greenroom.kv.copies import BlockCopies, Direction
from greenroom.kv.layouts import BlockLayout, run_addresses, stretches

_PROGRAMS = 64
_WORDS = 2048
"""Of the copy kernel: at 8 bytes a word, 1 MiB is under way at once."""

_WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

_STAGING_BYTES = 32 << 20


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
        self._table = _image_table(layout, tensors, parts.data_ptr())

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
            direction: _image_table(layout, tensors, staging.data_ptr()) for direction, staging in self._staging.items()
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


class RunTable:
    """What the copy kernel needs to know of the two places that a layout's runs have. The first is the tensors."""

    def __init__(
        self,
        layout: BlockLayout,
        first: np.ndarray,
        pitches: np.ndarray,
        others: np.ndarray,
        device: torch.device,
    ) -> None:
        """
        Args:
            first: int64 [runs], addresses of block 0's runs in the tensors.
            pitches: int64 [runs], bytes from a run to the next block's in the other place.
            others: int64 [runs], addresses of block 0's runs there.
            device: the GPU that copies.
        """
        # Addresses of tensors and mappings count as well: a slice may start anywhere.
        addresses = np.concatenate([first, others])
        self._word = int(np.gcd.reduce(np.append(addresses, layout.word_bytes)))
        table = np.stack([first, layout.pitches, others, pitches, layout.sizes])
        rows = torch.from_numpy(table).to(device)
        self._tensors, self._others, self._sizes = (rows[0], rows[1]), (rows[2], rows[3]), rows[4]
        self._longest = int(layout.sizes.max())
        # Compiles the kernel, which otherwise the first request would wait for.
        none = torch.zeros(2, dtype=torch.int64, device=device)
        self.launch(none, none, 0)

    def copy(self, direction: Direction, blocks: np.ndarray, images: np.ndarray) -> torch.Tensor:
        """From the other place to the tensors (LOAD), or there (STORE), on the current stream.

        Returns:
            The numbers that the kernel reads. They were allocated on the current stream.
        """
        device = self._sizes.device
        # Both begin on 16 bytes: for another alignment the kernel would be compiled anew.
        numbers = torch.zeros(2, len(blocks) + len(blocks) % 2, dtype=torch.int64)
        numbers.numpy()[:, : len(blocks)] = blocks, images
        if device.type == "cuda":
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        if direction is Direction.LOAD:
            self._launch(self._others, numbers[1], self._tensors, numbers[0], len(blocks))
        else:
            self._launch(self._tensors, numbers[0], self._others, numbers[1], len(blocks))
        return numbers

    def launch(self, sources: torch.Tensor, targets: torch.Tensor, count: int) -> None:
        """Tensors' blocks to the other place. sources, targets: int64 on the device, the first ``count`` count."""
        self._launch(self._tensors, sources, self._others, targets, count)

    def _launch(
        self,
        source: tuple[torch.Tensor, torch.Tensor],
        source_blocks: torch.Tensor,
        target: tuple[torch.Tensor, torch.Tensor],
        target_blocks: torch.Tensor,
        count: int,
    ) -> None:
        block_copy_kernel[(_PROGRAMS,)](
            *source,
            *target,
            self._sizes,
            source_blocks,
            target_blocks,
            count,
            len(self._sizes),
            self._longest,
            WORD_BYTES=self._word,
            WORD=_WORD_TYPES[self._word],
            BLOCK=_WORDS,
            num_warps=8,
        )


def _image_table(layout: BlockLayout, tensors: Sequence[torch.Tensor], images: int) -> RunTable:
    """Between tensors and images that begin at an address."""
    pitches = np.full(len(layout.runs), layout.block_bytes, dtype=np.int64)
    first, own = layout.device_addresses(tensors), images + layout.image_offsets
    return RunTable(layout, first, pitches, own, tensors[0].device)


WAYS: dict[str, type[BlockCopies]] = {"batch": BatchCopies, "kernel": KernelCopies, "staged": StagedCopies}
"""By name."""


def available_ways() -> list[str]:
    """Those that the driver knows."""
    return [way for way in WAYS if way == "kernel" or has_batch_copy()]


def default_way() -> str:
    """What moves blocks fastest on this machine's GPU."""
    return "staged" if has_batch_copy() else "kernel"
