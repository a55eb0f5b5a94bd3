"""The whole core on the host tier, against the slow model and float64."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experts.driver import ALL_ON_CPU, ALL_STREAMED, BOTH_LANES, FMT, Driver

POLICIES = ["lru", "lfu", "lfru", "first-come"]

operations = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4)),
        st.tuples(st.just("padded"), st.sampled_from([1, 2, 4]), st.integers(1, 4)),
        st.tuples(st.just("finish"), st.integers(0, 5), st.just(0)),
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    experts=st.integers(1, 9),
    slots=st.integers(0, 9),
    policy=st.sampled_from(POLICIES),
    cache_topk=st.integers(1, 4),
    limit=st.integers(0, 3),
    costs=st.sampled_from([ALL_ON_CPU, ALL_STREAMED, BOTH_LANES]),
    group=st.integers(1, 4),
    operations=operations,
    seed=st.integers(0, 2**16),
)
def test_random_operations(experts, slots, policy, cache_topk, limit, costs, group, operations, seed):
    driver = Driver(
        experts,
        min(slots, experts),
        policy=policy,
        cache_topk=cache_topk,
        limit=limit,
        costs=costs,
        group=group,
        seed=seed,
    )
    for kind, count, top_k in operations:
        match kind:
            case "step":
                driver.step(count, top_k)
            case "padded":
                driver.step(2 * count, top_k, padding=count)
            case "finish":
                driver.finish_writes(count)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [0, 1, 3, 8])
def test_long_runs(policy, slots):
    driver = Driver(8, slots, policy=policy)
    for number in range(60):
        driver.step(1 if number % 10 else 16, 3)
        driver.finish_writes(number % 3)


def test_a_cache_of_all_experts_never_misses():
    driver = Driver(6, 6)
    for _ in range(5):
        driver.step(4, 3)
    assert driver.manager.counters.total().misses == 0
    assert driver.manager.counters.total().hits > 0


def test_warm_up_leaves_no_trace():
    driver = Driver(6, 2)
    with driver.manager.warm_up(), driver.manager.step():
        driver._run_layer(0, [[0, 1], [2, 3]])
    assert driver.manager.counters.total().to_dict() == dict.fromkeys(driver.manager.counters.total().to_dict(), 0)
    assert driver.manager.admission.usage.total.sum() == 0
    driver.check()


def test_padding_is_computed_but_admits_nothing():
    driver = Driver(6, 2)
    with driver.manager.step(np.array([True, False])):
        driver._run_layer(0, [[0, 1], [4, 5]])
    assert {w.expert for w in driver.tier.flying} == {0, 1}
    assert driver.manager.counters.layers()[0].misses == 4


def test_prefill_does_not_wipe_out_the_decode_set():
    driver = Driver(8, 3, layers=1, policy="lfru", cache_topk=3, limit=2)
    for _ in range(10):
        with driver.manager.step():
            driver._run_layer(0, [[0, 1, 2]])
        driver.tier.finish(9)
    with driver.manager.step():
        driver._run_layer(0, [[3 + n % 5, 3 + (n + 1) % 5] for n in range(64)])
    assert len(driver.tier.flying) == 0, "one prefill beat experts that ten steps of decode had used"


def test_copies_under_way_hold_back_new_ones(monkeypatch):
    monkeypatch.setattr("greenroom.experts.manager._WRITE_BYTES", 3 * FMT.block_bytes)
    driver = Driver(8, 6, layers=2, cache_topk=8)
    manager, tier = driver.manager, driver.tier
    for _ in range(3):
        with manager.step():
            for layer in range(2):
                driver._run_layer(layer, [[0, 1, 2, 3]])
        manager.check_invariants()
        assert len(tier.flying) == 3, "no more start until some have landed"
    tier.finish(2)
    with manager.step():
        for layer in range(2):
            driver._run_layer(layer, [[0, 1, 2, 3]])
    assert len(tier.flying) == 3
    assert manager.counters.total().admissions == 5


def test_sentinels_of_other_ranks_are_skipped():
    driver = Driver(6, 2)
    with driver.manager.step():
        driver._run_layer(0, [[0, 6], [7, 1], [-1, 99]])
    assert driver.manager.counters.layers()[0].misses == 2


@pytest.mark.parametrize("tokens", [0, 3])
def test_empty_batches(tokens):
    driver = Driver(4, 2)
    with driver.manager.step():
        out = driver.manager.layers[0].forward(
            torch.randn(tokens, FMT.hidden), torch.zeros(tokens, 0, dtype=torch.int64), torch.zeros(tokens, 0)
        )
    assert out.shape == (tokens, FMT.hidden)
    assert not out.any()


def test_an_error_in_a_step_changes_nothing_and_the_next_step_runs():
    driver = Driver(6, 2)
    driver.step(2, 2)
    before = driver.manager.admission.usage.total.copy()

    def broken(*_args: object, **_named: object) -> None:
        raise MemoryError

    run, driver.engine.run = driver.engine.run, broken
    with pytest.raises(MemoryError), driver.manager.step():
        driver._run_layer(0, [[5, 4]])
    driver.engine.run = run
    driver.manager.check_invariants()
    with driver.manager.step():
        driver._run_layer(0, [[0, 1]])
    assert (driver.manager.admission.usage.total >= before).all()


def test_experts_outside_a_step_and_steps_inside_a_step_are_refused():
    driver = Driver(4, 1)
    with pytest.raises(RuntimeError, match="outside a step"):
        driver._run_layer(0, [[0]])
    with driver.manager.step(), pytest.raises(RuntimeError, match="running already"):
        driver.manager.begin_step()
    errors: list[BaseException] = []

    def other_thread() -> None:
        try:
            driver.manager.begin_step()
        except RuntimeError as error:
            errors.append(error)

    with driver.manager.step():
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_a_step_that_cannot_begin_does_not_block_the_next():
    driver = Driver(4, 1)
    real, driver.tier.begin_step = driver.tier.begin_step, lambda slot_of: 1 / 0
    with pytest.raises(ZeroDivisionError):
        driver.manager.begin_step()
    driver.tier.begin_step = real
    driver.step(1, 1)


def test_close_is_idempotent():
    driver = Driver(4, 2)
    driver.step(1, 1)
    driver.manager.close()
    driver.manager.close()
    assert len(driver.store) == 0
