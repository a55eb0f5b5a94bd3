"""Landing in passing: which cache slots a decode step may give to experts that cross PCIe in it. Pure.

An expert that the device copies from host memory anyway may be copied into a cache slot instead of a buffer; then it
needs no copy of its own to enter the cache. The slot may still hold an expert: the step takes it only if it does not
use that one, and if the newcomer is worth more. So the device decides, by ranks that the host has made of scores.
"""

from dataclasses import dataclass

import numpy as np

from greenroom.experts.residency import ABSENT

MOST_PLACES = 4
"""Slots that a layer's experts may land in a step at most: the device looks at them one after another."""

SLOT, RESIDENT, LEAST = range(3)
"""Columns of ``Offers.places``."""


@dataclass(frozen=True)
class OfferedSlots:
    """Slots that a step may write: int [n] each, ``resident`` being the expert in the slot or ABSENT, and ``place`` the
    column of ``Offers.places``."""

    layer: np.ndarray
    place: np.ndarray
    slot: np.ndarray
    resident: np.ndarray


@dataclass(frozen=True)
class Offers:
    """What the device has to know.

    appeal: int32 [layers, experts], ranks within each layer from 0: the higher, the likelier is an expert that the
        step uses to be used again, and the rather it shall cross PCIe.
    places: int32 [layers, places, 3], a slot, the expert in it or ABSENT, and the least appeal that an expert must
        have to land there. In the order in which they shall be taken; a slot of ABSENT is no place.
    slots: the places once more, as the cache takes them.
    """

    appeal: np.ndarray
    places: np.ndarray
    slots: OfferedSlots


def choose_offers(
    scores: np.ndarray,
    if_used: np.ndarray,
    expert_in: np.ndarray,
    writable: np.ndarray,
    arriving: np.ndarray,
    count: int,
    margin: float = 1.0,
) -> Offers:
    """Empty slots first, then those of the residents with the lowest scores.

    Args:
        scores: float [layers, experts].
        if_used: the same, as they would be had the step used every expert; infinite behind a layer's last expert.
        expert_in: int [layers, slots], ABSENT where a slot is empty.
        writable: bool [layers, slots], slots that may be offered.
        arriving: bool [layers, experts], experts on their way into a slot already, which need no other one.
        count: places a layer.
        margin: a newcomer must have more than so many times the resident's score.
    """
    layers, experts = scores.shape
    worth = np.where(arriving, -np.inf, if_used)
    # Backwards, so that of equals the lower id ranks higher.
    order = experts - 1 - np.lexsort((scores[:, ::-1], worth[:, ::-1]), axis=1)
    appeal = np.empty((layers, experts), dtype=np.int32)
    rows = np.arange(layers)[:, None]
    appeal[rows, order] = np.arange(experts, dtype=np.int32)
    held = np.where(expert_in == ABSENT, -np.inf, scores[rows, np.maximum(expert_in, 0)])
    slot = np.argsort(np.where(writable, held, np.inf), axis=1, kind="stable")[:, :count]
    worst = held[rows, slot]
    places = np.empty((*slot.shape, 3), dtype=np.int32)
    places[:, :, SLOT] = slot
    places[:, :, RESIDENT] = expert_in[rows, slot]
    places[:, :, LEAST] = (worth[:, None, :] <= margin * worst[:, :, None]).sum(axis=2)
    places[~writable[rows, slot]] = ABSENT
    return Offers(appeal, places, list_slots(places))


def list_slots(places: np.ndarray) -> OfferedSlots:
    """Layer by layer.

    Args:
        places: int [layers, places, 3], see ``Offers``.
    """
    layer, place = np.nonzero(places[:, :, SLOT] != ABSENT)
    return OfferedSlots(layer, place, places[layer, place, SLOT], places[layer, place, RESIDENT])
