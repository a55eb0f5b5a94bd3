"""The tier of a CUDA device: slots and miss buffers in its memory, copies on streams of their own.

Who orders what:

- ``read_routing`` waits for this layer's ids, weights and hidden rows to reach page-locked memory. It is
  the only wait of the host for the device in a layer. Everything enqueued earlier on the compute
  stream has then ended, so staging memory of the layer before may be written again.
- A miss buffer is written on the copy stream after ``computed`` (the last kernel that read it), and
  read on the compute stream after ``landed`` (its last copy). Groups alternate between two buffers,
  so with one group a layer, neighbouring layers use different ones and their copies and computes
  overlap.
- A slot is written on the write stream after ``step_end``, which is recorded behind all work of the
  steps that could read it. It enters the map only once ``landed_writes`` has seen its event.
"""

import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from greenroom.experts.cache import SlotWrite
from greenroom.experts.cpu import CpuExperts, Ticket
from greenroom.experts.device_ffn import add_experts
from greenroom.experts.dispatch import CostModel, Dispatch, mask_ids
from greenroom.experts.probe import cpu_rates
from greenroom.experts.staging import Staging
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier, HostRouting, LayerBatch, allocate_blocks

_COPY_PROBES = 5


@dataclass(frozen=True)
class _MissBuffer:
    """uint8 device memory for a group of experts, and the events that order access to it."""

    memory: torch.Tensor
    landed: torch.cuda.Event
    computed: torch.cuda.Event


class CudaTier(DeviceTier):
    """Resident and streamed experts run on the GPU, the rest on the CPU at the same time."""

    def __init__(
        self,
        store: HostStore,
        num_slots: list[int],
        engine: CpuExperts,
        miss_expert_num: int,
        device: torch.device,
    ) -> None:
        self.device = device
        self._store = store
        self._engine = engine
        self._slots = allocate_blocks(store.formats, num_slots, device)
        largest = max(fmt.block_bytes for fmt in store.formats)
        self._miss_expert_num = miss_expert_num
        self._buffers = [
            _MissBuffer(
                torch.empty(miss_expert_num * largest, dtype=torch.uint8, device=device),
                torch.cuda.Event(),
                torch.cuda.Event(),
            )
            for _ in range(2)
        ]
        self._next_buffer = 0
        self._staging = Staging()
        self._copy_stream = torch.cuda.Stream(device)
        self._write_stream = torch.cuda.Stream(device)
        self._step_end = torch.cuda.Event()
        self._map_published = torch.cuda.Event()
        shape = (len(store), max(store.num_experts))
        self._map_twin = torch.full(shape, -1, dtype=torch.int32, pin_memory=True)
        self._map = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._writes: deque[tuple[SlotWrite, torch.cuda.Event]] = deque()

    @property
    def device_bytes(self) -> int:
        return sum(memory.numel() for memory in (*self._slots, *(buffer.memory for buffer in self._buffers)))

    @property
    def group_size(self) -> int:
        return self._miss_expert_num

    def measure_costs(self) -> CostModel:
        reading, computing = cpu_rates(self._engine, self._store)
        return CostModel(self._copy_rate(), reading, computing)

    def _copy_rate(self) -> float:
        """Bytes a second into a miss buffer; the median of a few groups."""
        group = np.arange(min(self._miss_expert_num, self._store.num_experts[0]))
        rates = []
        for _ in range(_COPY_PROBES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(self._copy_stream)
            blocks = self._fill(self._buffers[0], 0, group)
            end.record(self._copy_stream)
            end.synchronize()
            rates.append(blocks.numel() / (begin.elapsed_time(end) / 1e3))
        return statistics.median(rates)

    def begin_step(self, slot_of: np.ndarray) -> None:
        # The copy of the step before may still be reading the twin.
        self._map_published.synchronize()
        self._map_twin.numpy()[:] = slot_of
        self._map.copy_(self._map_twin, non_blocking=True)
        self._map_published.record(torch.cuda.current_stream(self.device))

    def read_routing(self, batch: LayerBatch) -> HostRouting:
        return self._staging.fetch(batch)

    def run(self, batch: LayerBatch, ids: np.ndarray, plan: Dispatch, slot_of: np.ndarray) -> torch.Tensor:
        ticket = self._submit_cpu(batch, ids, plan)
        try:
            out = torch.zeros(batch.hidden.shape, dtype=torch.float32, device=self.device)
            self._run_resident(out, batch, plan, slot_of)
            self._run_streamed(out, batch, plan)
        finally:
            # Also on an error: the job reads staging memory, which must not be reused under it.
            if ticket is not None:
                ticket.wait()
        if ticket is not None:
            out += self._staging.out.to(self.device, non_blocking=True)
        return out

    def _submit_cpu(self, batch: LayerBatch, ids: np.ndarray, plan: Dispatch) -> Ticket | None:
        if len(plan.cpu) == 0:
            return None
        chosen = torch.from_numpy(mask_ids(ids, plan.cpu, len(plan.counts)))
        staging = self._staging
        return self._engine.submit(
            self._store.formats[batch.layer],
            self._store.addresses(batch.layer),
            staging.hidden,
            chosen,
            staging.weights,
            staging.out,
        )

    def _run_resident(self, out: torch.Tensor, batch: LayerBatch, plan: Dispatch, slot_of: np.ndarray) -> None:
        if len(plan.resident) == 0:
            return
        fmt, slots = self._store.formats[batch.layer], self._slots[batch.layer]
        pairs_at = np.zeros(len(slots), dtype=np.int64)
        pairs_at[slot_of[plan.resident]] = plan.counts[plan.resident]
        position = self._map[batch.layer, : len(plan.counts)]
        add_experts(out, batch.hidden, batch.ids, batch.weights, position, pairs_at, fmt.views(slots), fmt)

    def _run_streamed(self, out: torch.Tensor, batch: LayerBatch, plan: Dispatch) -> None:
        if not plan.streamed:
            return
        fmt, size = self._store.formats[batch.layer], self._miss_expert_num
        places = np.full(len(plan.counts), -1, dtype=np.int32)
        order = np.concatenate(plan.streamed)
        places[order] = np.arange(len(order))
        on_device = self._staging.upload_positions(places, self.device)
        for number, group in enumerate(plan.streamed):
            buffer = self._buffers[self._next_buffer]
            self._next_buffer ^= 1
            views = fmt.views(self._fill(buffer, batch.layer, group))
            position = torch.where(on_device // size == number, on_device % size, -1)
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(buffer.landed)
            pairs_at = plan.counts[group]
            add_experts(out, batch.hidden, batch.ids, batch.weights, position, pairs_at, views, fmt)
            buffer.computed.record(compute)

    def _fill(self, buffer: _MissBuffer, layer: int, group: np.ndarray) -> torch.Tensor:
        """Starts the copies of ``group``; uint8 [group, block_bytes], complete behind ``landed``."""
        fmt, source = self._store.formats[layer], self._store.blocks(layer)
        blocks = buffer.memory[: len(group) * fmt.block_bytes].view(len(group), fmt.block_bytes)
        self._copy_stream.wait_event(buffer.computed)
        with torch.cuda.stream(self._copy_stream):
            for index, expert in enumerate(group):
                blocks[index].copy_(source[int(expert)], non_blocking=True)
            buffer.landed.record(self._copy_stream)
        return blocks

    def end_step(self) -> None:
        self._step_end.record(torch.cuda.current_stream(self.device))

    def start_write(self, write: SlotWrite) -> None:
        source = self._store.blocks(write.layer)[write.expert]
        self._write_stream.wait_event(self._step_end)
        with torch.cuda.stream(self._write_stream):
            self._slots[write.layer][write.slot].copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._write_stream)
        self._writes.append((write, event))

    def landed_writes(self, wait: bool = False) -> list[SlotWrite]:
        landed = []
        # One stream runs the writes in order: the first one under way ends the search.
        while self._writes and (wait or self._writes[0][1].query()):
            write, event = self._writes.popleft()
            event.synchronize()
            landed.append(write)
        return landed

    def close(self) -> None:
        if self._slots:
            torch.cuda.synchronize(self.device)
        self._slots, self._buffers = [], []
        self._writes.clear()
