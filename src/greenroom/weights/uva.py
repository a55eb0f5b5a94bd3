"""UVA: the device reads the selected weights where they lie, in page-locked host memory, whenever it needs them."""

import ctypes
from typing import Any

import torch
from torch import nn

from greenroom import hardware
from greenroom.errors import ConfigError, MemoryLimitError
from greenroom.weights.base import WeightOffloader
from greenroom.weights.host_block import HostBlock, empty, take_unit
from greenroom.weights.select import Selection


class UvaOffload(WeightOffloader):
    """Parameters are tensors of the device over host memory; nothing is copied and no pass needs a hook."""

    def __init__(self, selection: Selection, device: torch.device) -> None:
        """
        Raises:
            ConfigError: the device is not a GPU.
        """
        super().__init__(selection)
        if device.type != "cuda":
            raise ConfigError(
                f"the uva backend lets a GPU read host memory, but the device is {device}; leave out "
                "weights_offload_backend, or choose a CUDA device"
            )
        self._device = device
        self._blocks: list[HostBlock] = []
        self._parameters: list[nn.Parameter] = []

    def take(self, model: nn.Module) -> None:
        """The parameters then read host memory."""
        try:
            for unit in self.selection.units:
                block, parameters = take_unit(unit, model, lock=True)
                self._blocks.append(block)
                self._parameters += parameters
                for parameter, view in zip(parameters, unit.views(device_view(block, self._device)), strict=True):
                    parameter.data = view
        except BaseException:
            self.close()
            raise

    def attach(self, model: nn.Module, decoder: nn.Module) -> None:
        """Nothing has to be ordered: the weights never change."""

    def close(self) -> None:
        """Frees the memory."""
        empty(self._parameters)
        for block in self._blocks:
            block.close()
        self._blocks, self._parameters = [], []


def device_view(block: HostBlock, device: torch.device) -> torch.Tensor:
    """A tensor of ``device`` over a page-locked block: uint8 [size].

    The block must outlive what is done with the view; the view keeps its memory, but not its page lock.

    Raises:
        MemoryLimitError: the driver has no address for it.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context current in this thread
        pointer = ctypes.c_uint64()
        error = hardware.cuda_driver().cuMemHostGetDevicePointer_v2(
            ctypes.byref(pointer), ctypes.c_void_p(block.address), ctypes.c_uint(0)
        )
        if error != 0:
            raise MemoryLimitError(
                f"the GPU cannot address page-locked host memory (CUDA error {error}); choose the prefetch backend"
            )
        view: torch.Tensor = torch.as_tensor(_Interface(block, int(pointer.value)), device=device)
    if view.data_ptr() != pointer.value:
        raise MemoryLimitError(f"{device} cannot read page-locked host memory in place; choose the prefetch backend")
    return view


class _Interface:
    """Device memory as torch takes it over from other libraries; the tensor keeps this object, and so the block."""

    def __init__(self, block: HostBlock, pointer: int) -> None:
        self._memory = block.memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (len(block.memory),),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }
