"""When a pass copies which unit: as early as its slot is free, and spread over the layers up to the next one. Pure.

Unit k (the k-th offloaded layer) lives in slot k % slots. When unit k has been computed, the slot's next unit is
copied: k + slots or, behind the last one, the slot's first, for the next pass. Where layers that are not offloaded lie
before unit k + 1, the copy is made in pieces, one a layer, so that every layer's experts find the link equally busy.

The slot of the last unit is an exception: few layers are left then. If more of them lie before unit 0, its first unit
is copied there, at the begin of the next pass.
"""

from dataclasses import dataclass

from greenroom.weights.select import ALIGNMENT, Selection, Unit

LEAST_PIECE = 1 << 20
"""Bytes; smaller pieces would cost more to start than to copy."""


@dataclass(frozen=True)
class Fill:
    """One unit's copy into its slot. Its first piece starts when ``after`` has been computed.

    after: a unit, or None for the begin of the pass. layers: those at whose begin another piece starts, in order.
    piece_bytes: of each but the last one. beside_experts: whether some layer's experts run before it has to be there.
    """

    unit: int
    after: int | None
    layers: tuple[int, ...]
    piece_bytes: int
    beside_experts: bool


@dataclass(frozen=True)
class Schedule:
    """All copies of a pass. homes: which unit is in each slot between two passes."""

    fills: tuple[Fill, ...]
    homes: tuple[int, ...]


def schedule(selection: Selection, least_piece: int = LEAST_PIECE) -> Schedule:
    """For the prefetch backend, whose units are all layers or parts of layers."""
    units, slots = selection.units, selection.num_slots
    homes, fills = list(range(slots)), []
    for number in range(len(units)):
        following = number + slots if number + slots < len(units) else number % slots
        if following == number:
            continue
        last = number == len(units) - 1
        if last and _layer(units[0]) > selection.num_layers - _layer(units[-1]):
            homes[number % slots] = number
            fills.append(_fill(selection, following, None, least_piece))
        else:
            fills.append(_fill(selection, following, number, least_piece))
    return Schedule(tuple(fills), tuple(homes))


def bytes_beside_experts(selection: Selection) -> int:
    """Of a pass: what crosses to the device while experts do. Weights that are read in place cross when they are
    computed with, and so do those of a whole layer whose slot is free only when the layer before has ended."""
    if selection.backend != "prefetch":
        return 0
    fills = schedule(selection).fills
    return sum(selection.units[fill.unit].nbytes for fill in fills if fill.beside_experts)


def _fill(selection: Selection, number: int, after: int | None, least_piece: int) -> Fill:
    units, end = selection.units, selection.num_layers
    if after is None:
        start, until = 0, _layer(units[0])
        needed = _layer(units[number])
    else:
        # The first piece starts inside this layer, before its experts, or at the begin of the one behind it.
        start = _layer(units[after]) + (0 if _is_part(units[after]) else 1)
        until = _layer(units[after + 1]) if after + 1 < len(units) else end
        needed = _layer(units[number]) if number > after else end
    size = units[number].nbytes
    pieces = max(1, min(until - start, size // least_piece))
    piece_bytes = -(-size // pieces // ALIGNMENT) * ALIGNMENT
    layers = tuple(range(start + 1, start + pieces))
    return Fill(number, after, layers, piece_bytes, beside_experts=needed > start)


def _layer(unit: Unit) -> int:
    assert unit.layer is not None
    return unit.layer


def _is_part(unit: Unit) -> bool:
    """Whether the unit ends before its layer does."""
    return not unit.module.endswith(f"layers.{unit.layer}")
