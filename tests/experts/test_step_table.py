"""What the device reads before a step, against what the host said last."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.experts.landing import Offers, list_slots
from greenroom.experts.residency import ABSENT
from greenroom.experts.step_table import StepTable

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
EXPERTS = [5, 9]


def random_offers(random: np.random.Generator, places: int) -> Offers:
    appeal = np.stack([random.permutation(max(EXPERTS)) for _ in EXPERTS]).astype(np.int32)
    told = random.integers(-1, 5, (len(EXPERTS), places, 3)).astype(np.int32)
    return Offers(appeal, told, list_slots(told))


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(0, 3)), max_size=12)


@given(st.integers(0, 3), STEPS)
def test_any_order_of_steps(places, steps):
    """Few splits and numbers of rows, so that they stay the same at times. Prepared is nothing, what is published then,
    or something else."""
    random = np.random.default_rng(len(steps))
    splits = [random.integers(0, 99, max(EXPERTS) + 1).astype(np.int32) for _ in range(3)]
    table = StepTable(EXPERTS, places, DEVICE)
    for rows, split, offering, prepared in steps:
        offers = random_offers(random, places + 1) if offering else None
        before = [part.tolist() for part in (table.rows, table.stream_parts, table.places, table.appeal)]
        if prepared == 1:
            table.prepare(rows, splits[split], offers)
        elif prepared > 1:
            table.prepare(rows + prepared - 2, splits[-1], random_offers(random, places + 1) if prepared == 2 else None)
        assert before == [part.tolist() for part in (table.rows, table.stream_parts, table.places, table.appeal)]
        table.publish(rows, splits[split], offers)
        assert table.rows.tolist() == [rows]
        assert table.stream_parts.tolist() == splits[split].tolist()
        if offers is None:
            assert (table.places.cpu() == ABSENT).all()
        else:
            assert (table.appeal.cpu().numpy()[:, : max(EXPERTS)] == offers.appeal).all()
            assert (table.places.cpu().numpy()[:, :, :3] == offers.places[:, :places]).all()


@pytest.mark.parametrize("places", [0, 1, 3])
def test_nothing_is_offered_at_first_and_layers_are_aligned(places):
    table = StepTable(EXPERTS, places, DEVICE)
    assert table.appeal.cpu()[:, :9].tolist() == [[4, 3, 2, 1, 0] + [-1] * 4, list(range(8, -1, -1))]
    assert table.rows.tolist() == [0]
    assert not table.stream_parts.any()
    assert table.places.shape == (2, places, 4)
    assert (table.places.cpu() == ABSENT).all()
    for layer in range(len(EXPERTS)):
        assert table.appeal[layer].data_ptr() % 16 == table.places[layer].data_ptr() % 16 == 0
    assert table.rows.data_ptr() % 16 == 0


def test_a_copy_that_is_still_to_be_made_is_not_written_over(monkeypatch):
    """The device copies when the step before has ended, or earlier: so at the latest when the host begins the next."""
    late = []
    real = torch.Tensor.copy_

    def copy(self, source, non_blocking=False):
        if not non_blocking:
            return real(self, source)
        late.append((self, source))
        return self

    random = np.random.default_rng(0)
    table = StepTable(EXPERTS, 2, torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    parts = np.zeros(max(EXPERTS) + 1, dtype=np.int32)
    running = offers = random_offers(random, 2)
    for number in range(12):
        table.publish(1, parts, offers)
        running = offers
        if number % 3 < 2:
            # While the step runs, and its copy may not have been made.
            offers = random_offers(random, 2)
            table.prepare(1, parts, offers)
        if number % 4 == 3:
            offers = None
        while late:
            real(*late.pop())
        if running is None:
            assert (table.places == ABSENT).all()
        else:
            assert (table.places.numpy()[:, :, :3] == running.places).all()
            assert (table.appeal.numpy()[:, : max(EXPERTS)] == running.appeal).all()
