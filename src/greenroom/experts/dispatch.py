"""The decision: where each expert of a layer runs in this step. Pure."""

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Dispatch:
    """Experts of one layer in one step, by lane. Together they are exactly the experts with tokens.

    Attributes:
        counts: int64 [experts], (token, expert) pairs of each.
        resident: ids, ascending; run from their cache slots.
        streamed: ids, most pairs first, in groups that fit a miss buffer; run on the device after a copy.
        cpu: ids, ascending; run by the CPU engine.
    """

    counts: np.ndarray
    resident: np.ndarray
    streamed: tuple[np.ndarray, ...]
    cpu: np.ndarray


def dispatch(counts: np.ndarray, slot_of: np.ndarray, costs: CostModel, fmt: ExpertFormat, group_size: int) -> Dispatch:
    """Assigns every expert that has tokens to one lane.

    The absent experts with most pairs are streamed, as many as let the copies and the CPU finish
    together soonest; as batches grow this becomes all of them.

    Args:
        counts: int [experts], pairs of each expert in this step.
        slot_of: int [experts], its cache slot or ABSENT.
        costs: rates of the two lanes.
        fmt: shape of the layer's experts.
        group_size: experts that fit a miss buffer.
    """
    used = counts > 0
    resident = np.flatnonzero(used & (slot_of != ABSENT))
    absent = np.flatnonzero(used & (slot_of == ABSENT))
    absent = absent[np.argsort(-counts[absent], kind="stable")]
    num_streamed = choose_num_streamed(counts[absent], costs, fmt)
    streamed = absent[:num_streamed]
    groups = tuple(streamed[start : start + group_size] for start in range(0, num_streamed, group_size))
    return Dispatch(counts, resident, groups, np.sort(absent[num_streamed:]))


def choose_num_streamed(pairs: np.ndarray, costs: CostModel, fmt: ExpertFormat) -> int:
    """How many of the absent experts to stream, so that the slower of the two lanes ends soonest.

    Args:
        pairs: int [absent], pairs of each absent expert, descending.

    Returns:
        A prefix length; the smallest of equally good ones.
    """
    copy, cpu = _seconds(pairs, costs, fmt)
    copy_ends = np.concatenate([[0.0], np.cumsum(copy)])
    cpu_ends = np.concatenate([np.cumsum(cpu[::-1])[::-1], [0.0]])
    return int(np.argmin(np.maximum(copy_ends, cpu_ends)))


def _seconds(pairs: np.ndarray, costs: CostModel, fmt: ExpertFormat) -> tuple[np.ndarray, np.ndarray]:
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
    inside = (ids >= 0) & (ids < num_experts)
    return table[np.where(inside, ids, num_experts)]
