"""The tier of a machine without a GPU: slots are ordinary memory, the CPU engine runs every lane."""

import numpy as np
import torch

from greenroom.errors import EngineError
from greenroom.experts.cache import SlotWrite
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.dispatch import CostModel, Dispatch, mask_ids
from greenroom.experts.formats import ALIGNMENT, ExpertFormat
from greenroom.experts.store import HostStore
from greenroom.experts.ticket import LateJobError
from greenroom.experts.tier import DeviceTier, HostRouting, LayerBatch


class HostTier(DeviceTier):
    """Runs an expert from wherever its block lies: a slot, a miss buffer or the store.

    The engine adds experts in the order of their ids, so the lane of an expert does not change the
    result by a bit, unless the streamed experts need more than one group.
    """

    device = torch.device("cpu")

    def __init__(self, store: HostStore, num_slots: list[int], engine: CpuExperts, miss_expert_num: int) -> None:
        self._store = store
        self._engine = engine
        self._slots = [_aligned_blocks(n, fmt) for n, fmt in zip(num_slots, store.formats, strict=True)]
        largest = max(store.formats, key=lambda fmt: fmt.block_bytes)
        self._miss_buffers = [_aligned_blocks(miss_expert_num, largest) for _ in range(2)]
        self._next_buffer = 0
        self._landed: list[SlotWrite] = []

    @property
    def device_bytes(self) -> int:
        return sum(memory.numel() for memory in (*self._slots, *self._miss_buffers))

    @property
    def slots(self) -> list[torch.Tensor]:
        return self._slots

    @property
    def group_size(self) -> int:
        return len(self._miss_buffers[0])

    def measure_costs(self) -> CostModel:
        """Copying from memory to memory first never pays: that lane is closed."""
        return CostModel(copy_bytes_per_s=0, cpu_bytes_per_s=1, cpu_flops_per_s=1)

    def read_routing(self, batch: LayerBatch) -> HostRouting:
        return HostRouting(batch.ids.numpy(), batch.weights.numpy())

    def run(self, batch: LayerBatch, ids: np.ndarray, plan: Dispatch, slot_of: np.ndarray) -> torch.Tensor:
        fmt = self._store.formats[batch.layer]
        addresses = self._store.addresses(batch.layer)
        slots = self._slots[batch.layer]
        addresses[plan.resident] = slots.data_ptr() + slot_of[plan.resident].astype(np.uint64) * fmt.block_bytes
        first = np.concatenate([plan.resident, plan.cpu, *plan.streamed[:1]])
        out = self._run_group(batch, ids, first, addresses, plan.streamed[0] if plan.streamed else None)
        for group in plan.streamed[1:]:
            out += self._run_group(batch, ids, group, addresses, group)
        return out

    def _run_group(
        self,
        batch: LayerBatch,
        ids: np.ndarray,
        experts: np.ndarray,
        addresses: np.ndarray,
        streamed: np.ndarray | None,
    ) -> torch.Tensor:
        """Runs ``experts``, of which ``streamed`` go through a miss buffer first. float32 [T, H]."""
        fmt = self._store.formats[batch.layer]
        if streamed is not None:
            buffer = self._miss_buffers[self._next_buffer].view(-1)[: self.group_size * fmt.block_bytes]
            self._next_buffer ^= 1
            blocks = buffer.view(self.group_size, fmt.block_bytes)
            for position, expert in enumerate(streamed):
                blocks[position].copy_(self._store.blocks(batch.layer)[expert])
                addresses[expert] = blocks[position].data_ptr()
        out = torch.empty(batch.hidden.shape, dtype=torch.float32)
        chosen = mask_ids(ids, experts, len(addresses))
        memory = (self._store.blocks(batch.layer), self._slots[batch.layer], self._miss_buffers)
        try:
            self._engine.run(fmt, addresses, batch.hidden, torch.from_numpy(chosen), batch.weights, out, memory=memory)
        except LateJobError as error:
            raise EngineError(f"layer {batch.layer}: {error}") from error
        return out

    def end_step(self) -> None:
        """Steps run to their end before they return; a write may start at once."""

    def start_write(self, write: SlotWrite) -> None:
        self._slots[write.layer][write.slot].copy_(self._store.blocks(write.layer)[write.expert])
        self._landed.append(write)

    def landed_writes(self, wait: bool = False) -> list[SlotWrite]:
        landed, self._landed = self._landed, []
        return landed

    def close(self) -> None:
        self._slots, self._miss_buffers, self._landed = [], [], []


def _aligned_blocks(count: int, fmt: ExpertFormat) -> torch.Tensor:
    """uint8 [count, block_bytes], starting on a boundary that the kernels like."""
    memory = torch.empty(count * fmt.block_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + count * fmt.block_bytes].view(count, fmt.block_bytes)
