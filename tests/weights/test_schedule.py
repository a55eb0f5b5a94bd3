"""When units are copied: against what a pass needs, and how evenly the layers' experts find the link in use."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.weights.config import WeightOffloadConfig
from greenroom.weights.schedule import bytes_beside_experts, schedule
from greenroom.weights.select import Selection, WeightInfo, select

WHOLE, PART = None, "self_attn"


def selection(layers: int, group: int, number: int, step: int, params: str | None, backend: str = "prefetch"):
    weights = [
        WeightInfo((f"model.layers.{layer}.{name}.weight",), (1 << 20,), torch.float32)
        for layer in range(layers)
        for name in ("self_attn", "mlp")
    ]
    return select(weights, "model", WeightOffloadConfig(backend, group, number, step, params))


def run(selection: Selection) -> list[float]:
    """Plays two passes; returns the bytes that start to cross before each layer's experts in the second one.

    Every unit must be in its slot, complete, when its turn comes, and nothing is written into a slot that is in use.
    """
    plan = schedule(selection)
    by_layer = {unit.layer: number for number, unit in enumerate(selection.units)}
    slots = len(plan.homes)
    holds = list(plan.homes)
    missing = [0] * slots
    part = not selection.units[0].module.endswith(f"layers.{selection.units[0].layer}")
    started = [0] * selection.num_layers

    def piece(fill, layer):
        slot = fill.unit % slots
        assert holds[slot] == fill.unit
        assert missing[slot] > 0
        size = min(fill.piece_bytes, missing[slot])
        missing[slot] -= size
        if layer < selection.num_layers:
            started[layer] += size

    def begin(after, layer):
        for fill in plan.fills:
            if fill.after == after:
                slot = fill.unit % slots
                assert missing[slot] == 0, "the copy before it is complete"
                holds[slot], missing[slot] = fill.unit, selection.units[fill.unit].nbytes
                piece(fill, layer)

    for _ in range(2):
        started[:] = [0] * selection.num_layers
        begin(None, 0)
        for layer in range(selection.num_layers):
            for fill in plan.fills:
                if layer in fill.layers:
                    piece(fill, layer)
            number = by_layer.get(layer)
            if number is not None:
                assert holds[number % slots] == number
                assert missing[number % slots] == 0, "it has been asked for in full before its turn"
                begin(number, layer if part else layer + 1)
        assert holds == list(plan.homes)
        assert missing == [0] * slots
    return started


@given(st.integers(1, 24), st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.sampled_from([WHOLE, PART]))
def test_every_unit_is_there_when_its_turn_comes(layers, group, number, step, params):
    if number > group or layers <= group - number:
        return
    chosen = selection(layers, group, number, step, params)
    run(chosen)
    fills = schedule(chosen).fills
    assert sum(chosen.units[fill.unit].nbytes for fill in fills) == chosen.pass_bytes
    assert len({fill.unit for fill in fills}) == len(fills)
    assert bytes_beside_experts(chosen) <= chosen.pass_bytes


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_last_of_each_group_is_copied_over_all_its_layers(step):
    """48 layers, every fourth: all layers find about as much under way, but for the very last."""
    started = run(selection(48, 4, 1, step, PART))
    unit = 4 << 20
    assert max(started) <= unit / 3 + 256
    assert min(started[:-1]) >= unit / 4 - 256


def test_every_layer_alike_where_all_are_offloaded():
    for step in (1, 2, 5):
        assert set(run(selection(12, 1, 1, step, PART))) == {4 << 20}


def test_one_of_four_of_twelve():
    """The first unit is fetched before its turn and not behind the last one, where there is one layer left for it."""
    plan = schedule(selection(12, 4, 1, 1, PART))
    assert plan.homes == (2,)
    assert [(fill.unit, fill.after, fill.layers) for fill in plan.fills] == [
        (1, 0, (4, 5, 6)),
        (2, 1, (8, 9, 10)),
        (0, None, (1, 2)),
    ]


def test_pieces_are_not_small():
    chosen = selection(12, 4, 1, 1, PART)
    for least, pieces in ((1 << 20, 4), (2 << 20, 2), (3 << 20, 1), (1 << 30, 1)):
        fill = schedule(chosen, least).fills[0]
        assert len(fill.layers) == pieces - 1
        assert fill.piece_bytes == (4 << 20) // pieces


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        ((12, 1, 1, 1, PART), 1),
        ((12, 1, 1, 1, WHOLE), 0),  # from the end of one layer to the begin of the next there are no experts
        ((12, 1, 1, 2, WHOLE), 11 / 12),  # but the last one's
        ((12, 4, 1, 1, WHOLE), 1),
        ((12, 1, 1, 12, PART), 0),
        ((12, 1, 1, 1, PART, "uva"), 0),
    ],
)
def test_what_crosses_beside_experts(arguments, share):
    chosen = selection(*arguments)
    total = sum(unit.nbytes for unit in chosen.units)
    assert bytes_beside_experts(chosen) == pytest.approx(share * total)
