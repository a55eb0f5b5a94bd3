"""Scores against their definitions, and policies from elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.errors import ConfigError
from greenroom.experts import policies
from greenroom.experts.policies import make_policy, policy_names
from greenroom.experts.usage import DECAY, ExpertUsage

EXPERTS = 5
histories = st.lists(st.sets(st.integers(0, EXPERTS - 1)), max_size=20)


def recorded(history: list[set[int]]) -> ExpertUsage:
    usage = ExpertUsage(1, EXPERTS)
    for number, step in enumerate(history):
        if number:
            usage.advance()
        usage.record(0, np.array([1.0 if e in step else 0.0 for e in range(EXPERTS)]))
    return usage


@given(histories)
def test_scores_follow_their_definitions(history):
    usage = recorded(history)
    now = max(len(history) - 1, 0)
    for expert in range(EXPERTS):
        steps = [s for s, step in enumerate(history) if expert in step]
        last = max(steps, default=-1)
        assert make_policy("lru").scores(usage)[0, expert] == last
        assert make_policy("lfu").scores(usage)[0, expert] == len(steps)
        frequency = sum(DECAY ** (now - s) for s in steps)
        assert make_policy("lfru").scores(usage)[0, expert] == pytest.approx(frequency / (1 + now - last))
        assert make_policy("first-come").scores(usage)[0, expert] == 0


def test_a_prefill_weighs_no_more_than_a_token():
    usage = ExpertUsage(1, EXPERTS)
    usage.record(0, np.array([1.0, 0.5, 0.0, 0.0, 0.0]))
    assert usage.frequency[0].tolist() == [1.0, 0.5, 0, 0, 0]
    assert usage.last_used[0].tolist() == [0, 0, -1, -1, -1]


def test_static_needs_a_profile():
    with pytest.raises(ConfigError, match=r"give one \(--profile FILE.npy\)"):
        make_policy("static")


def test_a_static_profile_is_the_score(tmp_path):
    profile = np.arange(10.0).reshape(2, 5)
    np.save(tmp_path / "profile.npy", profile)
    policy = make_policy("static", tmp_path / "profile.npy")
    assert (policy.scores(ExpertUsage(2, 5)) == profile).all()
    with pytest.raises(ConfigError, match="2 layers of 5 experts, the model has 3 of 5"):
        policy.scores(ExpertUsage(3, 5))


@pytest.mark.parametrize("content", [b"", b"no array", None])
def test_a_bad_profile_is_one_sentence(tmp_path, content):
    path = tmp_path / "profile.npy"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read the profile"):
        make_policy("static", path)


@pytest.mark.parametrize("array", [np.zeros(3), np.full((2, 2), np.nan), np.array([["a"]])])
def test_a_profile_of_the_wrong_kind_is_refused(tmp_path, array):
    np.save(tmp_path / "p.npy", array)
    with pytest.raises(ConfigError, match="one finite number"):
        make_policy("static", tmp_path / "p.npy")


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(ConfigError, match="unknown policy 'best'; choose one of first-come, lfru, lfu, lru, static"):
        make_policy("best")
    with pytest.raises(ConfigError, match="only serves the static policy"):
        make_policy("lru", "somewhere.npy")


def test_policies_of_other_packages_are_found(monkeypatch):
    class Mine:
        margin = 1.0

        def scores(self, usage):
            return -usage.total

    class Entry:
        name = "mine"

        def load(self):
            return Mine

    class Entries(list):
        names = ("mine",)

    monkeypatch.setattr(policies, "entry_points", lambda group: Entries([Entry()]))
    assert isinstance(make_policy("mine"), Mine)
    assert "mine" in policy_names()
