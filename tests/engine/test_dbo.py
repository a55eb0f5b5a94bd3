"""Whether halves win: the choice, on a clock that the tests wind."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.engine.dbo import DboTrial, check_dbo
from greenroom.errors import ConfigError


def decide(seconds: Callable[[int, bool], float], most: int = 200) -> tuple[DboTrial, list[bool]]:
    """Runs steps, each of which takes ``seconds(its number, whether halves)``, until one way has won."""
    trial, ways = DboTrial(16), []
    for step in range(most):
        ways.append(trial.halves)
        if trial.took(seconds(step, ways[-1])):
            return trial, ways
    raise AssertionError("nothing was decided")


@given(st.floats(1e-4, 1e-1), st.one_of(st.floats(0.5, 0.9899), st.floats(0.9901, 2.0)))
def test_the_faster_way_wins(whole, factor):
    trial, ways = decide(lambda _, halves: whole * factor if halves else whole)
    choice = trial.choice
    assert choice.halves == (factor < 0.99)
    assert choice.whole_ms == pytest.approx(whole * 1e3)
    assert choice.halves_ms == pytest.approx(whole * factor * 1e3)
    assert choice.rows == 16
    assert ways.count(True) == ways.count(False)
    assert trial.halves == choice.halves


def test_a_clear_case_costs_sixteen_steps_and_a_close_one_sixty_four():
    assert len(decide(lambda _, halves: 1.5 if halves else 1.0)[1]) == 16
    assert len(decide(lambda _, halves: 1.0 if halves else 1.5)[1]) == 16
    assert len(decide(lambda _, halves: 1.05 if halves else 1.0)[1]) == 64


@pytest.mark.parametrize("drift", [-0.004, 0.004, 0.02])
def test_steps_that_grow_longer_or_shorter_favour_nobody(drift):
    """Contexts grow, caches fill: what changes from step to step is no merit of either way."""
    for gain, halves in ((0.95, True), (1.05, False)):
        trial, _ = decide(lambda step, way, gain=gain: (1 + drift * step) * (gain if way else 1.0))
        assert trial.choice.halves == halves


def test_single_slow_steps_do_not_decide():
    rng = random.Random(0)
    slow = {step for step in range(64) if rng.random() < 0.2}
    trial, _ = decide(lambda step, way: (0.9 if way else 1.0) * (50 if step in slow else 1))
    assert trial.choice.halves


def test_a_gain_that_is_not_worth_its_memory_is_left():
    assert decide(lambda _, halves: 0.995 if halves else 1.0)[0].choice.halves is False


def test_what_is_decided_stays():
    trial, _ = decide(lambda _, halves: 0.5 if halves else 1.0)
    for _ in range(300):
        assert trial.halves
        assert not trial.took(9.0)
    assert trial.choice.halves_ms == pytest.approx(500)


def test_nothing_is_claimed_before():
    trial = DboTrial(8)
    assert trial.choice.to_dict() == {
        "rows": 8,
        "halves": None,
        "because": "being measured",
        "whole_ms": None,
        "halves_ms": None,
    }


def test_unknown_modes_are_refused():
    for mode in ("auto", "on", "off"):
        check_dbo(mode)
    with pytest.raises(ConfigError, match="dbo is auto, on or off, not 'ON'"):
        check_dbo("ON")
