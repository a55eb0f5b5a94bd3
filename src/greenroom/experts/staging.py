"""Page-locked memory through which a layer's batch reaches the CPU engine and its result comes back."""

import numpy as np
import torch

from greenroom.experts.tier import HostRouting, LayerBatch


class Staging:
    """Grows to the largest batch seen and is used again by every layer.

    The device writes ids, weights and hidden, the host reads them after ``fetch``; the CPU engine
    writes ``out``, the device reads it behind that. The next ``fetch`` waits for the device, and with
    it for that read, so one set of buffers serves all layers.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._tokens = 0
        self._fetched = torch.cuda.Event()

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

    def fetch(self, batch: LayerBatch) -> HostRouting:
        """Copies the batch to the host and waits for it."""
        self._tokens = len(batch.hidden)
        sources = {"ids": batch.ids, "weights": batch.weights, "hidden": batch.hidden}
        for name, source in sources.items():
            self._reserve(name, source.shape, source.dtype)[: self._tokens].copy_(source, non_blocking=True)
        self._fetched.record(torch.cuda.current_stream(batch.hidden.device))
        self._reserve("out", batch.hidden.shape, torch.float32)
        self._fetched.synchronize()
        return HostRouting(self._buffers["ids"][: self._tokens].numpy(), self.weights.numpy())

    def upload_positions(self, positions: np.ndarray, device: torch.device) -> torch.Tensor:
        """int32 [experts] on the device, copied without a wait. Once between two calls of ``fetch``."""
        twin = self._reserve("positions", torch.Size(positions.shape), torch.int32)[: len(positions)]
        twin.numpy()[:] = positions
        return twin.to(device, non_blocking=True)

    def _reserve(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of at least ``shape[0]`` rows."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != dtype or buffer.shape[1:] != shape[1:] or len(buffer) < shape[0]:
            # The one being replaced may still be read by the device; the allocator keeps it until then.
            buffer = torch.empty(shape, dtype=dtype, pin_memory=True)
            self._buffers[name] = buffer
        return buffer
