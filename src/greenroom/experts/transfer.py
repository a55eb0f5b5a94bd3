"""Miss buffers: where experts that have no slot land on the device, group by group.

Groups use the buffers in turn. A buffer is written on the copy stream after ``computed`` (the
last work that read it) and read on the compute stream after ``landed`` (its last copy), so that one is filled
while another is computed on. Groups copied ahead of their layer's routing lie in them until that layer takes
them; if it never does, the next groups write over them.
"""

from dataclasses import dataclass

import numpy as np
import torch

from greenroom.experts.formats import ExpertViews
from greenroom.experts.store import HostStore

NUM_BUFFERS = 3
"""One is computed on and one filled. The third is free when a layer begins while the others hold copies made ahead,
so that PCIe need not wait until work that reads those has been enqueued."""


@dataclass
class _Buffer:
    """uint8 device memory for a group, the events that order access to it, and the bytes that it was last given."""

    memory: torch.Tensor
    started: torch.cuda.Event
    landed: torch.cuda.Event
    computed: torch.cuda.Event
    nbytes: int = 0


@dataclass(frozen=True)
class Landing:
    """A group on its way into a buffer. experts: int [N], ids in the order in which they lie there."""

    layer: int
    experts: np.ndarray
    buffer: _Buffer


class MissBuffers:
    """All buffers and the stream that fills them. One thread uses it, the one that runs steps."""

    def __init__(self, store: HostStore, group_size: int, device: torch.device) -> None:
        self.group_size = group_size
        self.stream = torch.cuda.Stream(device)
        self._store = store
        self._device = device
        largest = max(fmt.block_bytes for fmt in store.formats)
        self._buffers = [
            _Buffer(
                torch.empty(group_size * largest, dtype=torch.uint8, device=device),
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(),
            )
            for _ in range(NUM_BUFFERS)
        ]
        self._next = 0
        self._ahead: tuple[Landing, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    @property
    def ahead_capacity(self) -> int:
        """Experts that may be copied ahead."""
        return (NUM_BUFFERS - 1) * self.group_size

    def fill(self, layer: int, experts: np.ndarray) -> Landing:
        """Starts the copies of at most ``group_size`` experts into the next buffer, behind all earlier ones."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        landing = Landing(layer, experts, buffer)
        blocks, source = self._blocks(landing), self._store.blocks(layer)
        self.stream.wait_event(buffer.computed)
        with torch.cuda.stream(self.stream):
            buffer.started.record(self.stream)
            for index, expert in enumerate(experts.tolist()):
                blocks[index].copy_(source[expert], non_blocking=True)
            buffer.landed.record(self.stream)
        buffer.nbytes = blocks.numel()
        return landing

    def read(self, landing: Landing) -> ExpertViews:
        """The group's weights; the current stream waits for their copies."""
        torch.cuda.current_stream(self._device).wait_event(landing.buffer.landed)
        return self._store.formats[landing.layer].views(self._blocks(landing))

    def release(self, landing: Landing) -> None:
        """What the current stream was given before may be the last to read the group."""
        landing.buffer.computed.record(torch.cuda.current_stream(self._device))

    def start_ahead(self, layer: int, experts: np.ndarray) -> None:
        """Copies at most ``ahead_capacity`` experts for a layer whose routing is not known, behind released groups."""
        starts = range(0, len(experts), self.group_size)
        self._ahead = tuple(self.fill(layer, experts[start : start + self.group_size]) for start in starts)

    def ahead(self, layer: int) -> tuple[Landing, ...]:
        """Groups that were copied ahead for this layer."""
        return tuple(landing for landing in self._ahead if landing.layer == layer)

    def take_ahead(self, layer: int) -> tuple[Landing, ...]:
        """The same; from here on the caller reads and releases them. Those for other layers are dropped."""
        taken, self._ahead = self.ahead(layer), ()
        return taken

    def busy_bytes(self) -> int:
        """Of copies under way; a group counts in full until its last byte has landed."""
        return sum(landing.buffer.nbytes for landing in self._ahead if not landing.buffer.landed.query())

    def measured_rates(self) -> list[float]:
        """Bytes a second of each group that has landed since the last call."""
        rates = []
        for buffer in self._buffers:
            if buffer.nbytes and buffer.landed.query():
                seconds = buffer.started.elapsed_time(buffer.landed) / 1e3
                rates.append(buffer.nbytes / seconds)
                buffer.nbytes = 0
        return rates

    def close(self) -> None:
        """Frees the memory. All work must have ended."""
        self._buffers, self._ahead = [], ()

    def _blocks(self, landing: Landing) -> torch.Tensor:
        """uint8 [N, block_bytes]."""
        count, size = len(landing.experts), self._store.formats[landing.layer].block_bytes
        return landing.buffer.memory[: count * size].view(count, size)
