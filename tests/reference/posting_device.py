"""What a GPU does with mailboxes, done by Python: payload, then request; wait for done, read, clear it."""

import math
import time

import torch

from greenroom.experts.mailbox import Mailboxes

_LIMIT = 20.0
"""Seconds. Far beyond any job of the tests, so that a lost request fails instead of hanging."""


class PostingDevice:
    """Posts to ``boxes``. Stores of one x86 thread become visible in their order, as release stores do."""

    def __init__(self, boxes: Mailboxes) -> None:
        self._boxes = boxes
        self._requests = [memoryview(row.numpy()) for row in boxes.request]
        self._done = [memoryview(row.numpy()) for row in boxes.done]

    def write(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """The payload of the next request, and NaN where its result will be."""
        rows = len(hidden)
        self._boxes.hidden[layer][:rows] = hidden
        self._boxes.cpu_ids[layer, :rows] = ids
        self._boxes.weights[layer, :rows] = weights
        self._boxes.out[layer].fill_(math.nan)

    def divide(self, layer: int, expert: int, first_row: int) -> None:
        """The next requests leave the rows of ``expert`` before ``first_row`` to the device; -1 divides nothing."""
        self._requests[layer][1] = expert
        self._requests[layer][2] = first_row

    def request(self, layer: int, rows: int) -> None:
        assert not self.requested(layer)
        assert not self.answered(layer), "done was raised before there was a request"
        self._requests[layer][0] = rows

    def requested(self, layer: int) -> bool:
        """Whether the engine has not cleared the request yet."""
        return bool(self._requests[layer][0])

    def answered(self, layer: int) -> bool:
        return bool(self._done[layer][0])

    def wait_until_begun(self, layer: int) -> None:
        end = time.monotonic() + _LIMIT
        while self.requested(layer):
            assert time.monotonic() < end, f"nobody saw the request of layer {layer}"

    def wait(self, layer: int) -> None:
        """Until the answer is there; clears done."""
        done = self._done[layer]
        end = time.monotonic() + _LIMIT
        while not done[0]:
            assert time.monotonic() < end, f"the request of layer {layer} was lost"
        assert not self.requested(layer), "the request outlives its answer"
        assert done[0] == 1
        done[0] = 0

    def result(self, layer: int) -> torch.Tensor:
        """``wait``, then float32 [max_tokens, H]: NaN in rows that were not posted."""
        self.wait(layer)
        return self._boxes.out[layer].clone()
