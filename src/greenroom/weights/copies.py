"""How blocks get from host memory into buffers on the device."""

import ctypes
from abc import ABC, abstractmethod

import torch

from greenroom.errors import EngineError
from greenroom.hardware import cuda_driver


class Copies(ABC):
    """Copies of uint8 blocks into numbered slots. Those of one slot under way at once are pieces of one block."""

    @abstractmethod
    def start(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins a copy, behind all work that the current stream was given before."""

    @abstractmethod
    def wait(self, slot: int) -> None:
        """Work that the current stream is given from here on finds the slot's copies complete."""

    @abstractmethod
    def recording(self) -> bool:
        """Whether work is being captured now instead of done."""


class HostCopies(Copies):
    """On a CPU device: at once."""

    def start(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Done when it returns."""
        target.copy_(source)

    def wait(self, slot: int) -> None:
        """Nothing is under way."""

    def recording(self) -> bool:
        """There is no capture."""
        return False


class StreamCopies(Copies):
    """On a GPU: a stream of its own, which forks from the current one with each copy.

    Events alone order the two, so the same calls work eagerly and inside a capture. What was started inside a capture
    must be waited for inside it.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # Each slot has its own pair: an event that is recorded again forgets what it stood for. Pieces of one slot may
        # share it: who waited has been told by then, and the last piece's copy ends behind the others'.
        self._forked = [torch.cuda.Event() for _ in range(slots)]
        self._landed = [torch.cuda.Event() for _ in range(slots)]

    def start(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """``source`` must be page-locked.

        By the driver's own call: while work is captured, torch copies only from memory that it has locked itself.

        Raises:
            EngineError: the driver refused.
        """
        self._forked[slot].record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked[slot])
        error = cuda_driver().cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(target.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_size_t(source.numel()),
            ctypes.c_void_p(self._stream.cuda_stream),
        )
        if error != 0:
            raise EngineError(f"the driver cannot copy offloaded weights to the device (CUDA error {error})")
        self._landed[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """By an event."""
        torch.cuda.current_stream(self._device).wait_event(self._landed[slot])

    def recording(self) -> bool:
        """Of the current stream."""
        return torch.cuda.is_current_stream_capturing()
