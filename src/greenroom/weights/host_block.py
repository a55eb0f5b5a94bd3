"""Host memory for a unit's weights: one mapping, page-locked beside a GPU."""

import mmap

from torch import nn

from greenroom import hardware
from greenroom.errors import ConfigError
from greenroom.weights.select import Unit


class HostBlock:
    """``memory``: uint8 [size], zeroed."""

    def __init__(self, size: int, lock: bool) -> None:
        """
        Raises:
            MemoryLimitError: it cannot be had or locked.
        """
        self.memory = hardware.map_host_memory(size, "offloaded weights")
        self._locked = False
        if lock:
            self.memory[:: mmap.PAGESIZE] = 0  # pages that exist are locked several times faster
            hardware.lock_pages(self.address, size)
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
    """A block with the current values of the unit's weights, and the parameters that they come from.

    Raises:
        ConfigError: they are not what was selected.
    """
    parameters = [model.get_parameter(weight.names[0]) for weight in unit.weights]
    for weight, parameter in zip(unit.weights, parameters, strict=True):
        if (parameter.shape, parameter.dtype) != (weight.shape, weight.dtype):
            raise ConfigError(
                f"'{weight.names[0]}' is {parameter.dtype} {list(parameter.shape)}, but was selected as {weight.dtype} "
                f"{list(weight.shape)}; select from the model that is loaded"
            )
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
