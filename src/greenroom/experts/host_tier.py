"""The tier of a machine without a GPU: slots are ordinary memory, the CPU engine runs every lane."""

import numpy as np
import torch

from greenroom.errors import EngineError
from greenroom.experts.cache import SlotWrite
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.dispatch import CostModel, Dispatch, mask_ids
from greenroom.experts.formats import ALIGNMENT, ExpertFormat
from greenroom.experts.late_routing import LateRouting
from greenroom.experts.residency import ABSENT
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
        # Of undecided steps: where each expert lies, by the map that it was made for.
        self._addresses = [store.addresses(layer) for layer in range(len(store))]
        self._addressed: np.ndarray | None = None
        self._late = LateRouting()
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

    def has_to_decide(self, costs: CostModel) -> bool:
        return costs.copy_bytes_per_s > 0

    def begin_step(self, slot_of: np.ndarray) -> None:
        self._late.drop()
        if not any(len(slots) for slots in self._slots):
            return
        if self._addressed is None or not np.array_equal(self._addressed, slot_of):
            self._addressed = slot_of.copy()
            self._addresses = [self._place_experts(layer, row) for layer, row in enumerate(slot_of)]

    def _place_experts(self, layer: int, slot_of: np.ndarray) -> np.ndarray:
        """uint64 [experts]: in its slot each expert that has one, in the store all others."""
        addresses = self._store.addresses(layer)
        resident = np.flatnonzero(slot_of[: len(addresses)] != ABSENT)
        block_bytes = self._store.formats[layer].block_bytes
        addresses[resident] = self._slots[layer].data_ptr() + slot_of[resident].astype(np.uint64) * block_bytes
        return addresses

    def run_undecided(self, batch: LayerBatch) -> torch.Tensor:
        out = torch.empty(batch.hidden.shape, dtype=torch.float32)
        self._compute(batch, self._addresses[batch.layer], batch.ids, out)
        self._late.keep(batch)
        return out

    def late_routing(self) -> list[tuple[int, HostRouting]]:
        return self._late.take()

    def read_routing(self, batch: LayerBatch) -> HostRouting:
        return HostRouting(batch.ids.numpy(), batch.weights.numpy())

    def run(self, batch: LayerBatch, ids: np.ndarray, plan: Dispatch, slot_of: np.ndarray) -> torch.Tensor:
        addresses = self._place_experts(batch.layer, slot_of)
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
        self._compute(batch, addresses, torch.from_numpy(mask_ids(ids, experts, len(addresses))), out)
        return out

    def _compute(self, batch: LayerBatch, addresses: np.ndarray, ids: torch.Tensor, out: torch.Tensor) -> None:
        """The experts ``ids`` of each token, into ``out``."""
        fmt, memory = self._store.formats[batch.layer], (self._store, self._slots, self._miss_buffers)
        try:
            self._engine.run(fmt, addresses, batch.hidden, ids, batch.weights, out, memory=memory)
        except LateJobError as error:
            raise EngineError(f"layer {batch.layer}: {error}") from error

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
