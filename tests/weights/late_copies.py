"""Copies at their worst: a slot is garbage from the moment its copy may begin, and right only once it is waited for."""

import torch

from greenroom.weights.copies import Copies


class LateCopies(Copies):
    """A pass that reads a slot too early, or starts a copy before the slot's last reader, computes with NaN.

    log: what happened, ("start" or "wait", slot). started: bytes of all copies.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.started = 0
        self.capturing = False
        self._under_way: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def start(self, slot, target, source):
        self.log.append(("start", slot))
        self.started += len(source)
        target.fill_(0xFF)  # NaN in every floating-point format
        self._under_way.setdefault(slot, []).append((target, source))

    def wait(self, slot):
        self.log.append(("wait", slot))
        for target, source in self._under_way.pop(slot):
            target.copy_(source)

    def recording(self):
        return self.capturing

    @property
    def idle(self) -> bool:
        return not self._under_way
