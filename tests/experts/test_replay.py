"""The simulator: the same decisions as the running system, and never better than knowing the future."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.experts.admission import heaviest
from greenroom.experts.policies import make_policy
from greenroom.experts.replay import belady_hits, replay

EXPERTS = 5
traces = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=2, unique=True), min_size=1, max_size=9)


def as_steps(trace: list[list[int]]) -> list[list[np.ndarray]]:
    return [[np.array([step], dtype=np.int32)] for step in trace]


@settings(deadline=None)
@given(traces, st.integers(0, EXPERTS), st.sampled_from(["lru", "lfu", "lfru", "first-come"]))
def test_no_policy_beats_the_one_that_knows_the_future(trace, slots, policy):
    steps = as_steps(trace)
    result = replay(steps, EXPERTS, 1, slots, make_policy(policy), 2, EXPERTS)
    best = belady_hits(steps, slots)
    assert result.needed == best.needed == sum(len(step) for step in trace)
    assert result.hits <= best.hits
    assert 0 <= result.hit_rate <= 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True), max_size=5), st.integers(0, 3))
def test_belady_is_the_best_of_all_sequences_of_choices(trace, slots):
    def best(now: int, resident: frozenset[int]) -> int:
        if now == len(trace):
            return 0
        hit = len(resident & set(trace[now]))
        reachable = resident | set(trace[now])
        options = itertools.chain.from_iterable(itertools.combinations(reachable, n) for n in range(slots + 1))
        return hit + max(best(now + 1, frozenset(o)) for o in options)

    assert belady_hits(as_steps(trace), slots).hits == best(0, frozenset())


def test_a_recurring_expert_is_kept_by_frequency_and_lost_by_recency():
    trace = [[0]] * 6 + [[1], [2], [0], [3], [4], [0], [1], [2], [0]]
    lru = replay(as_steps(trace), EXPERTS, 1, 2, make_policy("lru"), 2, 2)
    lfu = replay(as_steps(trace), EXPERTS, 1, 2, make_policy("lfu"), 2, 2)
    assert lfu.hits > lru.hits


def test_an_empty_replay_has_no_hits():
    result = replay([], EXPERTS, 1, 2, make_policy("lru"), 2, 2)
    assert (result.hits, result.needed, result.hit_rate) == (0, 0, 0.0)
    assert belady_hits([], 2).needed == 0


@pytest.mark.parametrize(("k", "expected"), [(3, [[3, 1, 2]]), (1, [[1]]), (2, [[1, 2]]), (9, [[3, 1, 2]])])
def test_the_heaviest_choices_are_found_in_any_order(k, expected):
    ids, weights = np.array([[3, 1, 2]]), np.array([[0.1, 0.6, 0.3]])
    assert heaviest(ids, weights, k).tolist() == expected
