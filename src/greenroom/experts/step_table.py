"""StepTable: what the host tells a device's kernels before a step."""

import numpy as np
import torch

from greenroom.experts.landing import Offers
from greenroom.experts.residency import ABSENT

PLACE_WORDS = 4
"""Of each place: three of ``Offers``, and one for nothing."""


class _Twin:
    """Host memory of the table's shape, and what was written into it last.

    Attributes:
        memory: int32 [words], page-locked beside a GPU.
    """

    def __init__(self, memory: torch.Tensor, views: "_Views") -> None:
        """Views say: no rows, no parts, no offers."""
        self.memory = memory
        # Made once: a view costs more than what is written through it.
        self._host_appeal, self._host_places, self._host_rows, self._host_parts = (view.numpy() for view in views)
        self._rows, self._parts = 0, self._host_parts
        self._offers: Offers | None = None

    def says(self, rows: int, parts: np.ndarray, offers: Offers | None) -> bool:
        """Arrays that nobody writes into any more: the same ones say the same."""
        return rows == self._rows and parts is self._parts and offers is self._offers

    def write(self, rows: int, parts: np.ndarray, offers: Offers | None) -> None:
        """As far as it does not say so already."""
        if rows != self._rows:
            self._host_rows[0] = self._rows = rows
        if parts is not self._parts:
            self._host_parts[: len(parts)] = self._parts = parts
        if offers is self._offers:
            return
        self._offers = offers
        if offers is None:
            self._host_places[:] = ABSENT
        else:
            self._host_appeal[:, : offers.appeal.shape[1]] = offers.appeal
            places = offers.places[:, : self._host_places.shape[1]]
            self._host_places[:, :, : places.shape[2]] = places


_Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Appeal, places, rows and parts."""


class StepTable:
    """Written by the host through page-locked twins, by one copy, before a step's work is enqueued.

    There are two twins, by turns: the copy for the step that runs may still be made from one of them while the host
    writes the other one for the next step.

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
        ranks = np.array(num_experts)[:, None] - 1 - np.arange(self._columns)[None, :]
        twins = []
        for _ in range(2):
            memory = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
            views = self._split(memory)
            views[0].numpy()[:], views[1].numpy()[:] = np.maximum(ranks, ABSENT), ABSENT
            twins.append(_Twin(memory, views))
        self._published, self._idle = twins
        self._device = self._published.memory.to(device, copy=True)
        self.appeal, self.places, self.rows, self.stream_parts = self._split(self._device)

    def prepare(self, rows: int, stream_parts: np.ndarray, offers: Offers | None) -> None:
        """While a step runs: writes down what ``publish`` will most likely be called with, so that it only copies.

        Args: those of ``publish``.
        """
        if not self._published.says(rows, stream_parts, offers):
            self._idle.write(rows, stream_parts, offers)

    def publish(self, rows: int, stream_parts: np.ndarray, offers: Offers | None) -> None:
        """Enqueues what the coming step needs to know. The step before must have ended.

        Args:
            rows: of the batch that are no padding.
            stream_parts: int32 [experts + 1]. Nobody writes into it any more: the same array says the same.
            offers: None for nothing. Nor into these.
        """
        if self._published.says(rows, stream_parts, offers):
            return
        self._idle.write(rows, stream_parts, offers)
        self._published, self._idle = self._idle, self._published
        self._device.copy_(self._published.memory, non_blocking=True)

    def _split(self, table: torch.Tensor) -> _Views:
        ranks, end = self._layers * self._columns, self._offer_words
        places = table[ranks:end].view(self._layers, self._num_places, PLACE_WORDS)
        return table[:ranks].view(self._layers, -1), places, table[end : end + 1], table[end + 1 :]
