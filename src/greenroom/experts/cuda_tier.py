"""The tier of a CUDA device: slots and miss buffers in its memory, copies on streams of their own.

Who orders what:

- ``read_routing`` waits for the CPU's share of the layer before, then for this layer's ids and weights to reach
  page-locked memory, and ``run`` for its hidden rows if the CPU needs them. The latter two are the only waits of the
  host for the device in a layer. Everything enqueued earlier on the compute stream has then ended, so staging memory of
  the layer before may be written again.
- The compute stream waits for the CPU's share of a layer, and the host enqueues meanwhile what comes up to the next
  routing. Then, or at the step's end, it settles the job's ticket, before it waits for the device: a job that hangs
  would hold up both for ever, and so is noticed.
- Miss buffers are ordered by ``MissBuffers``. Behind a layer's last group the copies of the next layer's
  first groups are started, so that PCIe is busy until that layer's routing is known.
- ``run_complete`` waits for nothing. Its routing is read behind the step's end.
- A slot is written on the write stream after ``step_end``, which is recorded behind all work of the
  steps that could read it. It enters the map only once ``landed_writes`` has seen its event.
"""

import statistics
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from greenroom.experts.cache import SlotWrite
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.device_ffn import OneByOneFfn, can_group
from greenroom.experts.dispatch import CostModel, Dispatch, LaneState, choose_ahead, lane_seconds, mask_ids
from greenroom.experts.grouping import group_pairs
from greenroom.experts.late_routing import LateRouting
from greenroom.experts.open_job import OpenJob
from greenroom.experts.pace import Pace
from greenroom.experts.probe import cpu_rates
from greenroom.experts.residency import ABSENT
from greenroom.experts.staging import Staging
from greenroom.experts.store import HostStore
from greenroom.experts.tier import DeviceTier, HostRouting, LayerBatch, allocate_blocks
from greenroom.experts.transfer import NUM_BUFFERS, Landing, MissBuffers
from greenroom.kernels.gpu.stream_wait import wait_until_reached

if TYPE_CHECKING:
    from greenroom.experts.grouped_ffn import GroupedFfn

_COPY_PROBES = 5


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
        self._slot_views = [fmt.views(slots) for fmt, slots in zip(store.formats, self._slots, strict=True)]
        self._copies = MissBuffers(store, miss_expert_num, device)
        self._popularity = [np.zeros(count, dtype=np.int64) for count in store.num_experts]
        self._cpu_pace, self._copy_pace = Pace(), Pace()
        self._open: OpenJob | None = None
        self._costs: CostModel | None = None
        self._staging = Staging(device)
        self._write_stream = torch.cuda.Stream(device)
        self._step_end = torch.cuda.Event()
        self._slot_of: np.ndarray | None = None  # the running step's map
        self._writes: deque[tuple[SlotWrite, torch.cuda.Event]] = deque()
        self._late = LateRouting()
        self._grouped = [
            can_group(fmt, count, device) for fmt, count in zip(store.formats, store.num_experts, strict=True)
        ]

    @property
    def device_bytes(self) -> int:
        return sum(memory.numel() for memory in self._slots) + self._copies.nbytes

    @property
    def slots(self) -> list[torch.Tensor]:
        return self._slots

    @property
    def group_size(self) -> int:
        return self._copies.group_size

    def measure_costs(self) -> CostModel:
        reading, computing = cpu_rates(self._engine, self._store)
        return CostModel(self._copy_rate(), reading, computing)

    def _copy_rate(self) -> float:
        """Bytes a second into a miss buffer; the median of a few groups."""
        group = np.arange(min(self.group_size, self._store.num_experts[0]))
        rates = []
        for _ in range(_COPY_PROBES):
            self._copies.fill(0, group)
            self._copies.stream.synchronize()
            rates += self._copies.measured_rates()
        return statistics.median(rates)

    def begin_step(self, slot_of: np.ndarray) -> None:
        self._slot_of = slot_of
        self._late.drop()  # of a step that was abandoned, or not counted

    def read_routing(self, batch: LayerBatch) -> HostRouting:
        self._staging.request(batch)
        # First: until the job of the layer before has ended, the device waits for it, for ever if need be.
        self._settle()
        return self._staging.arrived()

    def lanes(self, batch: LayerBatch, costs: CostModel) -> LaneState:
        self._costs = costs
        tokens = len(batch.hidden)
        rates = self._copies.measured_rates()
        if costs.copy_bytes_per_s <= 0:
            return LaneState(cpu_pace=self._cpu_pace.ratio(tokens))
        for rate in rates:
            self._copy_pace.observe(tokens, 1 / costs.copy_bytes_per_s, 1 / rate)
        pace = self._copy_pace.ratio(tokens)
        return LaneState(
            ahead=tuple(landing.experts for landing in self._copies.ahead(batch.layer)),
            copy_busy_s=self._copies.busy_bytes() / costs.copy_bytes_per_s * pace,
            cpu_result_s=batch.hidden.numel() * torch.float32.itemsize / costs.copy_bytes_per_s * pace,
            copy_pace=pace,
            cpu_pace=self._cpu_pace.ratio(tokens),
        )

    def run(self, batch: LayerBatch, ids: np.ndarray, plan: Dispatch, slot_of: np.ndarray) -> torch.Tensor:
        landings = deque(self._copies.take_ahead(batch.layer))
        taken = {expert for landing in landings for expert in landing.experts.tolist()}
        groups = deque(group for group in plan.streamed if int(group[0]) not in taken)
        if not landings:
            self._top_up(landings, groups, batch.layer)
        # With copies made ahead PCIe is busy for a while, and the CPU comes first.
        self._open = self._submit_cpu(batch, ids, plan)
        self._top_up(landings, groups, batch.layer)
        out = torch.zeros(batch.hidden.shape, dtype=torch.float32, device=self.device)
        self._run_on_device(out, batch, plan, slot_of, landings, groups)
        self._copy_ahead(batch.layer, plan)
        if self._open is not None:
            ending = self._open.ending
            wait_until_reached(ending.done, ending.value, self.device)
            # Read in place: a copy would queue behind all those of the copy stream.
            out += self._staging.out_on_device
        return out

    def _submit_cpu(self, batch: LayerBatch, ids: np.ndarray, plan: Dispatch) -> OpenJob | None:
        if len(plan.cpu) == 0:
            return None
        chosen = torch.from_numpy(mask_ids(ids, plan.cpu, len(plan.counts)))
        staging = self._staging
        staging.wait_for_hidden()
        ending = staging.next_ending()
        ticket = self._engine.submit(
            self._store.formats[batch.layer],
            self._store.addresses(batch.layer),
            staging.hidden,
            chosen,
            staging.weights,
            staging.out,
            ending=ending,
            memory=(self._store.blocks(batch.layer),),
        )
        predicted = 0.0
        if self._costs is not None:
            _, cpu = lane_seconds(plan.counts[plan.cpu], self._costs, self._store.formats[batch.layer])
            predicted = float(cpu.sum())
        return OpenJob(batch.layer, ticket, ending, len(batch.hidden), predicted)

    def _settle(self) -> None:
        """Waits for the CPU's share of the layer before, if there was one, and takes note of how long it took.

        Raises:
            EngineError: it failed, or the CPU engine hangs; the sentence then names the layer.
        """
        job, self._open = self._open, None
        if job is None:
            return
        seconds = job.wait()
        if job.predicted_s > 0:
            self._cpu_pace.observe(job.tokens, job.predicted_s, seconds)

    def _top_up(self, landings: deque[Landing], groups: deque[np.ndarray], layer: int) -> None:
        """Starts copies as long as a buffer has none that is waited for."""
        while groups and len(landings) < NUM_BUFFERS:
            landings.append(self._copies.fill(layer, groups.popleft()))

    def _run_on_device(
        self,
        out: torch.Tensor,
        batch: LayerBatch,
        plan: Dispatch,
        slot_of: np.ndarray,
        landings: deque[Landing],
        groups: deque[np.ndarray],
    ) -> None:
        """Adds what resident and streamed experts contribute; starts the copies of ``groups`` on the way."""
        in_slots = np.full(len(self._slots[batch.layer]), ABSENT)
        in_slots[slot_of[plan.resident]] = plan.resident
        arrays = [in_slots, *(landing.experts for landing in landings), *groups]
        grouping = group_pairs(arrays, plan)
        if grouping.num_pairs == 0:
            return
        table = self._staging.upload(grouping.table, self.device)
        ffn = self._ffn(batch, len(plan.counts), table)
        if len(plan.resident):
            ffn.add(out, grouping.parts[0], self._slot_views[batch.layer])
        number = 0
        while landings:
            landing, number = landings.popleft(), number + 1
            ffn.add(out, grouping.parts[number], self._copies.read(landing))
            self._copies.release(landing)
            self._top_up(landings, groups, batch.layer)

    def _ffn(self, batch: LayerBatch, num_experts: int, table: torch.Tensor) -> "GroupedFfn | OneByOneFfn":
        fmt = self._store.formats[batch.layer]
        if not self._grouped[batch.layer]:
            return OneByOneFfn(batch, fmt, num_experts, table)
        # Needs triton, which GPU builds of torch bring.
        from greenroom.experts.grouped_ffn import GroupedFfn

        return GroupedFfn(batch, fmt, num_experts, table)

    def takes_complete(self, layer: int) -> bool:
        return self._grouped[layer]

    def run_complete(self, batch: LayerBatch) -> torch.Tensor:
        from greenroom.experts.grouped_ffn import run_all

        self._late.keep(batch)
        return run_all(batch, self._store.formats[batch.layer], self._slot_views[batch.layer])

    def late_routing(self) -> list[tuple[int, HostRouting]]:
        return self._late.take()

    def _copy_ahead(self, layer: int, plan: Dispatch) -> None:
        """Starts copies for the next layer if it will need nearly all of its experts."""
        self._popularity[layer] = plan.counts
        following = layer + 1
        if following == len(self._store) or not plan.streamed:
            return
        assert self._slot_of is not None
        experts = choose_ahead(
            plan.counts,
            sum(len(group) for group in plan.streamed),
            self._slot_of[following, : self._store.num_experts[following]],
            self._popularity[following],
            self._copies.ahead_capacity,
        )
        self._copies.start_ahead(following, experts)

    def end_step(self) -> None:
        self._step_end.record(torch.cuda.current_stream(self.device))
        self._settle()

    def abandon_step(self) -> None:
        self._step_end.record(torch.cuda.current_stream(self.device))
        job, self._open = self._open, None
        if job is not None:
            job.abandon()

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
        self._slots, self._slot_views = [], []
        self._copies.close()
        self._writes.clear()
