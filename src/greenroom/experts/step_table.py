"""StepTable: what the host tells a device's kernels before a step."""

from dataclasses import dataclass

import numpy as np
import torch

from greenroom.experts.landing import Offers
from greenroom.experts.residency import ABSENT
from greenroom.kernels.gpu.word_copy import copy_words

PLACE_WORDS = 4
"""Of each place: three of ``Offers``, and one for nothing."""

_ROWS, _NUMBER, _UNSETTLED, _STEP_WORDS = 0, 1, 2, 4


@dataclass(frozen=True)
class StepOrder:
    """What a step's kernels have to know. Nobody writes into the arrays any more: the same ones say the same.

    Attributes:
        rows: of the batch that are no padding; they come first.
        stream_parts: int32 [experts + 1], how many sixteenths of so many absent experts go over PCIe.
        slot_of: int32 [layers, experts], the slot of each expert or ABSENT.
        offers: cache slots for experts to land in; None for nothing.
        number: of the step, where slots may be offered; no step of the same path had it before. At least 1.
        unsettled: of the step before, if ``slot_of`` lacks what has landed in it; 0 if not.
    """

    rows: int
    stream_parts: np.ndarray
    slot_of: np.ndarray
    offers: Offers | None = None
    number: int = 0
    unsettled: int = 0


@dataclass(frozen=True)
class _Views:
    """Parts of the table, see ``StepTable``."""

    slot_of: torch.Tensor
    appeal: torch.Tensor
    places: torch.Tensor
    step: torch.Tensor
    stream_parts: torch.Tensor


class _Twin:
    """Host memory of the table's shape, and what was written into it last.

    Attributes:
        memory: int32 [words], page-locked beside a GPU.
    """

    def __init__(self, memory: torch.Tensor, views: _Views) -> None:
        """Views say: no step, no parts, no slots, no offers."""
        self.memory = memory
        # Made once: a view costs more than what is written through it.
        self._host_slot_of, self._host_appeal = views.slot_of.numpy(), views.appeal.numpy()
        self._host_places, self._host_parts = views.places.numpy(), views.stream_parts.numpy()
        self._host_step = views.step.numpy()
        self._step = (0, 0, 0)
        self._parts, self._slot_of = self._host_parts, self._host_slot_of
        self._offers: Offers | None = None

    def says(self, order: StepOrder) -> bool:
        return (
            self._step == (order.rows, order.number, order.unsettled)
            and order.stream_parts is self._parts
            and order.slot_of is self._slot_of
            and order.offers is self._offers
        )

    def write(self, order: StepOrder) -> None:
        """As far as it does not say so already."""
        self.write_lists(order.stream_parts, order.offers)
        self._step = order.rows, order.number, order.unsettled
        self._host_step[:3] = self._step
        if order.slot_of is not self._slot_of:
            self._slot_of = order.slot_of
            self._host_slot_of[:, : order.slot_of.shape[1]] = order.slot_of

    def write_lists(self, parts: np.ndarray, offers: Offers | None) -> None:
        """Of an order only this."""
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


class StepTable:
    """Written by the host through page-locked twins, by one copy, before a step's work is enqueued.

    There are two twins, by turns: the copy for the step before may still have to be made from one of them while the
    host writes the other one. The step before that has ended.

    Attributes:
        slot_of: int32 [layers, at least experts] on the device.
        appeal: int32 [layers, at least experts] on the device.
        places: int32 [layers, places, 4] on the device. In all three each layer begins on a boundary of 16 bytes:
            otherwise layers would need kernels compiled for other alignments, maybe first of all within a capture.
        step: int32 [4] on the device: rows of the batch that are no padding, the step's number, and that of the step
            before if ``slot_of`` lacks what has landed in it, or 0.
        stream_parts: int32 [experts + 1] on the device.
    """

    def __init__(self, num_experts: list[int], places: int, device: torch.device) -> None:
        """No step, no parts, no slots, nothing is offered at first, and the lower id has more appeal."""
        self._layers, self._num_places = len(num_experts), places
        self._columns = -(-max(num_experts) // 4) * 4
        words = self._layers * (2 * self._columns + PLACE_WORDS * places) + _STEP_WORDS + max(num_experts) + 1
        ranks = np.array(num_experts)[:, None] - 1 - np.arange(self._columns)[None, :]
        twins = []
        for _ in range(2):
            memory = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
            views = self._split(memory)
            views.slot_of.numpy()[:] = views.places.numpy()[:] = ABSENT
            views.appeal.numpy()[:] = np.maximum(ranks, ABSENT)
            twins.append(_Twin(memory, views))
        self._published, self._idle = twins
        self._device = self._published.memory.to(device, copy=True)
        views = self._split(self._device)
        self.slot_of, self.appeal, self.places = views.slot_of, views.appeal, views.places
        self.step, self.stream_parts = views.step, views.stream_parts

    def prepare(self, stream_parts: np.ndarray, offers: Offers | None) -> None:
        """While a step runs: writes down what the next order will most likely say, so that ``publish`` has less to do.

        Args: see ``StepOrder``.
        """
        self._idle.write_lists(stream_parts, offers)

    def publish(self, order: StepOrder) -> None:
        """Enqueues what the coming step needs to know. At most one step before it has not ended."""
        if self._published.says(order):
            return
        self._idle.write(order)
        self._published, self._idle = self._idle, self._published
        copy_words(self._device, self._published.memory)

    def _split(self, table: torch.Tensor) -> _Views:
        ranks = self._layers * self._columns
        sizes = [ranks, ranks, self._layers * self._num_places * PLACE_WORDS, _STEP_WORDS]
        slot_of, appeal, places, step, parts = table.split([*sizes, len(table) - sum(sizes)])
        shape = self._layers, self._num_places, PLACE_WORDS
        return _Views(slot_of.view(self._layers, -1), appeal.view(self._layers, -1), places.view(shape), step, parts)
