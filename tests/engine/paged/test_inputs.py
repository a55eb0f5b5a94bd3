"""DecodeInputs: what a pass reads, and when it may be written."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.paged.inputs import DecodeInputs, Division
from greenroom.engine.paged.packing import Limits, pack_rows

LIMITS = Limits(block_size=4, num_blocks=20, max_sequences=8, max_tokens=8, max_context=16, vocabulary=100)
SCRATCH = 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def make(device="cpu") -> DecodeInputs:
    cache = SimpleNamespace(device=torch.device(device), scratch=SCRATCH, block_size=4)
    return DecodeInputs(cache, largest=8, width=4)


def packed(*ids, first=0):
    return pack_rows(
        [SequenceChunk([token], 5, [first + 2 * n, first + 2 * n + 1]) for n, token in enumerate(ids)], LIMITS
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("halves", [False, True])
def test_ids_may_come_last(device, halves) -> None:
    inputs = make(device)
    layout, division = inputs.lay_out(4), Division.of(3, halves)
    staged = inputs.fill(layout, packed(0, 0, 0), division)
    staged.set_ids(np.array([7, 8, 9]))
    inputs.send(staged)
    late = [tensor.tolist() for tensor in (layout.whole.ids, layout.whole.positions, layout.whole.batch.tables[:, :2])]
    inputs.send(inputs.fill(layout, packed(7, 8, 9), division))
    assert late == [t.tolist() for t in (layout.whole.ids, layout.whole.positions, layout.whole.batch.tables[:, :2])]
    assert late[0] == [7, 8, 9, 0]
    assert late[2] == [[0, 1], [2, 3], [4, 5], [SCRATCH, late[2][3][1]]]


def test_what_a_pass_may_still_be_copied_from_is_not_written() -> None:
    inputs = make()
    layout = inputs.lay_out(2)
    first = inputs.fill(layout, packed(1, 2), Division(2))
    inputs.send(first)
    before = first.twin.clone()
    for token in (3, 4):  # made ready, thrown away, made anew
        second = inputs.fill(layout, packed(token, token, first=6), Division(2))
        assert torch.equal(first.twin, before)
    assert layout.whole.ids.tolist() == [1, 2], "nothing is sent before it is asked for"
    inputs.send(second)
    assert layout.whole.ids.tolist() == [4, 4]


def test_a_twin_that_has_been_sent_is_not_sent_again() -> None:
    inputs = make()
    staged = inputs.fill(inputs.lay_out(1), packed(1), Division(1))
    inputs.send(staged)
    with pytest.raises(AssertionError):
        inputs.send(staged)
