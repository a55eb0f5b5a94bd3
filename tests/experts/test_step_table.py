"""What the device reads before a step, against what the host said last."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.experts.landing import Offers, list_slots
from greenroom.experts.residency import ABSENT
from greenroom.experts.step_table import StepOrder, StepTable

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
EXPERTS = [5, 9]


def random_offers(random: np.random.Generator, places: int) -> Offers:
    appeal = np.stack([random.permutation(max(EXPERTS)) for _ in EXPERTS]).astype(np.int32)
    told = random.integers(-1, 5, (len(EXPERTS), places, 3)).astype(np.int32)
    return Offers(appeal, told, list_slots(told))


def random_map(random: np.random.Generator) -> np.ndarray:
    return random.integers(-1, 9, (len(EXPERTS), max(EXPERTS))).astype(np.int32)


def contents(table: StepTable) -> list[list[int]]:
    return [part.tolist() for part in (table.step, table.stream_parts, table.places, table.appeal, table.slot_of)]


def check(table: StepTable, order: StepOrder, places: int) -> None:
    """The device has been told ``order``."""
    assert table.step[:3].tolist() == [order.rows, order.number, order.unsettled]
    assert table.stream_parts.tolist() == order.stream_parts.tolist()
    assert (table.slot_of.cpu().numpy()[:, : max(EXPERTS)] == order.slot_of).all()
    assert (table.slot_of[:, max(EXPERTS) :] == ABSENT).all()
    if order.offers is None:
        assert (table.places.cpu() == ABSENT).all()
    else:
        assert (table.appeal.cpu().numpy()[:, : max(EXPERTS)] == order.offers.appeal).all()
        assert (table.places.cpu().numpy()[:, :, :3] == order.offers.places[:, :places]).all()


FEW = st.integers(0, 2)
STEPS = st.lists(st.tuples(FEW, FEW, FEW, FEW, FEW, st.booleans(), st.integers(0, 3)), max_size=12)


@given(st.integers(0, 3), STEPS)
def test_any_order_of_steps(places, steps):
    """Few values, so that they stay the same at times. Prepared is nothing, what is published then, or something
    else."""
    random = np.random.default_rng(len(steps))
    splits = [random.integers(0, 99, max(EXPERTS) + 1).astype(np.int32) for _ in range(3)]
    maps = [random_map(random) for _ in range(3)]
    table = StepTable(EXPERTS, places, DEVICE)
    for rows, split, which, number, unsettled, offering, prepared in steps:
        offers = random_offers(random, places + 1) if offering else None
        before = contents(table)
        if prepared == 1:
            table.prepare(splits[split], offers)
        elif prepared > 1:
            table.prepare(splits[-1], random_offers(random, places + 1) if prepared == 2 else None)
        assert before == contents(table)
        order = StepOrder(rows, splits[split], maps[which], offers, number, unsettled)
        table.publish(order)
        check(table, order, places)


@pytest.mark.parametrize("places", [0, 1, 3])
def test_nothing_is_offered_at_first_and_layers_are_aligned(places):
    table = StepTable(EXPERTS, places, DEVICE)
    assert table.appeal.cpu()[:, :9].tolist() == [[4, 3, 2, 1, 0] + [-1] * 4, list(range(8, -1, -1))]
    assert (table.slot_of == ABSENT).all()
    assert table.step.tolist() == [0] * 4
    assert not table.stream_parts.any()
    assert table.places.shape == (2, places, 4)
    assert (table.places.cpu() == ABSENT).all()
    for layer in range(len(EXPERTS)):
        for part in (table.appeal, table.places, table.slot_of):
            assert part[layer].data_ptr() % 16 == 0
    assert table.step.data_ptr() % 16 == 0


def test_what_the_device_knows_is_not_copied_again(monkeypatch):
    table = StepTable(EXPERTS, 2, torch.device("cpu"))
    random = np.random.default_rng(0)
    order = StepOrder(1, np.zeros(max(EXPERTS) + 1, dtype=np.int32), random_map(random), random_offers(random, 2), 1)
    table.publish(order)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *args, **options: pytest.fail("copied"))
    table.publish(replace(order))


@pytest.mark.parametrize("open_steps", [1, 2])
def test_a_copy_that_is_still_to_be_made_is_not_written_over(monkeypatch, open_steps):
    """The device copies when the step before has ended: so the host may be one copy ahead when it begins a step, if
    that one is still open."""
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
    offers = random_offers(random, 2)
    orders = []

    def make_copies(leave):
        while len(late) > leave:
            real(*late.pop(0))
            check(table, orders.pop(0), 2)

    for number in range(12):
        orders.append(StepOrder(1, parts, random_map(random), offers, number + 1))
        table.publish(orders[-1])
        make_copies(leave=1)  # the step before has ended
        if number % 3 < 2:
            offers = random_offers(random, 2)
            table.prepare(parts, offers)
        if number % 4 == 3:
            offers = None
        make_copies(leave=open_steps - 1)
