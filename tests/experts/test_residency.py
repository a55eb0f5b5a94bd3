"""choose_swaps and dispatch against brute force."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.experts.dispatch import CostModel, LaneState, choose_ahead, choose_num_streamed, dispatch, mask_ids
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.residency import ABSENT, Swap, choose_swaps, most_wanted, within_limit

FMT = ExpertFormat(64, 32, torch.bfloat16, Activation(ActivationKind.SILU))


@st.composite
def states(draw):
    """Arguments of ``choose_swaps`` for some layers with as many experts and slots."""
    experts = draw(st.integers(1, 12))
    slots = draw(st.integers(0, experts))
    layers = [draw(layer_state(experts, slots)) for _ in range(draw(st.integers(1, 3)))]
    arrays = [np.stack(parts) for parts in zip(*layers, strict=True)]
    return *arrays, draw(st.integers(0, 4)), draw(st.sampled_from([1.0, 2.0]))


@st.composite
def layer_state(draw, experts: int, slots: int):
    resident = draw(st.permutations(range(experts)))[: draw(st.integers(0, slots))]
    places = draw(st.permutations(range(slots)))
    slot_of = np.full(experts, ABSENT, dtype=np.int32)
    slot_of[resident] = places[: len(resident)]
    free = np.zeros(slots, dtype=bool)
    free[list(places[len(resident) :][: draw(st.integers(0, slots))])] = True
    scores = np.array(draw(st.lists(st.integers(0, 4), min_size=experts, max_size=experts)), dtype=float)
    needed = np.array(draw(st.lists(st.booleans(), min_size=experts, max_size=experts)))
    candidates = needed & np.array(draw(st.lists(st.booleans(), min_size=experts, max_size=experts)))
    return scores, slot_of, free, needed, candidates


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 9)), max_size=8), st.integers(-2, 9))
def test_the_most_wanted_swaps_gain_most(entries, room):
    swaps = [(layer, Swap(n, n, ABSENT if fills else 1, float(gain))) for n, (layer, fills, gain) in enumerate(entries)]
    chosen = most_wanted(swaps, room)
    left = [swap for swap in swaps if swap not in chosen]
    assert len(chosen) == min(max(room, 0), len(swaps))
    for _, taken in chosen:
        for _, other in left:
            assert (taken.victim == ABSENT, taken.gain) >= (other.victim == ABSENT, other.gain)


@given(states())
def test_a_swap_says_what_it_gains(state):
    scores = state[0]
    for layer, swap in choose_swaps(*state):
        assert swap.gain == scores[layer, swap.expert] - (0 if swap.victim == ABSENT else scores[layer, swap.victim])


@given(states())
def test_swaps_are_the_greedy_best_of_each_layer(state):
    *arrays, limit, margin = state
    swaps = choose_swaps(*state)
    assert [layer for layer, _ in swaps] == sorted(layer for layer, _ in swaps)
    for number, layer in enumerate(zip(*arrays, strict=True)):
        check_layer(*layer, [swap for at, swap in swaps if at == number], limit, margin)


def check_layer(scores, slot_of, free, needed, candidates, swaps, limit, margin):
    left = [e for e in range(len(scores)) if candidates[e] and slot_of[e] == ABSENT]
    victims = {e: slot_of[e] for e in range(len(scores)) if slot_of[e] != ABSENT and not needed[e]}
    free = np.flatnonzero(free).tolist()
    for swap in swaps:
        best = max(left, key=lambda e: (scores[e], -e))
        assert swap.expert == best
        left.remove(best)
        if swap.victim == ABSENT:
            assert swap.slot == free.pop(0)
        else:
            assert not free
            worst = min(victims, key=lambda e: (scores[e], e))
            assert (swap.victim, swap.slot) == (worst, victims.pop(worst))
            assert scores[swap.expert] > margin * scores[swap.victim]
    replaced = sum(swap.victim != ABSENT for swap in swaps)
    assert replaced <= limit
    if left and not free and replaced < limit and victims:
        assert max(scores[e] for e in left) <= margin * min(scores[e] for e in victims)
    assert not (left and free), "a free slot stayed empty though somebody wanted it"


rates = st.sampled_from([0.0, 1e3, 3e4, 1e6, 1e9])


lane_states = st.builds(
    LaneState,
    copy_busy_s=st.sampled_from([0.0, 1e-6, 1.0]),
    cpu_result_s=st.sampled_from([0.0, 1e-6, 1.0]),
    copy_pace=st.sampled_from([1.0, 3.0]),
    cpu_pace=st.sampled_from([1.0, 0.5, 8.0]),
)


@given(st.lists(st.integers(1, 500), max_size=9), rates, rates, st.sampled_from([1e3, 1e7, 1e12]), lane_states)
def test_split_is_no_worse_than_any_subset(pairs, copy_rate, cpu_rate, flops_rate, lanes):
    if copy_rate == 0 and cpu_rate == 0:
        return
    costs = CostModel(copy_rate, cpu_rate, flops_rate)
    pairs = np.array(sorted(pairs, reverse=True), dtype=np.int64)
    chosen = choose_num_streamed(pairs, costs, FMT, lanes)

    def ends(streamed: set[int]) -> float:
        copy = lanes.copy_pace * sum(FMT.block_bytes / copy_rate if copy_rate else float("inf") for _ in streamed)
        cpu = lanes.cpu_pace * sum(
            max(FMT.block_bytes / cpu_rate, int(n) * FMT.flops(1) / flops_rate) if cpu_rate else float("inf")
            for i, n in enumerate(pairs)
            if i not in streamed
        )
        if len(streamed) < len(pairs):
            cpu += lanes.cpu_result_s
        return max(lanes.copy_busy_s + copy, cpu)

    subsets = (set(s) for n in range(len(pairs) + 1) for s in itertools.combinations(range(len(pairs)), n))
    assert ends(set(range(chosen))) <= min(map(ends, subsets)) * (1 + 1e-9)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
    st.integers(1, 5),
    st.sampled_from([CostModel(0, 1e9, 1e9), CostModel(1e9, 0, 0), CostModel(1e6, 1e6, 1e7)]),
    st.randoms(use_true_random=False),
)
def test_every_expert_with_tokens_gets_exactly_one_lane(counts, group, costs, random):
    counts = np.array(counts)
    slot_of = np.array([random.choice([ABSENT, slot]) for slot in range(len(counts))])
    ids = random.sample(range(len(counts)), random.randint(0, len(counts)))
    ahead = tuple(np.array(ids[start : start + group]) for start in range(0, len(ids), group))
    plan = dispatch(counts, slot_of, costs, FMT, group, LaneState(ahead))
    everywhere = np.concatenate([plan.resident, plan.cpu, *plan.streamed])
    assert sorted(everywhere) == [e for e in range(len(counts)) if counts[e]]
    assert all(slot_of[e] != ABSENT for e in plan.resident)
    assert all(slot_of[e] == ABSENT for e in (*plan.cpu, *itertools.chain(*plan.streamed)))
    assert all(0 < len(g) <= group for g in plan.streamed)
    assert list(plan.cpu) == sorted(plan.cpu)
    if costs.cpu_bytes_per_s == 0:
        assert len(plan.cpu) == 0
    assert all(e not in ids for e in plan.cpu), "copied ahead, and then computed on the CPU"
    if costs.copy_bytes_per_s == 0:
        assert all(e in ids for e in itertools.chain(*plan.streamed))


def test_the_experts_with_most_pairs_are_streamed():
    counts = np.array([1, 100, 2, 50])
    costs = CostModel(FMT.block_bytes, 10 * FMT.block_bytes, FMT.flops(10))
    plan = dispatch(counts, np.full(4, ABSENT), costs, FMT, 8)
    assert [list(g) for g in plan.streamed] == [[1, 3]]
    assert list(plan.cpu) == [0, 2]


def test_groups_copied_ahead_stay_together_and_come_first():
    counts = np.array([1, 100, 2, 50, 0, 7])
    lanes = LaneState(ahead=(np.array([2, 4]), np.array([4]), np.array([0])))
    plan = dispatch(counts, np.full(6, ABSENT), CostModel(1, 0, 0), FMT, 2, lanes)
    assert [list(g) for g in plan.streamed] == [[2], [0], [1, 3], [5]]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 3)), min_size=1, max_size=16),
    st.integers(0, 16),
    st.integers(1, 16),
)
def test_copies_ahead_are_absent_experts_and_only_if_nearly_all_are_needed(experts, num_streamed, capacity):
    counts, resident, popularity = (np.array(column) for column in zip(*experts, strict=True))
    slot_of = np.where(resident, 0, ABSENT)
    chosen = choose_ahead(counts, num_streamed, slot_of, popularity, capacity)
    if (counts > 0).sum() < 0.9 * len(counts):
        assert len(chosen) == 0
        return
    absent = [e for e in range(len(counts)) if not resident[e]]
    best_first = sorted(absent, key=lambda e: (-popularity[e], e))
    assert list(chosen) == best_first[: min(num_streamed, capacity)]


def test_an_empty_batch_needs_nothing():
    plan = dispatch(np.zeros(4, dtype=int), np.full(4, ABSENT), CostModel(1, 1, 1), FMT, 2)
    assert len(plan.resident) == len(plan.cpu) == len(plan.streamed) == 0


def test_a_cost_model_needs_an_open_lane():
    with pytest.raises(ValueError, match="lane"):
        CostModel(0, 0, 1)


def test_masked_ids_keep_only_the_chosen_experts():
    ids = np.array([[0, 1, 5], [-1, 3, 9]], dtype=np.int32)
    assert mask_ids(ids, np.array([1, 3]), 6).tolist() == [[-1, 1, -1], [-1, 3, -1]]


def test_no_layer_loses_more_than_the_limit():
    swaps = [(0, Swap(1, 0, 5)), (0, Swap(2, 1, 6)), (0, Swap(3, 2, ABSENT)), (1, Swap(1, 0, 4)), (2, Swap(1, 1, 4))]
    assert within_limit(swaps, [], 2) == swaps
    assert within_limit(swaps, [0], 2) == [swaps[0], *swaps[2:]]
    assert within_limit(swaps, [0, 1, 1, 2], 2) == [swaps[0], swaps[2], swaps[4]]
    assert within_limit(swaps, [0, 0], 0) == [swaps[2]]
