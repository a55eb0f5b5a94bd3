"""Draft: the choices of one pass, as they come about while it runs."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from greenroom.errors import GreenroomError
from greenroom.serving.draw import to_device
from greenroom.serving.live import LiveRequest
from greenroom.serving.planned import Planned
from greenroom.serving.sampling import Choice, Choosing, Row, begin


class Draft:
    """``describe``, ``begin``, the end of the pass, ``result``: in this order.

    Attributes:
        failed: those whose constraint failed, and how.
    """

    def __init__(self, planned: Sequence[Planned]) -> None:
        self.failed: list[tuple[LiveRequest, GreenroomError]] = []
        self._planned = planned
        self._live: list[LiveRequest] = []
        self._rows: list[Row] = []
        self._places: list[int] = []
        self._choosing: Choosing | None = None

    def describe(self, live: Mapping[int, LiveRequest], vocabulary: int) -> None:
        """Says of those that sample how they do. Needs no logits."""
        for place, item in enumerate(self._planned):
            if not item.samples:
                continue
            request = live[item.sequence.order]
            try:
                self._rows.append(request.row(vocabulary))
            except GreenroomError as error:
                self.failed.append((request, error))
                continue
            self._places.append(place)
            self._live.append(request)

    def begin(self, logits: torch.Tensor) -> None:
        """Enqueues the choices behind the pass. ``logits``: [chunks, vocabulary]."""
        if not self._rows:
            return
        if len(self._rows) < len(self._planned):
            logits = logits.index_select(0, to_device(np.array(self._places), logits.device))
        self._choosing = begin(logits, self._rows)

    def result(self) -> list[tuple[LiveRequest, Choice]]:
        """Waits for them."""
        return [*zip(self._live, self._choosing.result(), strict=True)] if self._choosing is not None else []
