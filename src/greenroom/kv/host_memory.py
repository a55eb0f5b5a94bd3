"""Host memory for KV blocks: one mapping, page-locked beside a GPU."""

import mmap

from greenroom import hardware
from greenroom.errors import MemoryLimitError


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
        available = hardware.available_host_bytes()
        if size > available:
            raise MemoryLimitError(
                f"KV blocks in host memory would take {size / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are "
                "available; give them less (--kv-offload), or free memory"
            )
        memory = hardware.map_host_memory(size, "KV blocks")
        self.parts = memory.view(num_parts, part_bytes)
        self._locked = False
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
            self._locked = True

    @property
    def address(self) -> int:
        """Of the first part."""
        return self.parts.data_ptr()

    def close(self) -> None:
        """Unlocks and drops the memory. No copy may be under way. Idempotent."""
        if self._locked:
            self._locked = False
            hardware.unlock_pages(self.address)
        self.parts = self.parts[:0].clone()
