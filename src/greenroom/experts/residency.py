"""Which experts enter the cache after a step, and for which they make room. Pure."""

from dataclasses import dataclass, field

import numpy as np

ABSENT = -1
"""In a map: the expert has no slot. In ``expert_in``: the slot holds no expert."""


@dataclass(frozen=True)
class Swap:
    """``expert`` is to be written into ``slot``; ``victim`` leaves it, or ABSENT if it is free.

    gain: how much more the expert's score is than the victim's, or than nothing.
    """

    expert: int
    slot: int
    victim: int
    gain: float = field(default=0.0, compare=False)


def choose_swaps(
    scores: np.ndarray,
    slot_of: np.ndarray,
    free_slots: np.ndarray,
    needed: np.ndarray,
    candidates: np.ndarray,
    limit: int,
    margin: float = 1.0,
) -> list[Swap]:
    """Decides one layer's changes of residency after a step.

    Candidates fill free slots first, the best first and without limit. Then, at most ``limit`` times,
    the best remaining candidate replaces the resident with the lowest score, as long as its own is
    more than ``margin`` times that. Ties go to the lower expert id.

    Args:
        scores: float [experts].
        slot_of: int [experts], slot of each resident expert, ABSENT for others.
        free_slots: int [n], slots that hold nothing and are not being written.
        needed: bool [experts], experts that this step used; they are never victims.
        candidates: bool [experts], absent experts that this step may admit.
        limit: replacements at most.
        margin: at least 1.
    """
    entering = np.flatnonzero(candidates & (slot_of == ABSENT))
    entering = entering[np.argsort(-scores[entering], kind="stable")]
    filled = min(len(free_slots), len(entering))
    swaps = [
        Swap(int(e), int(s), ABSENT, float(scores[e]))
        for e, s in zip(entering[:filled], free_slots[:filled], strict=True)
    ]
    if limit == 0 or filled == len(entering):
        return swaps
    leaving = np.flatnonzero((slot_of != ABSENT) & ~needed)
    leaving = leaving[np.argsort(scores[leaving], kind="stable")]
    for expert, victim in zip(entering[filled : filled + limit], leaving, strict=False):
        if scores[expert] <= margin * scores[victim]:
            break
        swaps.append(Swap(int(expert), int(slot_of[victim]), int(victim), float(scores[expert] - scores[victim])))
    return swaps


def most_wanted(swaps: list[tuple[int, Swap]], room: int) -> list[tuple[int, Swap]]:
    """The ``room`` swaps of all layers that gain most; those that fill free slots come before others.

    Args:
        swaps: (layer, swap).
    """
    if len(swaps) <= room:
        return swaps
    return sorted(swaps, key=lambda swap: (swap[1].victim != ABSENT, -swap[1].gain))[: max(room, 0)]
