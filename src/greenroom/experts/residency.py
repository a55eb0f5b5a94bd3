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
    entering = candidates & (slot_of == ABSENT)
    leaving = (slot_of != ABSENT) & ~needed
    best = np.argsort(np.where(entering, -scores, np.inf), axis=1, kind="stable")
    worst = np.argsort(np.where(leaving, scores, np.inf), axis=1, kind="stable")[:, :limit]
    entering_num = entering.sum(axis=1)
    filled = np.minimum(entering_num, free_slots.sum(axis=1))
    # Column n: the n-th candidate behind those that fill free slots, against the n-th worst resident.
    place = filled[:, None] + np.arange(worst.shape[1])[None, :]
    rivals = np.take_along_axis(best, np.minimum(place, best.shape[1] - 1), axis=1)
    wins = (place < entering_num[:, None]) & (np.arange(worst.shape[1]) < leaving.sum(axis=1)[:, None])
    wins &= np.take_along_axis(scores, rivals, axis=1) > margin * np.take_along_axis(scores, worst, axis=1)
    replaced = np.logical_and.accumulate(wins, axis=1).sum(axis=1)
    swaps = []
    for layer in np.flatnonzero(filled + replaced):
        row, chosen = scores[layer], best[layer]
        for expert, slot in zip(chosen[: filled[layer]], np.flatnonzero(free_slots[layer]), strict=False):
            swaps.append((int(layer), Swap(int(expert), int(slot), ABSENT, float(row[expert]))))
        for expert, victim in zip(rivals[layer, : replaced[layer]], worst[layer], strict=False):
            slot = slot_of[layer, victim]
            swaps.append((int(layer), Swap(int(expert), int(slot), int(victim), float(row[expert] - row[victim]))))
    return swaps


def hold_back_replacements(swaps: list[tuple[int, Swap]], room: int) -> list[tuple[int, Swap]]:
    """All swaps that fill free slots, and of the others the ``room`` that gain most."""
    fills = [swap for swap in swaps if swap[1].victim == ABSENT]
    return fills + most_wanted([swap for swap in swaps if swap[1].victim != ABSENT], room)


def most_wanted(swaps: list[tuple[int, Swap]], room: int) -> list[tuple[int, Swap]]:
    """The ``room`` swaps of all layers that gain most; those that fill free slots come before others.

    Args:
        swaps: (layer, swap).
    """
    if len(swaps) <= room:
        return swaps
    return sorted(swaps, key=lambda swap: (swap[1].victim != ABSENT, -swap[1].gain))[: max(room, 0)]
