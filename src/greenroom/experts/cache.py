"""ExpertCache: which expert is in which slot, and when that may change.

A slot is free, being written, or mapped. The map changes between steps only:

- ``unmap_and_write`` at the end of a step takes the victim out of the map and starts the write; the
  step's own work was enqueued before, so the write only has to wait for it on the device;
- ``map_landed`` before a later step puts the newcomer into the map, once its bytes have arrived.

So a step never sees a slot that is being written. Each slot counts its changes in ``version``: odd
while it is written, even while its contents stand still.
"""

from dataclasses import dataclass

import numpy as np

from greenroom.experts.residency import ABSENT, Swap


@dataclass(frozen=True)
class SlotWrite:
    """A write of ``expert`` into ``slot`` of ``layer`` that has been started."""

    layer: int
    slot: int
    expert: int


class ExpertCache:
    """Host-side state of all layers' slots. One thread, the one that runs steps, uses it.

    Attributes:
        slot_of: int32 [layers, experts], the map; ABSENT where an expert has no slot.
        expert_in: int32 [layers, slots], its inverse; ABSENT where a slot is free or being written.
        version: int64 [layers, slots].
    """

    def __init__(self, num_experts: list[int], num_slots: list[int]) -> None:
        """One entry a layer in each list. A layer has at most as many slots as experts."""
        if any(slots > experts or slots < 0 for slots, experts in zip(num_slots, num_experts, strict=True)):
            raise ValueError(f"slots {num_slots} do not fit experts {num_experts}")
        layers = len(num_experts)
        self.num_experts = num_experts
        self.num_slots = num_slots
        self.slot_of = np.full((layers, max(num_experts)), ABSENT, dtype=np.int32)
        self.expert_in = np.full((layers, max(num_slots)), ABSENT, dtype=np.int32)
        self.version = np.zeros((layers, max(num_slots)), dtype=np.int64)
        self._is_slot = np.arange(max(num_slots))[None, :] < np.array(num_slots)[:, None]
        self._writing: list[dict[int, int]] = [{} for _ in num_experts]  # of each layer, slot -> expert
        self._arriving = np.zeros((layers, max(num_experts)), dtype=bool)

    def layer_map(self, layer: int) -> np.ndarray:
        """int32 [experts]: a view of the layer's row of the map."""
        return self.slot_of[layer, : self.num_experts[layer]]

    def free_slots(self) -> np.ndarray:
        """bool [layers, slots]: slots that hold nothing and are not being written."""
        free: np.ndarray = self._is_slot & (self.expert_in == ABSENT) & (self.version % 2 == 0)
        return free

    def being_written(self) -> np.ndarray:
        """bool [layers, experts]: experts on their way into a slot."""
        return self._arriving

    def unmap_and_write(self, layer: int, swap: Swap) -> SlotWrite:
        """Takes the victim out of the map and marks the slot as being written."""
        if self.version[layer, swap.slot] % 2 or self.expert_in[layer, swap.slot] != swap.victim:
            raise ValueError(f"slot {swap.slot} of layer {layer} does not hold expert {swap.victim}")
        if self.slot_of[layer, swap.expert] != ABSENT or self._arriving[layer, swap.expert]:
            raise ValueError(f"expert {swap.expert} of layer {layer} is resident or on its way already")
        if swap.victim != ABSENT:
            self.slot_of[layer, swap.victim] = ABSENT
        self.expert_in[layer, swap.slot] = ABSENT
        self.version[layer, swap.slot] += 1
        self._writing[layer][swap.slot] = swap.expert
        self._arriving[layer, swap.expert] = True
        return SlotWrite(layer, swap.slot, swap.expert)

    def map_landed(self, write: SlotWrite) -> None:
        """Puts an expert whose bytes have arrived into the map."""
        if self._writing[write.layer].pop(write.slot, ABSENT) != write.expert:
            raise ValueError(f"{write} was not started")
        self._arriving[write.layer, write.expert] = False
        self.version[write.layer, write.slot] += 1
        self.expert_in[write.layer, write.slot] = write.expert
        self.slot_of[write.layer, write.expert] = write.slot

    def check(self) -> None:
        """Raises AssertionError unless map, slots and versions agree."""
        for layer, (experts, slots) in enumerate(zip(self.num_experts, self.num_slots, strict=True)):
            for expert, slot in enumerate(self.slot_of[layer]):
                assert slot == ABSENT or (expert < experts and slot < slots), f"layer {layer}: {expert} -> {slot}"
                assert slot == ABSENT or self.expert_in[layer, slot] == expert, f"layer {layer}: {expert} -> {slot}"
            for slot, expert in enumerate(self.expert_in[layer]):
                assert expert == ABSENT or self.slot_of[layer, expert] == slot, f"layer {layer}: slot {slot}"
                assert (self.version[layer, slot] % 2 == 1) == (slot in self._writing[layer]), f"slot {slot}"
                assert expert == ABSENT or self.version[layer, slot] % 2 == 0, f"layer {layer}: slot {slot}"
            arriving = list(self._writing[layer].values())
            assert sorted(arriving) == np.flatnonzero(self._arriving[layer]).tolist(), f"layer {layer}: {arriving}"
            for expert in arriving:
                assert self.slot_of[layer, expert] == ABSENT, f"layer {layer}: {expert} is mapped while being written"
