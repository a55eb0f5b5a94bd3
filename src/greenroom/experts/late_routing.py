"""Routing of layers that the host does not decide, read once their step has ended."""

import numpy as np
import torch

from greenroom.experts.tier import HostRouting, LayerBatch


class LateRouting:
    """Used by one thread. Nothing is enqueued before ``take``: a layer's routing waits where it is."""

    def __init__(self) -> None:
        self._batches: list[LayerBatch] = []

    def keep(self, batch: LayerBatch) -> None:
        """Of a layer that runs now. Its routing must not be written to afterwards."""
        self._batches.append(batch)

    def drop(self) -> None:
        """What was kept is of no interest."""
        self._batches = []

    def take(self) -> list[tuple[int, HostRouting]]:
        """(layer, routing) of all that was kept since the last call. Waits for the device, if there is anything."""
        batches, self._batches = self._batches, []
        if not batches:
            return []
        ids = _on_host([batch.ids for batch in batches], torch.int32)
        weights = _on_host([batch.weights for batch in batches], torch.float32)
        return [(batch.layer, HostRouting(*pair)) for batch, *pair in zip(batches, ids, weights, strict=True)]


def _on_host(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[np.ndarray]:
    """All in one copy."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]
