"""Page-locked memory through which a layer's batch reaches the CPU engine and its result comes back."""

import numpy as np
import torch

from greenroom.experts.ticket import Ending
from greenroom.experts.tier import HostRouting, LayerBatch

_LINE = 16
"""int32 of a cache line, which the word that the device looks at has for itself."""


class _Mapped:
    """What torch needs to see page-locked float32 memory as a tensor of the device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "<f4",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


class Staging:
    """Grows to the largest batch seen and is used again by every layer.

    The device writes ids, weights and hidden, once ``request`` has been called; the host reads the first two after
    ``arrived`` and hidden after ``wait_for_hidden``. The CPU engine writes ``out`` and then the word of
    ``next_ending``, which the device waits for before it reads ``out``. The next layer's ``request`` lies behind that
    read on the device's stream, and ``arrived`` waits for the device, so one set of buffers serves all layers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._mapped_out: torch.Tensor | None = None
        self._mapped_from: torch.Tensor | None = None
        self._tokens = 0
        self._done = torch.zeros(_LINE, dtype=torch.int32, pin_memory=True)
        self._busy_ns = torch.zeros(1, dtype=torch.int64)
        self._jobs = 0
        self._fetched = torch.cuda.Event()
        self._hidden_fetched = torch.cuda.Event()

    @property
    def hidden(self) -> torch.Tensor:
        """[T, H] of the experts' dtype."""
        return self._buffers["hidden"][: self._tokens]

    @property
    def weights(self) -> torch.Tensor:
        """float32 [T, K]."""
        return self._buffers["weights"][: self._tokens]

    @property
    def out(self) -> torch.Tensor:
        """float32 [T, H], for the CPU engine's result."""
        return self._buffers["out"][: self._tokens]

    @property
    def out_on_device(self) -> torch.Tensor:
        """The same memory for the device's kernels, which read it over PCIe."""
        out = self._buffers["out"]
        if self._mapped_out is None or self._mapped_from is not out:
            self._mapped_out, self._mapped_from = torch.as_tensor(_Mapped(out), device=self._device), out
        return self._mapped_out[: self._tokens]

    def next_ending(self) -> Ending:
        """Where the next job of the CPU engine is to tell its end. Its value is another one each time."""
        self._jobs = (self._jobs + 1) & 0x7FFFFFFF
        return Ending(self._done[:1], self._jobs, self._busy_ns)

    def request(self, batch: LayerBatch) -> None:
        """Enqueues copies of the batch to the host: the routing, and ``hidden`` behind it."""
        self._tokens = len(batch.hidden)
        stream = torch.cuda.current_stream(batch.hidden.device)
        self._download("ids", batch.ids)
        self._download("weights", batch.weights)
        self._fetched.record(stream)
        self._download("hidden", batch.hidden)
        self._hidden_fetched.record(stream)
        self._reserve("out", batch.hidden.shape, torch.float32)

    def arrived(self) -> HostRouting:
        """Waits for the routing. The device must not be waiting for a job that may never end."""
        self._fetched.synchronize()
        return HostRouting(self._buffers["ids"][: self._tokens].numpy(), self.weights.numpy())

    def wait_for_hidden(self) -> None:
        """``hidden`` is complete behind this."""
        self._hidden_fetched.synchronize()

    def upload(self, table: np.ndarray, device: torch.device) -> torch.Tensor:
        """int32 [n] on the device, copied without a wait. Once between two calls of ``request``."""
        twin = self._reserve("table", torch.Size(table.shape), torch.int32)[: len(table)]
        twin.numpy()[:] = table
        return twin.to(device, non_blocking=True)

    def _download(self, name: str, source: torch.Tensor) -> None:
        self._reserve(name, source.shape, source.dtype)[: self._tokens].copy_(source, non_blocking=True)

    def _reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of at least ``shape[0]`` rows."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != dtype or buffer.shape[1:] != shape[1:] or len(buffer) < shape[0]:
            # The one being replaced may still be read by the device; the allocator keeps it until then.
            buffer = torch.empty(shape, dtype=dtype, pin_memory=True)
            self._buffers[name] = buffer
        return buffer
