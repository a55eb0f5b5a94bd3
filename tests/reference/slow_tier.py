"""A host tier whose slot writes take as long as a test wants, with garbage in the slot meanwhile."""

import numpy as np

from greenroom.experts.cache import SlotWrite
from greenroom.experts.host_tier import HostTier

GARBAGE = 0xFF
"""Bytes of 0xFF are NaN in every floating format: a kernel that reads them cannot hide it."""


class SlowTier(HostTier):
    """Writes start at once, leave garbage, and land when ``finish`` says so."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.flying: list[SlotWrite] = []
        for slots in self._slots:
            slots.fill_(GARBAGE)

    def start_write(self, write: SlotWrite) -> None:
        self._slots[write.layer][write.slot].fill_(GARBAGE)
        self.flying.append(write)

    def finish(self, count: int) -> None:
        """Lets the ``count`` oldest writes land."""
        for write in self.flying[:count]:
            super().start_write(write)
        self.flying = self.flying[count:]

    def landed_writes(self, wait: bool = False) -> list[SlotWrite]:
        if wait:
            self.finish(len(self.flying))
        return super().landed_writes()

    def slot_bytes(self, layer: int, slot: int) -> np.ndarray:
        return self._slots[layer][slot].numpy()
