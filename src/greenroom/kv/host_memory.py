"""Host memory for KV blocks: one mapping, page-locked beside a GPU."""

import ctypes
import mmap

import torch

from greenroom import hardware
from greenroom.errors import MemoryLimitError

_HUGE_PAGE = 2 << 20


class HostMemory:
    """``parts``: uint8 [parts, part_bytes], zeroed; a part is the image of one device block."""

    def __init__(self, num_parts: int, part_bytes: int, lock: bool) -> None:
        """
        Args:
            lock: page-lock it for CUDA devices.

        Raises:
            MemoryLimitError: it cannot be had or locked.
        """
        size = num_parts * part_bytes
        self._locked = 0
        available = hardware.available_host_bytes()
        if size > available:
            raise MemoryLimitError(
                f"KV blocks in host memory would take {size / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are "
                "available; give them less (--kv-offload), or free memory"
            )
        try:
            mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryLimitError(
                f"cannot reserve {size / 2**30:.2f} GiB of host memory for KV blocks ({error.strerror}); "
                "give them less (--kv-offload), or free memory"
            ) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        offset = -start % _HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # The tensor keeps the mapping.
        memory = torch.frombuffer(mapping, dtype=torch.uint8)[offset : offset + size]
        self.parts = memory.view(num_parts, part_bytes)
        if lock:
            memory[:: mmap.PAGESIZE] = 0  # pages that exist are locked several times faster
            try:
                hardware.lock_pages(self.address, size)
            except MemoryLimitError as error:
                raise MemoryLimitError(
                    f"cannot page-lock {size / 2**30:.2f} GiB of host memory for KV blocks (the memlock limit is "
                    f"{hardware.memlock_limit()}); give them less (--kv-offload), or raise the limit with "
                    "'ulimit -l unlimited' or the container option '--ulimit memlock=-1'"
                ) from error
            self._locked = self.address

    @property
    def address(self) -> int:
        """Of the first part."""
        return self.parts.data_ptr()

    def close(self) -> None:
        """Unlocks and drops the memory. No copy may be under way. Idempotent."""
        locked, self._locked = self._locked, 0
        if locked:
            hardware.unlock_pages(locked)
        self.parts = self.parts[:0].clone()
