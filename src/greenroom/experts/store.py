"""HostStore: the one copy of every routed expert, in host memory."""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import torch

from greenroom import hardware, numa
from greenroom.errors import MemoryLimitError
from greenroom.experts.formats import ExpertFormat, ExpertViews

LockPages = Callable[[int, int], None]
"""Page-locks (address, bytes) for the device; raises MemoryLimitError."""


@dataclass
class _LayerMemory:
    """One layer's mapping, ``region``, and its experts, ``blocks``."""

    address: int
    size: int
    region: torch.Tensor
    blocks: torch.Tensor
    locked: bool = field(default=False)


class HostStore:
    """Blocks of all experts of all layers, each layer one mapping of its own.

    The bytes serve the copy engine and the CPU kernels alike. A layer is page-locked as a whole, so
    no single registration grows with the model. Fill it through ``views``, then read it from any
    thread: after loading it never changes.
    """

    def __init__(
        self,
        formats: list[ExpertFormat],
        num_experts: list[int],
        lock_pages: LockPages | None = None,
        unlock_pages: Callable[[int], None] | None = None,
        homes: Sequence[Sequence[int]] = (),
    ) -> None:
        """Allocates (and, with ``lock_pages``, page-locks) memory for every layer.

        Args:
            formats: one a layer.
            num_experts: one a layer.
            lock_pages: called with each layer's address and size in bytes.
            unlock_pages: called with the address of each locked layer on ``close``.
            homes: cores of each NUMA node that is to hold a share of every layer; none for wherever it is written.

        Raises:
            MemoryLimitError: the memory cannot be had or locked; nothing stays allocated.
        """
        self.formats = formats
        self.num_experts = num_experts
        self._unlock_pages = unlock_pages
        self._layers: list[_LayerMemory] = []
        try:
            for fmt, count in zip(formats, num_experts, strict=True):
                layer = _allocate(count, fmt.block_bytes)
                self._layers.append(layer)
                if homes:
                    numa.place(layer.region, homes)
                elif lock_pages is not None:
                    # Pages that exist already, huge ones above all, are locked several times faster.
                    layer.region[:: mmap.PAGESIZE] = 0
                if lock_pages is not None:
                    lock_pages(layer.address, layer.size)
                    layer.locked = True
        except MemoryLimitError:
            self.close()
            raise

    @classmethod
    def joined(cls, stores: Sequence["HostStore"]) -> "HostStore":
        """One store of all their layers, in this order. Those given are empty afterwards, and need not be closed."""
        whole = cls([], [])
        for store in stores:
            whole.formats += store.formats
            whole.num_experts += store.num_experts
            whole._layers += store._layers
            whole._unlock_pages = whole._unlock_pages or store._unlock_pages
            store._layers = []
        return whole

    def __len__(self) -> int:
        return len(self._layers)

    def __enter__(self) -> "HostStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, without the rounding of each layer to a huge page."""
        return sum(layer.blocks.numel() for layer in self._layers)

    @property
    def locked(self) -> bool:
        """Whether every layer is page-locked."""
        return bool(self._layers) and all(layer.locked for layer in self._layers)

    def blocks(self, layer: int) -> torch.Tensor:
        """uint8 [experts, block_bytes] in host memory."""
        return self._layers[layer].blocks

    def views(self, layer: int) -> ExpertViews:
        """The layer's blocks as weight and bias tensors; writing to them fills the store."""
        return self.formats[layer].views(self.blocks(layer))

    def addresses(self, layer: int) -> np.ndarray:
        """uint64 [experts]: where each block starts."""
        first = np.uint64(self._layers[layer].address)
        pitch = np.uint64(self.formats[layer].block_bytes)
        return first + np.arange(self.num_experts[layer], dtype=np.uint64) * pitch

    def close(self) -> None:
        """Unlocks and drops all memory. The caller must have ended every copy and job. Idempotent."""
        layers, self._layers = self._layers, []
        for layer in layers:
            if layer.locked and self._unlock_pages is not None:
                self._unlock_pages(layer.address)


def _allocate(count: int, block_bytes: int) -> _LayerMemory:
    """Zeroed memory for ``count`` blocks, in whole huge pages; pages come when it is written."""
    size = count * block_bytes
    if size == 0:
        raise ValueError("a layer needs at least one expert")
    # Huge pages: fewer TLB misses for the CPU kernels, fewer pages to lock.
    rounded = -(-size // hardware.HUGE_PAGE) * hardware.HUGE_PAGE
    region = hardware.map_host_memory(rounded, "a layer's experts")
    return _LayerMemory(region.data_ptr(), rounded, region, region[:size].view(count, block_bytes))
