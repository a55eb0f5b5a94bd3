"""The decision: where each expert of a layer runs in this step. Pure."""

from dataclasses import dataclass, replace

import numpy as np

from greenroom.experts.formats import ExpertFormat
from greenroom.experts.residency import ABSENT


@dataclass(frozen=True)
class CostModel:
    """What an absent expert costs on each of the two lanes that can run it. A rate of 0 closes its lane.

    Attributes:
        copy_bytes_per_s: host memory to device memory.
        cpu_bytes_per_s: expert weights read by the CPU engine.
        cpu_flops_per_s: arithmetic of the CPU engine.
    """

    copy_bytes_per_s: float
    cpu_bytes_per_s: float
    cpu_flops_per_s: float

    def __post_init__(self) -> None:
        if self.copy_bytes_per_s <= 0 and (self.cpu_bytes_per_s <= 0 or self.cpu_flops_per_s <= 0):
            raise ValueError("at least one lane must be open")

    def paced(self, copy: float, cpu: float) -> "CostModel":
        """The same lanes if copies take ``copy`` and the CPU ``cpu`` times as long."""
        return replace(
            self,
            copy_bytes_per_s=self.copy_bytes_per_s / copy,
            cpu_bytes_per_s=self.cpu_bytes_per_s / cpu,
            cpu_flops_per_s=self.cpu_flops_per_s / cpu,
        )


@dataclass(frozen=True)
class LaneState:
    """How the two lanes stand when a layer is decided.

    Attributes:
        ahead: ids, in groups, whose copies were started before the layer's routing was known. What of them
            has tokens is streamed in any case; the rest was copied in vain.
        copy_busy_s: until the last of those copies ends.
        cpu_result_s: to bring the CPU's sums to the device, once it has computed anything.
        copy_pace, cpu_pace: how many times longer than by the cost model the lanes take.
    """

    ahead: tuple[np.ndarray, ...] = ()
    copy_busy_s: float = 0.0
    cpu_result_s: float = 0.0
    copy_pace: float = 1.0
    cpu_pace: float = 1.0


IDLE = LaneState()


@dataclass(frozen=True)
class Dispatch:
    """Experts of one layer in one step, by lane. Together they are exactly the experts with tokens.

    Attributes:
        counts: int64 [experts], (token, expert) pairs of each.
        resident: ids, ascending; run from their cache slots.
        streamed: ids, in groups that fit a miss buffer; run on the device after a copy. First those copied
            ahead, then the others, most pairs first.
        cpu: ids, ascending; run by the CPU engine.
    """

    counts: np.ndarray
    resident: np.ndarray
    streamed: tuple[np.ndarray, ...]
    cpu: np.ndarray


def dispatch(
    counts: np.ndarray,
    slot_of: np.ndarray,
    costs: CostModel,
    fmt: ExpertFormat,
    group_size: int,
    lanes: LaneState = IDLE,
) -> Dispatch:
    """Assigns every expert that has tokens to one lane.

    The absent experts with most pairs are streamed, as many as let the copies and the CPU finish
    together soonest; as batches grow this becomes all of them.

    Args:
        counts: int [experts], pairs of each expert in this step.
        slot_of: int [experts], its cache slot or ABSENT.
        costs: rates of the two lanes.
        fmt: shape of the layer's experts.
        group_size: experts that fit a miss buffer.
        lanes: what is under way already.
    """
    wanted = (counts > 0) & (slot_of == ABSENT)
    resident = np.flatnonzero((counts > 0) & (slot_of != ABSENT))
    ahead = [group[wanted[group]] for group in lanes.ahead]
    for group in ahead:
        wanted[group] = False
    absent = np.flatnonzero(wanted)
    if costs.copy_bytes_per_s <= 0 and not ahead:
        return Dispatch(counts, resident, (), absent)
    absent = absent[np.argsort(-counts[absent], kind="stable")]
    num_streamed = choose_num_streamed(counts[absent], costs, fmt, lanes)
    streamed = absent[:num_streamed]
    groups = [streamed[start : start + group_size] for start in range(0, num_streamed, group_size)]
    return Dispatch(counts, resident, tuple(g for g in (*ahead, *groups) if len(g)), np.sort(absent[num_streamed:]))


def choose_num_streamed(pairs: np.ndarray, costs: CostModel, fmt: ExpertFormat, lanes: LaneState = IDLE) -> int:
    """How many of the absent experts to stream, so that the slower of the two lanes ends soonest.

    Args:
        pairs: int [absent], pairs of each absent expert, descending.

    Returns:
        A prefix length; the smallest of equally good ones.
    """
    copy, cpu = lane_seconds(pairs, costs.paced(lanes.copy_pace, lanes.cpu_pace), fmt)
    copy_ends = lanes.copy_busy_s + np.concatenate([[0.0], np.cumsum(copy)])
    cpu_ends = np.concatenate([lanes.cpu_result_s + np.cumsum(cpu[::-1])[::-1], [0.0]])
    return int(np.argmin(np.maximum(copy_ends, cpu_ends)))


def lane_seconds(pairs: np.ndarray, costs: CostModel, fmt: ExpertFormat) -> tuple[np.ndarray, np.ndarray]:
    """Time of each expert on the copy lane and on the CPU lane; infinite on a closed one."""
    copy = np.full(len(pairs), np.inf)
    if costs.copy_bytes_per_s > 0:
        copy[:] = fmt.block_bytes / costs.copy_bytes_per_s
    cpu = np.full(len(pairs), np.inf)
    if costs.cpu_bytes_per_s > 0 and costs.cpu_flops_per_s > 0:
        reading = fmt.block_bytes / costs.cpu_bytes_per_s
        cpu[:] = np.maximum(reading, pairs * (fmt.flops(1) / costs.cpu_flops_per_s))
    return copy, cpu


def mask_ids(ids: np.ndarray, experts: np.ndarray, num_experts: int) -> np.ndarray:
    """``ids`` with -1 wherever an id is not one of ``experts``. int32 of the same shape."""
    table = np.full(num_experts + 1, -1, dtype=np.int32)
    table[experts] = experts
    if ids.size and (ids.min() < -1 or ids.max() >= num_experts):
        ids = np.where((ids >= 0) & (ids < num_experts), ids, -1)
    return table[ids]  # -1 is the last place of the table


AHEAD_SHARE = 0.9
"""Of a layer's experts, how many must have had tokens before the next layer's are copied unasked."""


def choose_ahead(
    counts: np.ndarray, num_streamed: int, slot_of: np.ndarray, popularity: np.ndarray, capacity: int
) -> np.ndarray:
    """Experts of the next layer to copy before its routing is known; none unless nearly all will be needed.

    The batch is the same in the next layer, so as large a share of the experts will have tokens there.

    Args:
        counts: int [experts], pairs of this layer's experts.
        num_streamed: experts that this layer streamed; the next one will not need more.
        slot_of: int [experts], the next layer's map.
        popularity: [experts], of the next layer's experts: higher ones are copied first, equals by id.
        capacity: experts that may lie in miss buffers meanwhile.

    Returns:
        ids, at most ``capacity``.
    """
    if (counts > 0).mean() < AHEAD_SHARE:
        return np.empty(0, dtype=np.int64)
    absent = np.flatnonzero(slot_of == ABSENT)
    absent = absent[np.argsort(-popularity[absent], kind="stable")]
    return absent[: min(capacity, num_streamed)]
