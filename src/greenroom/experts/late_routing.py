"""Routing of layers that the host does not decide, read once their step has ended."""

import numpy as np
import torch

from greenroom.experts.tier import HostRouting, LayerBatch


class LateRouting:
    """Used by one thread. Nothing is enqueued before ``take``: a layer's routing waits where it is."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def keep(self, batch: LayerBatch) -> None:
        """Of a layer that runs now. Its routing must not be written to afterwards."""
        # Not the batch: hidden rows of all layers would stay on the device until the step has ended.
        self._kept.append((batch.layer, batch.ids.detach(), batch.weights.detach()))

    def drop(self) -> None:
        """What was kept is of no interest."""
        self._kept = []

    def take(self) -> list[tuple[int, HostRouting]]:
        """(layer, routing) of all that was kept since the last call. Waits for the device, if there is anything."""
        kept, self._kept = self._kept, []
        if not kept:
            return []
        layers, ids, weights = zip(*kept, strict=True)
        pairs = zip(_on_host(ids, torch.int32), _on_host(weights, torch.float32), strict=True)
        return [(layer, HostRouting(*pair)) for layer, pair in zip(layers, pairs, strict=True)]


def _on_host(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> list[np.ndarray]:
    """All in one copy."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]
