"""ExpertCache: which expert is in which slot, and when that may change.

A slot is free, being written by a copy, or mapped. The map changes between steps only:

- ``unmap_and_write`` at the end of a step takes the victim out of the map and starts the write; the
  step's own work was enqueued before, so the write only has to wait for it on the device;
- ``map_landed`` before a later step puts the newcomer into the map, once its bytes have arrived.

So a step never sees a slot that is being written by a copy.

A step may also write slots itself: those that are offered to it. ``offer`` at its begin names them, ``settle`` behind
its end says which experts have landed in them. An offered slot may be mapped: the step then either reads it or writes
it, as its routing has it.

The next step may begin before ``settle``, with other slots on offer: the device then completes the map that it is told
by what has landed. It may know more than ``settle`` then enters, which leaves a place empty if a copy brings the same
expert; but the place keeps what has landed there until that step ends, too.

Each slot counts its changes in ``version``: odd while it is or may be written, even while its contents stand still.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from greenroom.experts.landing import OfferedSlots
from greenroom.experts.residency import ABSENT, Swap


@dataclass(frozen=True)
class SlotWrite:
    """A write of ``expert`` into ``slot`` of ``layer`` that has been started."""

    layer: int
    slot: int
    expert: int


@dataclass(frozen=True)
class _Offer:
    """Slots that may be offered, in the shapes that ``offer`` and ``settle`` want them in.

    mask: int64 [layers, slots], 1 for them. slot_at: by layer and place.
    """

    slots: OfferedSlots
    mask: np.ndarray
    slot_at: dict[tuple[int, int], int]


class ExpertCache:
    """Host-side state of all layers' slots. One thread, the one that runs steps, uses it.

    Attributes:
        slot_of: int32 [layers, experts], the map; ABSENT where an expert has no slot.
        expert_in: int32 [layers, slots], its inverse; ABSENT where a slot is free or being written by a copy.
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
        self._partial = np.array([0 < slots < experts for slots, experts in zip(num_slots, num_experts, strict=True)])
        self._prepared: _Offer | None = None
        self._offered: deque[_Offer] = deque()  # the oldest first
        self._told: np.ndarray | None = None  # what ``told_map`` returned, while it holds

    def layer_map(self, layer: int) -> np.ndarray:
        """int32 [experts]: a view of the layer's row of the map."""
        return self.slot_of[layer, : self.num_experts[layer]]

    def told_map(self) -> np.ndarray:
        """A copy of ``slot_of`` that is never written into: the same array as long as it holds."""
        if self._told is None:
            self._told = self.slot_of.copy()
        return self._told

    def free_slots(self) -> np.ndarray:
        """bool [layers, slots]: slots that hold nothing and are neither being written nor offered."""
        free: np.ndarray = self._is_slot & (self.expert_in == ABSENT) & (self.version % 2 == 0)
        return free

    def being_written(self) -> np.ndarray:
        """bool [layers, experts]: experts on their way into a slot."""
        return self._arriving

    def may_be_offered(self) -> np.ndarray:
        """bool [layers, slots]: slots of layers that hold some of their experts, neither being written nor offered.

        Whatever the running step does, they stay as they are until a copy is started into one.
        """
        still: np.ndarray = self._is_slot & self._partial[:, None] & (self.version % 2 == 0)
        return still

    def at_stake(self) -> np.ndarray:
        """bool [layers, experts]: residents of slots that are offered."""
        mask = np.zeros(self.slot_of.shape, dtype=bool)
        for offer in self._offered:
            layer, slot = offer.slots.layer, offer.slots.slot
            resident = self.expert_in[layer, slot]
            mask[layer[resident != ABSENT], resident[resident != ABSENT]] = True
        return mask

    def prepare_offer(self, slots: OfferedSlots) -> None:
        """What ``offer`` does of its work while the step before runs: the slots may be offered now, and will be unless
        a copy is started. What that step writes was offered to it, so none of it is among them.

        Raises:
            ValueError: one is being written or offered, or it does not hold its ``resident``.
        """
        self._prepared = self._checked(slots)

    def offer(self, slots: OfferedSlots) -> None:
        """Lets the step that begins write slots, different ones.

        Raises:
            ValueError: one is being written or offered, or it does not hold its ``resident``.
        """
        prepared, self._prepared = self._prepared, None
        offer = prepared if prepared is not None and prepared.slots is slots else self._checked(slots)
        # One operation: the device may idle, and with other threads' weights in the caches each takes microseconds.
        self.version += offer.mask
        self._offered.append(offer)

    def settle(self, landed: np.ndarray | None) -> tuple[list[int], list[int]]:
        """Ends the oldest offer, once its step has ended: what has landed enters the map, what it displaced leaves.

        An expert for which a copy was started meanwhile waits for that one; its place stays empty.

        Args:
            landed: int [layers, places], the expert in each place, ABSENT where none has landed. None: nobody knows
                what the places hold.

        Returns:
            The layer of each expert that entered the map, and of each that left it.
        """
        offered = self._offered.popleft()
        self.version += offered.mask
        # One by one: of all that was offered, little is written.
        if landed is None:
            writes = [(layer, slot, ABSENT) for (layer, _), slot in offered.slot_at.items()]
        else:
            told = ((layer, row) for layer, row in enumerate(landed.tolist()))
            writes = [
                (layer, offered.slot_at[layer, place], expert)
                for layer, row in told
                for place, expert in enumerate(row)
                if expert != ABSENT and (layer, place) in offered.slot_at
            ]
        if writes:
            self._told = None
        left = [layer for layer, slot, _ in writes if self._empty(layer, slot)]
        entered = [layer for layer, slot, expert in writes if self._enter(layer, slot, expert)]
        return entered, left

    def withdraw(self) -> None:
        """Ends the last offer; nothing was written."""
        self.version += self._offered.pop().mask

    def forfeit(self) -> list[int]:
        """Ends all offers; nobody knows what their places hold.

        Returns:
            The layer of each expert that left the map.
        """
        return [layer for _ in range(len(self._offered)) for layer in self.settle(None)[1]]

    def _checked(self, slots: OfferedSlots) -> _Offer:
        at = slots.layer, slots.slot
        if ((self.version[at] & 1) | (self.expert_in[at] != slots.resident)).any():
            raise ValueError("a slot was offered that is being written, or that does not hold what it is said to")
        return self._shape(slots)

    def _shape(self, slots: OfferedSlots) -> _Offer:
        mask = np.zeros(self.version.shape, dtype=np.int64)
        mask[slots.layer, slots.slot] = 1
        places = zip(slots.layer.tolist(), slots.place.tolist(), strict=True)
        return _Offer(slots, mask, dict(zip(places, slots.slot.tolist(), strict=True)))

    def _empty(self, layer: int, slot: int) -> bool:
        """Takes what the slot holds out of the map, if it holds anything."""
        resident = self.expert_in[layer, slot]
        if resident == ABSENT:
            return False
        self.slot_of[layer, resident] = ABSENT
        self.expert_in[layer, slot] = ABSENT
        return True

    def _enter(self, layer: int, slot: int, expert: int) -> bool:
        """Puts what was written into the slot into the map, unless it is there or a copy will bring it."""
        if expert == ABSENT or self._arriving[layer, expert] or self.slot_of[layer, expert] != ABSENT:
            return False
        self.expert_in[layer, slot] = expert
        self.slot_of[layer, expert] = slot
        return True

    def unmap_and_write(self, layer: int, swap: Swap) -> SlotWrite:
        """Takes the victim out of the map and marks the slot as being written."""
        if self.version[layer, swap.slot] % 2 or self.expert_in[layer, swap.slot] != swap.victim:
            raise ValueError(f"slot {swap.slot} of layer {layer} does not hold expert {swap.victim}")
        if self.slot_of[layer, swap.expert] != ABSENT or self._arriving[layer, swap.expert]:
            raise ValueError(f"expert {swap.expert} of layer {layer} is resident or on its way already")
        self._prepared = self._told = None  # it may be one of those
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
        self._told = None
        self._arriving[write.layer, write.expert] = False
        self.version[write.layer, write.slot] += 1
        self.expert_in[write.layer, write.slot] = write.expert
        self.slot_of[write.layer, write.expert] = write.slot

    def check(self) -> None:
        """Raises AssertionError unless map, slots and versions agree."""
        places = [(layer, slot) for offer in self._offered for (layer, _), slot in offer.slot_at.items()]
        offered = set(places)
        assert len(offered) == len(places), "a slot is offered twice"
        for layer, (experts, slots) in enumerate(zip(self.num_experts, self.num_slots, strict=True)):
            for expert, slot in enumerate(self.slot_of[layer]):
                assert slot == ABSENT or (expert < experts and slot < slots), f"layer {layer}: {expert} -> {slot}"
                assert slot == ABSENT or self.expert_in[layer, slot] == expert, f"layer {layer}: {expert} -> {slot}"
            for slot, expert in enumerate(self.expert_in[layer]):
                assert expert == ABSENT or self.slot_of[layer, expert] == slot, f"layer {layer}: slot {slot}"
                copied, landing = slot in self._writing[layer], (layer, slot) in offered
                assert not (copied and landing), f"layer {layer}: slot {slot} is offered while being written"
                assert (self.version[layer, slot] % 2 == 1) == (copied or landing), f"slot {slot}"
                assert expert == ABSENT or not copied, f"layer {layer}: slot {slot}"
            arriving = list(self._writing[layer].values())
            assert sorted(arriving) == np.flatnonzero(self._arriving[layer]).tolist(), f"layer {layer}: {arriving}"
            for expert in arriving:
                assert self.slot_of[layer, expert] == ABSENT, f"layer {layer}: {expert} is mapped while being written"
