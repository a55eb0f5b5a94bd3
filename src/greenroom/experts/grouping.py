"""Where the pairs of a layer's device experts lie once they are sorted. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from greenroom.experts.dispatch import Dispatch
from greenroom.experts.residency import ABSENT


@dataclass(frozen=True)
class Part:
    """One group's stretch of the sorted pairs and of all places.

    first_pair: index of its first pair. first_place: number of its first expert's place.
    pairs_at: int64 [N], pairs of each of its experts.
    """

    first_pair: int
    first_place: int
    pairs_at: np.ndarray


@dataclass(frozen=True)
class Grouping:
    """All groups of a layer. Experts are numbered through all groups: the expert's *place*.

    Attributes:
        table: int32 [experts + places]: the place of each expert, ABSENT if it does not run on the device;
            then for each place the pairs of its group up to and with it.
        parts: one a group.
        num_pairs: of all groups.
    """

    table: np.ndarray
    parts: tuple[Part, ...]
    num_pairs: int


def group_pairs(groups: Sequence[np.ndarray], plan: Dispatch) -> Grouping:
    """
    Args:
        groups: int arrays, which expert lies where in each group; ABSENT where none does. Experts that
            the plan does not run on the device may lie there too: they get no pairs. An expert that lies
            in two groups runs in the first.
        plan: of the layer; every expert that it runs on the device is in one of the groups.
    """
    counts = np.zeros_like(plan.counts)
    on_device = np.concatenate([plan.resident, *plan.streamed])
    counts[on_device] = plan.counts[on_device]
    place = np.full(len(counts), ABSENT, dtype=np.int32)
    parts, ends, first_pair, first_place = [], [], 0, 0
    for group in groups:
        pairs_at = np.where(group == ABSENT, 0, counts[group])
        used = np.flatnonzero(pairs_at)
        place[group[used]] = first_place + used
        counts[group[used]] = 0
        parts.append(Part(first_pair, first_place, pairs_at))
        ends.append(np.cumsum(pairs_at))
        first_pair += int(pairs_at.sum())
        first_place += len(group)
    return Grouping(np.concatenate([place, *ends]).astype(np.int32), tuple(parts), first_pair)
