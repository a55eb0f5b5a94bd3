"""What each layer did, counted in experts a step (an expert used by several tokens counts once)."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from greenroom.experts.dispatch import CostModel

COUNTER_NAMES = ("hits", "misses", "streamed", "cpu", "admissions", "evictions", "landed")
"""In the order of ``LayerCounters``'s fields."""


@dataclass(frozen=True)
class LayerCounters:
    """One layer's counts, or the sum of all layers'.

    Attributes:
        hits: used from a cache slot.
        misses: used without having a slot; ``streamed + cpu``.
        streamed: copied into a miss buffer and run on the device.
        cpu: run by the CPU engine.
        admissions: copied into a cache slot after a step, or before the first.
        evictions: removed from a cache slot.
        landed: streamed straight into a cache slot, to stay there; no copy besides.
    """

    hits: int
    misses: int
    streamed: int
    cpu: int
    admissions: int
    evictions: int
    landed: int = 0

    @property
    def copies(self) -> int:
        """Experts copied to the device."""
        return self.streamed + self.admissions

    def to_dict(self) -> dict[str, int]:
        """All counts by name, ``copies`` included."""
        return {**asdict(self), "copies": self.copies}


class Counters:
    """Running counts of all layers."""

    def __init__(self, layers: int) -> None:
        self._counts = np.zeros((layers, len(COUNTER_NAMES)), dtype=np.int64)

    def add(self, layer: int, **counts: int) -> None:
        """Adds to the named counts of a layer."""
        for name, count in counts.items():
            self._counts[layer, COUNTER_NAMES.index(name)] += count

    def add_all(self, layers: slice = slice(None), **counts: np.ndarray) -> None:
        """Adds to the named counts of all layers, or of some: int [layers] each."""
        for name, count in counts.items():
            self._counts[layers, COUNTER_NAMES.index(name)] += count

    def reset(self) -> None:
        """Sets every count to 0."""
        self._counts[:] = 0

    def table(self) -> np.ndarray:
        """int64 [layers, counts]: a copy, columns as in ``COUNTER_NAMES``."""
        return self._counts.copy()

    def layers(self) -> tuple[LayerCounters, ...]:
        """One entry a layer."""
        return tuple(LayerCounters(*map(int, row)) for row in self._counts)

    def total(self) -> LayerCounters:
        """The sum over layers."""
        return LayerCounters(*map(int, self._counts.sum(axis=0)))


@dataclass(frozen=True)
class OffloadStats:
    """What is active and what it has done so far.

    host_bytes: the store. device_bytes: cache slots and miss buffers. load_seconds: from the call of
    ``load`` until the model is ready. costs: the rates by which absent experts are split. weights_offload: the backend
    that keeps other weights in host memory, "none" if nothing does; weights_host_bytes, weights_device_bytes: of the
    memory that it holds there, and of its buffers.
    """

    policy: str
    device: str
    isa: str
    threads: int
    cache_expert_num: int
    host_bytes: int
    device_bytes: int
    page_locked: bool
    load_seconds: float
    costs: CostModel
    layers: tuple[LayerCounters, ...]
    total: LayerCounters
    weights_offload: str = "none"
    weights_host_bytes: int = 0
    weights_device_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "costs": asdict(self.costs),
            "layers": [layer.to_dict() for layer in self.layers],
            "total": self.total.to_dict(),
        }
