"""DeviceTier: the memory and the arithmetic of the device that runs the model.

Two tiers exist: ``CudaTier``, and ``HostTier`` for machines without a GPU, where cache slots and miss
buffers are ordinary memory and the CPU engine computes every lane.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from greenroom.experts.cache import SlotWrite
from greenroom.experts.dispatch import IDLE, CostModel, Dispatch, LaneState
from greenroom.experts.formats import ExpertFormat


@dataclass(frozen=True)
class LayerBatch:
    """One layer's input in one step, on the model's device.

    hidden: [T, H] of the experts' dtype, contiguous. ids: int32 [T, K], contiguous; ids outside
    [0, experts) are skipped. weights: float32 [T, K], contiguous.
    """

    layer: int
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class HostRouting:
    """A layer's routing as the host reads it: ids int32 [T, K], weights float32 [T, K]."""

    ids: np.ndarray
    weights: np.ndarray


class DeviceTier(ABC):
    """Owns cache slots, miss buffers and whatever orders access to them.

    A step calls, in this order: ``landed_writes``, ``begin_step``, then per layer ``read_routing``,
    ``lanes`` and ``run``, or ``run_complete`` or ``run_undecided`` alone, then ``end_step``, ``late_routing`` and any
    number of ``start_write``.
    """

    device: torch.device

    @property
    @abstractmethod
    def device_bytes(self) -> int:
        """Bytes of cache slots and miss buffers."""

    @property
    @abstractmethod
    def group_size(self) -> int:
        """Experts that fit a miss buffer."""

    @abstractmethod
    def measure_costs(self) -> CostModel:
        """Rates of the two lanes that an absent expert can take, measured here and now. Before any step."""

    @property
    @abstractmethod
    def slots(self) -> list[torch.Tensor]:
        """uint8 [slots, block_bytes] of each layer, on the device."""

    def begin_step(self, slot_of: np.ndarray) -> None:  # noqa: B027 - most have nothing to do
        """``slot_of`` (int32 [layers, experts]) is the map of the coming step, and stands still within it."""

    @abstractmethod
    def read_routing(self, batch: LayerBatch) -> HostRouting:
        """The one read of the device in a layer. Valid until the next call."""

    def lanes(self, batch: LayerBatch, costs: CostModel) -> LaneState:
        """What ``dispatch`` has to know of work under way. ``costs`` are those that it will decide by."""
        return IDLE

    @abstractmethod
    def run(self, batch: LayerBatch, ids: np.ndarray, plan: Dispatch, slot_of: np.ndarray) -> torch.Tensor:
        """Computes all lanes.

        Args:
            ids: those that ``read_routing`` returned.
            slot_of: int32 [experts], the layer's map.

        Returns:
            float32 [T, H] on the device: per token the weighted sum of its experts' outputs.
        """

    def takes_complete(self, layer: int) -> bool:
        """Whether ``run_complete`` takes the layer once each of its experts lies in the slot of its own number."""
        return False

    def run_complete(self, batch: LayerBatch) -> torch.Tensor:
        """Computes a layer whose experts all lie in the slots of their own numbers. The host decides and reads nothing.

        Args:
            batch: with ids and weights of any integer and float dtype; those are kept until ``late_routing``.

        Returns:
            [T, H] of hidden's dtype, as ``run``.
        """
        raise NotImplementedError

    def has_to_decide(self, costs: CostModel) -> bool:
        """Whether it matters which lane an expert takes; if not, ``run_undecided`` takes all layers."""
        return True

    def run_undecided(self, batch: LayerBatch) -> torch.Tensor:
        """Computes a layer whose experts all take one way, wherever they lie. Its routing is kept until
        ``late_routing``, and must not be written to until then.

        Returns:
            float32 [T, H], as ``run``.
        """
        raise NotImplementedError

    def late_routing(self) -> list[tuple[int, HostRouting]]:
        """(layer, routing) of what ``run_complete`` or ``run_undecided`` has run in the step that was ended last; waits
        for its end."""
        return []

    @abstractmethod
    def end_step(self) -> None:
        """Marks the point that every later write into a slot must wait for.

        Raises:
            EngineError: the CPU engine failed in the step, which is ended all the same.
        """

    def abandon_step(self) -> None:
        """``end_step`` of a step that has failed already."""
        self.end_step()

    @abstractmethod
    def start_write(self, write: SlotWrite) -> None:
        """Starts copying an expert from the store into a slot, after all work of ended steps."""

    @abstractmethod
    def landed_writes(self, wait: bool = False) -> list[SlotWrite]:
        """Writes whose bytes have arrived since the last call, or with ``wait`` all that were started."""

    @abstractmethod
    def close(self) -> None:
        """Waits for everything under way and frees the device's memory. Idempotent."""


def allocate_blocks(formats: list[ExpertFormat], counts: list[int], device: torch.device) -> list[torch.Tensor]:
    """uint8 [count, block_bytes] a layer on ``device``."""
    return [
        torch.empty(count, fmt.block_bytes, dtype=torch.uint8, device=device)
        for fmt, count in zip(formats, counts, strict=True)
    ]
