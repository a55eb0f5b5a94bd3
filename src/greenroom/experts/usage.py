"""How often and how recently each expert was chosen: all that a policy may look at."""

import numpy as np

DECAY = 0.98
"""Factor a step on an expert's frequency: half of it is forgotten in 34 steps."""


class ExpertUsage:
    """Statistics of routing, one row a layer. Written by ``record``, ``record_all`` and ``advance`` alone.

    Attributes:
        frequency: float64 [layers, experts], decayed count of steps.
        total: float64 [layers, experts], the same without decay.
        last_used: int64 [layers, experts], step in which an expert was last chosen; -1 for never.
        step: number of the step being recorded.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.frequency = np.zeros((layers, experts))
        self.total = np.zeros((layers, experts))
        self.last_used = np.full((layers, experts), -1, dtype=np.int64)
        self.step = 0

    @property
    def age(self) -> np.ndarray:
        """int64 [layers, experts]: steps since an expert was last chosen, counting from before the first."""
        return self.step - self.last_used

    def record(self, layer: int, share: np.ndarray) -> None:
        """Adds one step's routing of one layer.

        Args:
            share: [experts], the part of the step's tokens that chose each expert, at most 1. A
                prefill therefore weighs as much as one token of decode, and cannot drown the
                experts that decode has gathered.
        """
        count = len(share)
        self.frequency[layer, :count] += share
        self.total[layer, :count] += share
        self.last_used[layer, :count][share > 0] = self.step

    def record_all(self, share: np.ndarray) -> None:
        """Adds one step's routing of all layers: ``share`` as for ``record``, [layers, experts]."""
        self.frequency += share
        self.total += share
        self.last_used[share > 0] = self.step

    def if_all_were_used(self) -> "ExpertUsage":
        """What this would be had one token of the step chosen every expert, each as its only choice."""
        other = ExpertUsage(*self.frequency.shape)
        other.step = self.step
        other.frequency, other.total = self.frequency + 1, self.total + 1
        other.last_used[:] = self.step
        return other

    def advance(self) -> None:
        """Ends the step."""
        self.frequency *= DECAY
        self.step += 1
