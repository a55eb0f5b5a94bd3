"""Ways to copy KV blocks between the device's tensors and their images in host memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from greenroom.kv.layouts import BlockLayout


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
    """A run of all blocks at a time, by numpy's indexing; for tensors in host memory. Done when it returns."""

    def __init__(self, layout: BlockLayout, tensors: Sequence[torch.Tensor], parts: torch.Tensor) -> None:
        super().__init__(layout, tensors, parts)
        self._pairs = []
        for run, offset in zip(layout.runs, layout.image_offsets.tolist(), strict=True):
            tensor = tensors[run.tensor]
            first = tensor.storage_offset() * tensor.element_size() + run.offset
            view = torch.empty(0, dtype=torch.uint8).set_(
                tensor.untyped_storage(), first, (layout.num_blocks, run.size), (run.pitch, 1)
            )
            self._pairs.append((view.numpy(), parts[:, offset : offset + run.size].numpy()))

    def start(self, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> None:
        """See ``BlockCopies``."""
        for view, images in self._pairs:
            if direction is Direction.LOAD:
                view[blocks] = images[parts]
            else:
                images[parts] = view[blocks]
