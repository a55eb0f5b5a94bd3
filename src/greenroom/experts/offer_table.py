"""OfferTable: a step's offers as a device's kernels read them."""

import numpy as np
import torch

from greenroom.experts.landing import Offers
from greenroom.experts.residency import ABSENT

PLACE_WORDS = 4
"""Of each place: three of ``Offers``, and one for nothing."""


class OfferTable:
    """Written by the host through a page-locked twin, by one copy, before a step's work is enqueued.

    Attributes:
        appeal: int32 [layers, at least experts] on the device.
        places: int32 [layers, places, 4] on the device. In both each layer begins on a boundary of 16 bytes: otherwise
            layers would need kernels compiled for other alignments, maybe first of all within a capture.
    """

    def __init__(self, num_experts: list[int], places: int, device: torch.device) -> None:
        """Nothing is offered at first, and the lower id has more appeal."""
        self._columns = -(-max(num_experts) // 4) * 4
        self._num_places = places
        words = len(num_experts) * (self._columns + PLACE_WORDS * places)
        self._twin = torch.full((words,), ABSENT, dtype=torch.int32, pin_memory=device.type == "cuda")
        appeal, offered = self._split(self._twin)
        # Made once: a view costs more than what is written through it.
        self._host_appeal, self._host_places = appeal.numpy(), offered.numpy()
        ranks = np.array(num_experts)[:, None] - 1 - np.arange(self._columns)[None, :]
        self._host_appeal[:] = np.maximum(ranks, ABSENT)
        self._device = self._twin.to(device, copy=True)
        self.appeal, self.places = self._split(self._device)
        self._offering = False

    def publish(self, offers: Offers | None) -> None:
        """Enqueues what the coming step is offered; None for nothing. The copy for the step before must be done."""
        if offers is None and not self._offering:
            return
        self._offering = offers is not None
        if offers is None:
            self._host_places[:] = ABSENT
        else:
            self._host_appeal[:, : offers.appeal.shape[1]] = offers.appeal
            self._host_places[:, :, : offers.places.shape[2]] = offers.places[:, : self._num_places]
        self._device.copy_(self._twin, non_blocking=True)

    def _split(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layers = len(table) // (self._columns + PLACE_WORDS * self._num_places)
        ranks = layers * self._columns
        return table[:ranks].view(layers, -1), table[ranks:].view(layers, self._num_places, PLACE_WORDS)
