"""Which experts enter the cache after a step, and for which they make room. Pure."""

from collections import Counter
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
) -> list[tuple[int, Swap]]:
    """Decides the changes of residency of all layers after a step, in one pass.

    In each layer candidates fill free slots first, the best first and without limit. Then, at most
    ``limit`` times, the best remaining candidate replaces the resident with the lowest score, as long as
    its own is more than ``margin`` times that. Ties go to the lower expert id.

    Args:
        scores: float [layers, experts].
        slot_of: int [layers, experts], slot of each resident expert, ABSENT for others.
        free_slots: bool [layers, slots], slots that hold nothing and are not being written.
        needed: bool [layers, experts], experts that this step used; they are never victims.
        candidates: bool [layers, experts], experts that this step may admit, if they are absent.
        limit: replacements a layer at most.
        margin: at least 1.

    Returns:
        (layer, swap), layers ascending.
    """
    layers, entering = np.nonzero(candidates & (slot_of == ABSENT))
    if len(layers) == 0:
        return []
    order = np.lexsort((-scores[layers, entering], layers))
    layers, entering = layers[order], entering[order]
    # Infinite where nobody may leave.
    leaving = np.where((slot_of != ABSENT) & ~needed, scores, np.inf)
    firsts = np.flatnonzero(np.diff(layers, prepend=-1))
    # Few layers change anything: only those are looked at closely.
    lowest = leaving.min(axis=1)[layers[firsts]]
    wins = scores[layers[firsts], entering[firsts]] > margin * lowest
    filling = (free_slots.sum(axis=1) > 0)[layers[firsts]]
    ends = np.append(firsts[1:], len(layers))
    swaps = []
    for n in np.flatnonzero(wins | filling):
        layer, best = int(layers[firsts[n]]), entering[firsts[n] : ends[n]].tolist()
        row, rivals = scores[layer], leaving[layer]
        slots = np.flatnonzero(free_slots[layer]).tolist() if filling[n] else []
        for expert, slot in zip(best, slots, strict=False):
            swaps.append((layer, Swap(expert, slot, ABSENT, float(row[expert]))))
        for expert in best[len(slots) : len(slots) + limit]:
            victim, score = int(rivals.argmin()), float(row[expert])
            if not score > margin * rivals[victim]:
                break
            swaps.append((layer, Swap(expert, int(slot_of[layer, victim]), victim, score - float(row[victim]))))
            rivals[victim] = np.inf
    return swaps


def hold_back_replacements(swaps: list[tuple[int, Swap]], room: int) -> list[tuple[int, Swap]]:
    """All swaps that fill free slots, and of the others the ``room`` that gain most."""
    fills = [swap for swap in swaps if swap[1].victim == ABSENT]
    return fills + most_wanted([swap for swap in swaps if swap[1].victim != ABSENT], room)


def within_limit(swaps: list[tuple[int, Swap]], displaced: list[int], limit: int) -> list[tuple[int, Swap]]:
    """Of a step's swaps those with which no layer loses more than ``limit`` residents to it; the first ones stay.

    Args:
        displaced: layers, one entry for each resident that has made room already.
    """
    lost = Counter(displaced)
    kept = []
    for layer, swap in swaps:
        if swap.victim != ABSENT:
            if lost[layer] >= limit:
                continue
            lost[layer] += 1
        kept.append((layer, swap))
    return kept


def most_wanted(swaps: list[tuple[int, Swap]], room: int) -> list[tuple[int, Swap]]:
    """The ``room`` swaps of all layers that gain most; those that fill free slots come before others.

    Args:
        swaps: (layer, swap).
    """
    if len(swaps) <= room:
        return swaps
    return sorted(swaps, key=lambda swap: (swap[1].victim != ABSENT, -swap[1].gain))[: max(room, 0)]
