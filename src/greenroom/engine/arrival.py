"""Arrival: a tensor's way to the host, behind all that has been enqueued."""

import numpy as np
import torch


class Arrival:
    """Begins at once, and nobody waits until ``wait``, whatever is enqueued behind it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Page-locked, so that nobody waits here.
        self._values = tensor.to("cpu", non_blocking=True)
        self._array = self._values.numpy()
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> np.ndarray:
        """Its values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._array
