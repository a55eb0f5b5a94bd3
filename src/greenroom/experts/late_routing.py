"""Routing of layers that the host does not decide, read once their step has ended."""

import torch

from greenroom.experts.tier import HostRouting, LayerBatch


class LateRouting:
    """Used by one thread. The device writes page-locked memory; the host reads it behind a wait for the step's end."""

    def __init__(self) -> None:
        self._asked: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._asked)

    def request(self, batch: LayerBatch) -> None:
        """Enqueues copies of the routing to the host."""
        self._asked.append((batch.layer, _download(batch.ids), _download(batch.weights)))

    def take(self) -> list[tuple[int, HostRouting]]:
        """(layer, routing) of each request since the last call. The device must be through with the copies."""
        asked, self._asked = self._asked, []
        return [(layer, HostRouting(ids.numpy(), weights.numpy())) for layer, ids, weights in asked]


def _download(source: torch.Tensor) -> torch.Tensor:
    # New memory each time: the allocator hands a buffer out again only when the device is through with it.
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
