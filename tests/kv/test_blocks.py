"""BlockPool against a model that searches lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from greenroom.kv.blocks import BlockPool

BLOCKS = 6
SIZE = 3
# A tree of prefixes: the tokens up to the end of a block are its key here.
FULL = [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
PREFIXES = [(), (0, 0, 0), (0, 1, 1)]
PARTS = st.lists(st.integers(0, 1), min_size=1, max_size=SIZE).map(tuple)


def key_of(after, tokens) -> bytes:
    return bytes([*after, *tokens])


KEYS = [key_of(after, tokens) for after in PREFIXES for tokens in FULL]


class SlowPool:
    """Blocks in one list, each a dict; the least recently used is found by looking at all."""

    def __init__(self) -> None:
        # held: what a registered block begins with, and behind what
        self.blocks = [{"refs": 0, "key": None, "held": None, "since": -1} for _ in range(BLOCKS)]
        self.clock = 0

    def idle(self):
        return [index for index, block in enumerate(self.blocks) if not block["refs"]]

    def evicted_next(self, count):
        """The cached blocks that ``count`` new ones cost."""
        free = [index for index in self.idle() if self.blocks[index]["held"] is None]
        cached = [index for index in self.idle() if self.blocks[index]["held"] is not None]
        cached.sort(key=lambda index: self.blocks[index]["since"])
        return free, cached[: max(0, count - len(free))]

    def take(self, index):
        self.blocks[index].update(refs=1, key=None, held=None)

    def most(self, after, tokens):
        """How many of the tokens any block begins with, behind the prefix."""
        counts = [0]
        for block in self.blocks:
            if block["held"] is not None and block["held"][0] == after:
                counts.append(agreeing(block["held"][1], tokens))
        return max(counts)

    def find(self, key):
        return next((index for index, block in enumerate(self.blocks) if block["key"] == key), None)

    def release(self, index):
        block = self.blocks[index]
        block["refs"] -= 1
        if not block["refs"]:
            self.clock += 1
            block["since"] = self.clock


def agreeing(first, second):
    return max(n for n in range(min(len(first), len(second)) + 1) if first[:n] == second[:n])


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.slow = BlockPool(BLOCKS), SlowPool()
        self.owned: list[int] = []  # one entry a reference

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count):
        free, evicted = self.slow.evicted_next(count)
        idle = len(self.slow.idle())
        foreseen = self.pool.peek(count)
        self.pool.check()
        got = self.pool.allocate(count)
        assert foreseen == got
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
    @rule(data=st.data(), after=st.sampled_from(PREFIXES), tokens=st.sampled_from(FULL))
    def register(self, data, after, tokens):
        place = data.draw(st.sampled_from(self.owned))
        block, key = self.slow.blocks[place], key_of(after, tokens)
        named, new = block["key"] is not None, self.slow.find(key) is None
        assert self.pool.register(place, key, key_of(after, ()), tokens) is (new and not named)
        if not named:
            block.update(key=key, held=(after, tokens)) if new else block.update(held=None)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), after=st.sampled_from(PREFIXES), tokens=PARTS)
    def register_tail(self, data, after, tokens):
        place = data.draw(st.sampled_from(self.owned))
        block = self.slow.blocks[place]
        if block["key"] is not None:
            with pytest.raises(ValueError, match="full"):
                self.pool.register_tail(place, key_of(after, ()), tokens)
            return
        block["held"] = None
        new = self.slow.most(after, tokens) < len(tokens)
        assert self.pool.register_tail(place, key_of(after, ()), tokens) is new
        if new:
            block["held"] = after, tokens

    @rule(after=st.sampled_from(PREFIXES), tokens=PARTS, take=st.booleans())
    def match(self, after, tokens, take):
        found = self.pool.match(key_of(after, ()), tokens)
        most = self.slow.most(after, tokens)
        assert (found is None) == (most == 0)
        if found is None:
            return
        place, count = found
        block = self.slow.blocks[place]
        assert count == most == agreeing(block["held"][1], tokens)
        assert block["held"][0] == after
        idle = block["refs"] == 0 and block["key"] is None and len(block["held"][1]) == count
        assert self.pool.is_idle_tail(place, count) is idle
        if idle and take:
            self.pool.acquire([place])
            block["refs"] += 1
            self.owned.append(place)

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
        for place, block in enumerate(self.slow.blocks):
            is_tail = block["held"] is not None and block["key"] is None
            assert self.pool.tail(place) == (block["held"][1] if is_tail else ())


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_the_end_of_a_prefix_is_given_away_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.register(blocks[0], b"first", b"", FULL[0])
    pool.register(blocks[1], b"second", b"first", FULL[1])
    pool.register_tail(blocks[2], b"second", (1,))
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match(b"second", (1, 1)) is None
    pool.allocate(1)
    assert pool.lookup([b"first", b"second"]) == blocks[:1]


def test_a_block_that_another_one_covers_is_free_when_it_is_released() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.register_tail(second, b"", (1, 0))
    assert pool.register(first, b"first", b"", (1, 0, 1))
    assert not pool.register(second, b"first", b"", (1, 0, 1))
    pool.release([first, second])
    assert pool.allocate(1) == [second]


def test_a_block_without_owner_is_neither_named_nor_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="no owner"):
        pool.register(0, KEYS[0], b"", FULL[0])
    with pytest.raises(ValueError, match="no owner"):
        pool.register_tail(0, b"", (1,))
    with pytest.raises(ValueError, match="no owner"):
        pool.release([0])
