"""BlockPool against a model that searches lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from greenroom.kv.blocks import BlockPool

BLOCKS = 6
KEYS = [bytes([value]) for value in range(8)]


class SlowPool:
    """Blocks in one list, each a dict; the least recently used is found by looking at all."""

    def __init__(self) -> None:
        self.blocks = [{"refs": 0, "key": None, "since": -1} for _ in range(BLOCKS)]
        self.clock = 0

    def idle(self):
        return [index for index, block in enumerate(self.blocks) if not block["refs"]]

    def evicted_next(self, count):
        """The cached blocks that ``count`` new ones cost."""
        free = [index for index in self.idle() if self.blocks[index]["key"] is None]
        cached = [index for index in self.idle() if self.blocks[index]["key"] is not None]
        cached.sort(key=lambda index: self.blocks[index]["since"])
        return free, cached[: max(0, count - len(free))]

    def take(self, index):
        self.blocks[index].update(refs=1, key=None)

    def find(self, key):
        return next((index for index, block in enumerate(self.blocks) if block["key"] == key), None)

    def release(self, index):
        block = self.blocks[index]
        block["refs"] -= 1
        if not block["refs"]:
            self.clock += 1
            block["since"] = self.clock


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.slow = BlockPool(BLOCKS), SlowPool()
        self.owned: list[int] = []  # one entry a reference

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count):
        free, evicted = self.slow.evicted_next(count)
        idle = len(self.slow.idle())
        got = self.pool.allocate(count)
        if count > idle:
            assert got is None
            return
        assert got is not None
        assert len(set(got)) == count
        if count <= len(free):
            assert set(got) <= set(free)
        else:
            assert set(got) == set(free) | set(evicted)
        for block in got:
            assert not self.slow.blocks[block]["refs"], "a block with references was handed out"
            self.slow.take(block)
        self.owned += got

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def register(self, data, key):
        block = data.draw(st.sampled_from(self.owned))
        new = self.slow.find(key) is None and self.slow.blocks[block]["key"] is None
        assert self.pool.register(block, key) is new
        if new:
            self.slow.blocks[block]["key"] = key

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def find_and_acquire(self, keys):
        expected = []
        for key in keys:
            if self.slow.find(key) is None:
                break
            expected.append(self.slow.find(key))
        found = self.pool.lookup(keys)
        assert found == expected
        self.pool.acquire(found)
        for block in found:
            self.slow.blocks[block]["refs"] += 1
        self.owned += found

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data):
        order = data.draw(st.permutations(self.owned))
        given = order[: data.draw(st.integers(1, len(order)))]
        self.pool.release(given)
        for block in reversed(given):
            self.slow.release(block)
            self.owned.remove(block)

    @invariant()
    def same(self):
        self.pool.check()
        assert [self.pool.references(block) for block in range(BLOCKS)] == [b["refs"] for b in self.slow.blocks]
        assert self.pool.available == len(self.slow.idle())
        assert self.pool.used == BLOCKS - len(self.slow.idle())
        for key in KEYS:
            place = self.slow.find(key)
            assert self.pool.lookup([key]) == ([] if place is None else [place])


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_the_end_of_a_prefix_is_given_away_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, key in zip(blocks, KEYS, strict=False):
        pool.register(block, key)
    pool.release(blocks)
    pool.allocate(2)
    assert pool.lookup(KEYS) == blocks[:1]


def test_a_block_without_owner_is_neither_named_nor_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="no owner"):
        pool.register(0, KEYS[0])
    with pytest.raises(ValueError, match="no owner"):
        pool.release([0])
