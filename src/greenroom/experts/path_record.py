"""PathRecord: what a device writes down of a step, and where the host reads it."""

from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

import numpy as np
import torch

from greenroom.experts.residency import ABSENT
from greenroom.kernels.gpu.word_copy import copy_words

COUNT_WORDS, SPAN_WORDS, LANDING_WORDS = 8, 4, 4
EXPERT, NUMBER = 0, 3
"""Words of a landing."""

_ROW_WORDS = 4
"""Of 4 bytes: each layer begins on a boundary of 16, or layers would need kernels compiled for other alignments."""

A = TypeVar("A", torch.Tensor, np.ndarray)


@dataclass(frozen=True)
class Notes(Generic[A]):
    """Of one step, by layer. Of layers that it has left out the notes are older.

    Attributes:
        ids: int32 [layers, most rows, K], every choice, -1 for rows of padding and ids that are no expert's.
        weights: float32 [layers, most rows, K].
        counts: int32 [layers, 8]: experts that were resident, streamed, on the CPU (a divided one counts there); the
            divided one, or -1, and how many rows of its inner width were streamed.
        spans: int64 [layers, 4]: nanoseconds of the device's clock at the end of dispatch, at the end of the last
            expert read over PCIe (older if there was none), and at the begin of combine; zeros on a CPU device. Then
            nanoseconds that the CPU engine took, from the request's turn.
        landings: int32 [layers, places, 4]: of each place the expert that has landed there, or -1; its slot; the expert
            that was in it, or -1; the step's number.
    """

    ids: A
    weights: A
    counts: A
    spans: A
    landings: A

    def landed(self, number: int) -> np.ndarray:
        """int [layers, places], the expert that has landed in each place in the step of that number, or ABSENT."""
        expert, of_step = self.landings[..., EXPERT], self.landings[..., NUMBER]
        return np.where(of_step == number, expert, ABSENT)


class PathRecord:
    """Kernels write into memory of the device; one copy brings it to the host, behind the step.

    Attributes:
        device: what the kernels write.
        host: two copies, for two steps under way at once.
    """

    def __init__(self, layers: int, max_tokens: int, top_k: int, places: int, device: torch.device) -> None:
        """``max_tokens`` rows of ``top_k`` choices a layer. All zeros at first, but nothing has landed."""
        choices = max_tokens * top_k
        # Spans come first: they need a boundary of 8 bytes.
        self._shapes = [
            (layers, 2 * SPAN_WORDS),
            (layers, COUNT_WORDS),
            (layers, places, LANDING_WORDS),
            (layers, -(-choices // _ROW_WORDS) * _ROW_WORDS),
            (layers, -(-choices // _ROW_WORDS) * _ROW_WORDS),
        ]
        self._choices = max_tokens, top_k
        words, on_gpu = sum(map(prod, self._shapes)), device.type == "cuda"
        self._memory = torch.zeros(words, dtype=torch.int32, device=device)
        self._copies = [torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self.device = self._split(self._memory)
        self.device.landings.fill_(ABSENT)
        self.host = [_as_arrays(self._split(copy)) for copy in self._copies]

    def keep(self, turn: int) -> None:
        """Enqueues the copy to ``host[turn]`` behind the step's work."""
        copy_words(self._copies[turn], self._memory)

    def _split(self, memory: torch.Tensor) -> Notes[torch.Tensor]:
        parts = memory.split([prod(shape) for shape in self._shapes])
        spans, counts, landings, ids, weights = (
            part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)
        )
        tokens, top_k = self._choices
        return Notes(
            ids=ids[:, : tokens * top_k].unflatten(1, (tokens, top_k)),
            weights=weights.view(torch.float32)[:, : tokens * top_k].unflatten(1, (tokens, top_k)),
            counts=counts,
            spans=spans.view(torch.int64),
            landings=landings,
        )


def _as_arrays(notes: Notes[torch.Tensor]) -> Notes[np.ndarray]:
    # Made once: a view costs more than the copy of what it shows.
    return Notes(*(tensor.numpy() for tensor in (notes.ids, notes.weights, notes.counts, notes.spans, notes.landings)))
