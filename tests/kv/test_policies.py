"""Eviction policies against plain transcriptions, and with blocks that are held."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.kv.eviction import EvictionPolicy
from greenroom.kv.policies import POLICIES, ArcPolicy, LruPolicy
from greenroom.kv.prefix import START
from tests.reference.arc import PaperArc


def request(policy: EvictionPolicy, key: bytes) -> None:
    """A use of one block that is over at once."""
    resident = policy.resident()
    if key in resident:
        policy.hold(key)
    else:
        victim = policy.admit(key, START, full=len(resident) == policy.capacity)
        assert (victim is not None) == (len(resident) == policy.capacity)
        assert policy.resident() == (resident | {key}) - {victim}
    policy.release(key)
    policy.check()


KEYS = st.integers(0, 11).map(lambda number: bytes([number]))


@given(st.integers(1, 5), st.lists(KEYS, max_size=80))
def test_arc_is_the_papers(capacity: int, keys: list[bytes]) -> None:
    policy, paper = ArcPolicy(capacity), PaperArc(capacity)
    for key in keys:
        request(policy, key)
        paper.request(key)
        assert_same(policy, paper)


@pytest.mark.parametrize("capacity", [7, 20])
def test_arc_is_the_papers_on_a_long_trace(capacity: int) -> None:
    """A loop, a scan and skewed requests in turn: the target moves both ways."""
    rng = np.random.default_rng(0)
    policy, paper = ArcPolicy(capacity), PaperArc(capacity)
    targets = set()
    for start in range(0, 6000, 100):
        loop = [number % (capacity + 2) for number in range(100)]
        numbers = [rng.zipf(1.4, 100) % 60, loop, range(1000 + start, 1100 + start)][start // 100 % 3]
        for number in numbers:
            key = int(number).to_bytes(2)
            request(policy, key)
            paper.request(key)
            assert_same(policy, paper)
            targets.add(policy.target)
    assert min(targets) == 0
    assert max(targets) > capacity / 4


def assert_same(policy: ArcPolicy, paper: PaperArc) -> None:
    assert policy.target == paper.p
    assert [*policy._recent.order] == paper.t1
    assert [*policy._frequent.order] == paper.t2
    assert [*policy._recent_ghosts] == paper.b1
    assert [*policy._frequent_ghosts] == paper.b2


@given(st.integers(1, 5), st.lists(KEYS, max_size=60))
def test_lru_is_a_list(capacity: int, keys: list[bytes]) -> None:
    policy = LruPolicy(capacity)
    order: list[bytes] = []
    for key in keys:
        request(policy, key)
        order = [*[other for other in order if other != key][-capacity:], key]
        order = order[-capacity:]
        assert [*policy._blocks.order] == order


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_held_blocks_stay_and_those_that_others_follow(name: str, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 5))
    policy = POLICIES[name](capacity)
    held: set[bytes] = set()
    after: dict[bytes, bytes] = {}  # of resident ones
    released: dict[bytes, int] = {}
    for now in range(data.draw(st.integers(0, 40))):
        key = data.draw(KEYS)
        before = policy.resident()
        if key in held and data.draw(st.booleans()):
            held.remove(key)
            if data.draw(st.booleans()):
                policy.release(key)
                released[key] = now
            else:
                policy.drop(key)
                assert policy.resident() == before - {key}
                del after[key]
        elif key in before:
            policy.hold(key)
            held.add(key)
        else:
            previous = data.draw(st.sampled_from([START, *(bytes([number]) for number in range(key[0]))]))
            may_leave = before - held - {previous} - set(after.values())
            assert policy.can_evict(previous) == bool(may_leave)
            if len(before) == capacity and not may_leave:
                continue
            victim = policy.admit(key, previous, full=len(before) == capacity)
            after[key] = previous
            assert (victim is not None) == (len(before) == capacity)
            if victim is not None:
                assert victim in may_leave
                if name == "lru":
                    assert victim == min(may_leave, key=released.__getitem__)
                del after[victim]
            held.add(key)
        policy.check()
        assert policy.resident() == after.keys()
        assert held <= policy.resident()
        assert policy.idle == len(policy.resident()) - len(held)


def test_arc_keeps_what_is_used_again_through_a_scan() -> None:
    """What LRU cannot do."""
    survivors = {}
    for name, make in POLICIES.items():
        policy = make(10)
        for key in [*range(5), *range(5), *range(100, 200)]:
            request(policy, bytes([key]))
        survivors[name] = policy.resident() & {bytes([key]) for key in range(5)}
    assert len(survivors["arc"]) == 5
    assert not survivors["lru"]


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_that_are_no_longer_followed_are_as_old_as_before(name: str) -> None:
    policy = POLICIES[name](5)
    for key, after in ((b"a", START), (b"b", START), (b"x", b"a"), (b"y", b"b")):
        policy.admit(key, after, full=False)
    policy.release(b"a")
    policy.release(b"b")
    assert not policy.can_evict(START)  # both are passed over, as others follow them
    policy.drop(b"x")
    policy.drop(b"y")
    policy.check()
    for key in (b"p", b"q", b"r"):
        policy.admit(key, START, full=False)
    assert [policy.admit(key, START, full=True) for key in (b"s", b"t")] == [b"a", b"b"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_does_not_leave_for_the_one_that_follows_it(name: str) -> None:
    policy = POLICIES[name](2)
    for key in (b"a", b"b"):
        policy.admit(key, START, full=False)
        policy.release(key)
    assert policy.admit(b"x", b"a", full=True) == b"b"
    policy.check()
    assert not policy.can_evict(START)
