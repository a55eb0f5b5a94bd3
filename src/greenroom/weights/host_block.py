"""Host memory for a unit's weights: one mapping, page-locked beside a GPU."""

import ctypes
import mmap

import torch
from torch import nn

from greenroom import hardware
from greenroom.errors import MemoryLimitError
from greenroom.weights.select import Unit

_HUGE_PAGE = 2 << 20


class HostBlock:
    """``memory``: uint8 [size], zeroed, at a huge page's boundary if it is large."""

    def __init__(self, size: int, lock: bool) -> None:
        """
        Raises:
            MemoryLimitError: it cannot be had or locked.
        """
        try:
            mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryLimitError(
                f"cannot reserve {size / 2**20:.0f} MiB of host memory for offloaded weights ({error.strerror}); "
                "free memory, raise the limit, or offload fewer layers"
            ) from error
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        offset = -start % _HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        # The tensor keeps the mapping.
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)[offset : offset + size]
        self._locked = False
        if lock:
            self.memory[:: mmap.PAGESIZE] = 0  # pages that exist are locked several times faster
            hardware.lock_pages(start + offset, size)
            self._locked = True

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.memory.data_ptr()

    def close(self) -> None:
        """Unlocks and drops the memory. No copy may be under way. Idempotent."""
        if self._locked:
            self._locked = False
            hardware.unlock_pages(self.address)
        self.memory = self.memory[:0].clone()


def take_unit(unit: Unit, model: nn.Module, lock: bool) -> tuple[HostBlock, list[nn.Parameter]]:
    """A block with the current values of the unit's weights, and the parameters that they come from."""
    parameters = [model.get_parameter(weight.names[0]) for weight in unit.weights]
    block = HostBlock(unit.nbytes, lock)
    try:
        for view, parameter in zip(unit.views(block.memory), parameters, strict=True):
            view.copy_(parameter.data)
    except BaseException:
        block.close()
        raise
    return block, parameters


def empty(parameters: list[nn.Parameter]) -> None:
    """Takes the parameters' memory away, for a model that will not run again."""
    for parameter in parameters:
        parameter.data = parameter.data.new_empty(0)
