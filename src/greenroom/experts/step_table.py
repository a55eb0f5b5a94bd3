"""StepTable: what the host tells a device's kernels before a step."""

import numpy as np
import torch

from greenroom.experts.landing import Offers
from greenroom.experts.residency import ABSENT

PLACE_WORDS = 4
"""Of each place: three of ``Offers``, and one for nothing."""


class StepTable:
    """Written by the host through a page-locked twin, by one copy, before a step's work is enqueued.

    Attributes:
        appeal: int32 [layers, at least experts] on the device.
        places: int32 [layers, places, 4] on the device. In both each layer begins on a boundary of 16 bytes: otherwise
            layers would need kernels compiled for other alignments, maybe first of all within a capture.
        rows: int32 [1] on the device: of the batch that are no padding.
        stream_parts: int32 [experts + 1] on the device.
    """

    def __init__(self, num_experts: list[int], places: int, device: torch.device) -> None:
        """No rows, no parts, nothing is offered at first, and the lower id has more appeal."""
        self._layers, self._num_places = len(num_experts), places
        self._columns = -(-max(num_experts) // 4) * 4
        self._offer_words = self._layers * (self._columns + PLACE_WORDS * places)
        words = self._offer_words + 1 + max(num_experts) + 1
        self._twin = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        # Made once: a view costs more than what is written through it.
        appeal, offered, rows, parts = (view.numpy() for view in self._split(self._twin))
        self._host_appeal, self._host_places, self._host_rows, self._host_parts = appeal, offered, rows, parts
        ranks = np.array(num_experts)[:, None] - 1 - np.arange(self._columns)[None, :]
        appeal[:], offered[:] = np.maximum(ranks, ABSENT), ABSENT
        self._device = self._twin.to(device, copy=True)
        self.appeal, self.places, self.rows, self.stream_parts = self._split(self._device)
        self._rows, self._parts = 0, parts
        self._offering = False

    def publish(self, rows: int, stream_parts: np.ndarray, offers: Offers | None) -> None:
        """Enqueues what the coming step needs to know. The copy for the step before must have been made.

        Args:
            rows: of the batch that are no padding.
            stream_parts: int32 [experts + 1]. Nobody writes into it any more: the same array says the same.
            offers: None for nothing.
        """
        same_split = rows == self._rows and stream_parts is self._parts
        if same_split and offers is None and not self._offering:
            return
        if not same_split:
            self._rows, self._parts = rows, stream_parts
            self._host_rows[0] = rows
            self._host_parts[: len(stream_parts)] = stream_parts
        if offers is not None:
            self._host_appeal[:, : offers.appeal.shape[1]] = offers.appeal
            self._host_places[:, :, : offers.places.shape[2]] = offers.places[:, : self._num_places]
        elif self._offering:
            self._host_places[:] = ABSENT
        self._offering = offers is not None
        self._device.copy_(self._twin, non_blocking=True)

    def _split(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        ranks, end = self._layers * self._columns, self._offer_words
        places = table[ranks:end].view(self._layers, self._num_places, PLACE_WORDS)
        return table[:ranks].view(self._layers, -1), places, table[end : end + 1], table[end + 1 :]
