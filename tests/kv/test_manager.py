"""HostBlockManager beside a slow model, with contents that tell what was copied where."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greenroom.errors import ConfigError
from greenroom.kv.manager import HostBlockManager, LoadTicket, StoreTicket
from greenroom.kv.policies import POLICIES
from greenroom.kv.prefix import START, block_keys, tail_key
from tests.reference.host_blocks import SlowHostBlocks

# Sequences that share beginnings: a path through a tree with two branches at each step.
SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


@dataclass
class Load:
    ticket: LoadTicket
    model: list[dict]
    expected: list[tuple]


@dataclass
class Store:
    ticket: StoreTicket
    model: list[dict]
    sequence: tuple
    first: int


class Books(RuleBasedStateMachine):
    """``memory[part]`` is the prefix whose last device block lies there, "..." while it is being written."""

    policy = "lru"
    exact = True

    @initialize(num_blocks=st.integers(1, 5), factor=st.integers(1, 3))
    def begin(self, num_blocks: int, factor: int) -> None:
        self.manager = HostBlockManager(num_blocks, factor, self.policy)
        self.model = SlowHostBlocks(num_blocks, factor)
        self.memory: list[object] = [None] * (num_blocks * factor)
        self.loads: list[Load] = []
        self.stores: list[Store] = []

    @rule(sequence=SEQUENCES, data=st.data())
    def lookup(self, sequence: tuple, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(sequence) - 1))
        assert self.manager.lookup(keys_of(sequence)[first:]) == self.model.lookup(first, sequence)

    @rule(sequence=SEQUENCES)
    def touch(self, sequence: tuple) -> None:
        self.manager.touch(keys_of(sequence))
        chain = self.model.chain(0, sequence)
        self.model.hold(chain)
        self.model.let_go(chain)

    @rule(sequence=SEQUENCES)
    def touch_last(self, sequence: tuple) -> None:
        self.manager.touch_last(keys_of(sequence))
        ends = [sequence[:end] for end in range(len(sequence), 0, -1)]
        last = [block for end in ends if (block := self.model.find(end)) is not None][:1]
        self.model.hold(last)
        self.model.let_go(last)

    @rule(sequence=SEQUENCES, data=st.data())
    def load(self, sequence: tuple, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(sequence) - 1))
        found = self.model.lookup(first, sequence)
        keys = keys_of(sequence)[first:]
        if found < len(keys):
            with pytest.raises(ValueError, match="in host memory"):
                self.manager.prepare_load(keys)
        if found:
            ticket = self.manager.prepare_load(keys[:found])
            chain = self.model.chain(first, sequence)
            self.model.hold(chain)
            expected = [sequence[:end] for end in range(first + 1, first + found + 1)]
            self.loads.append(Load(ticket, chain, expected))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.manager.complete_load(load.ticket)
        self.model.let_go(load.model)

    @rule(sequence=SEQUENCES, data=st.data())
    def store(self, sequence: tuple, data: st.DataObject) -> None:
        factor = self.model.factor
        first = data.draw(st.integers(0, (len(sequence) - 1) // factor)) * factor
        before, keys = self.snapshot(), keys_of(sequence)
        ticket = self.manager.prepare_store(
            keys[first:], keys[first - 1] if first else START, [(token,) for token in sequence[first:]]
        )
        self.nothing_left_before_its_followers(before)
        expected = self.model.store(first, sequence) if self.exact else self.model_follows(first, sequence, ticket)
        if ticket is None:
            assert expected is None
            assert self.snapshot() == before
            return
        assert expected is not None
        assert list(ticket.keys) == [keys_of(block["prefix"])[-1] for block in expected]
        ends = [len(block["prefix"]) - first for block in expected]
        assert ticket.sources.tolist() == [source for end in ends for source in range(end - factor, end)]
        for part in ticket.parts.tolist():
            self.memory[part] = ...
        self.stores.append(Store(ticket, expected, sequence, first))

    def nothing_left_before_its_followers(self, before: set[bytes]) -> None:
        """Not even for a moment: what was evicted had no follower that stayed."""
        after = self.snapshot()
        for block in self.model.blocks:
            previous = self.model.before(block["prefix"])
            if previous and (key := keys_of(previous)[-1]) in before - after:
                assert keys_of(block["prefix"])[-1] not in after, f"{key!r} left before a block that follows it"

    @rule(sequence=SEQUENCES, token=st.integers(0, 1))
    def lookup_part(self, sequence: tuple, token: int) -> None:
        """A block is one token here, so it agrees or not."""
        found = self.manager.lookup_part(keys_of(sequence)[-1], (token, 7))
        block = self.model.find((*sequence, token))
        if self.model.factor > 1 or block is None or not block["ready"]:
            assert found is None
            return
        assert found == (keys_of((*sequence, token))[-1], 1)
        self.model.hold([block])
        self.model.let_go([block])

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), ok=st.booleans())
    def end_store(self, data: st.DataObject, ok: bool) -> None:
        store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        for source, part in zip(store.ticket.sources.tolist(), store.ticket.parts.tolist(), strict=True):
            assert self.memory[part] is ...
            self.memory[part] = store.sequence[: store.first + source + 1] if ok else None
        self.manager.complete_store(store.ticket, ok)
        if ok:
            for block in store.model:
                block["ready"] = True
            self.model.let_go(store.model)
        else:
            for block in store.model:
                self.model.blocks.remove(block)

    @invariant()
    def books_are_right(self) -> None:
        self.manager.check()
        assert self.snapshot() == {keys_of(block["prefix"])[-1] for block in self.model.blocks}
        for load in self.loads:  # what is being read stands still
            assert [self.memory[part] for part in load.ticket.parts.tolist()] == load.expected
        writing = [part for store in self.stores for part in store.ticket.parts.tolist()]
        assert len(set(writing)) == len(writing)
        assert all(self.memory[part] is ... for part in writing)
        for block in self.model.blocks:  # everything that could be loaded holds what it should
            if block["ready"]:
                parts = self.parts_of(block)
                end = len(block["prefix"])
                expected = [block["prefix"][: end - self.model.factor + part + 1] for part in range(self.model.factor)]
                assert [self.memory[part] for part in parts] == expected

    def parts_of(self, block: dict) -> list[int]:
        number = self.manager._blocks[keys_of(block["prefix"])[-1]].number
        return [number * self.model.factor + part for part in range(self.model.factor)]

    def snapshot(self) -> set[bytes]:
        return set(self.manager._blocks)

    def model_follows(self, first: int, sequence: tuple, ticket: StoreTicket | None) -> list[dict] | None:
        """For policies that choose other victims: those that the manager chose, if it might choose them."""
        model, after = self.model, self.snapshot()
        new = model.new_prefixes(first, sequence)
        prefixes = [sequence[:end] for end in range(first + model.factor, len(sequence) + 1, model.factor)]
        victims = [block for block in model.blocks if keys_of(block["prefix"])[-1] not in after]
        for block in victims:
            assert not block["users"]
            assert block["prefix"] not in prefixes
            model.blocks.remove(block)
        placed = 0 if ticket is None else len(ticket.keys)
        stored = [{"prefix": prefix, "users": 1, "ready": False} for prefix in new[:placed]]
        model.blocks += stored
        assert len(model.blocks) <= model.num_blocks
        if placed < len(new):  # there was no room, and no block for it that might leave
            assert len(model.blocks) == model.num_blocks
            idle = [block for block in model.may_leave(model.before(new[placed])) if block["prefix"] not in prefixes]
            assert not idle
        return stored if ticket is not None else None


class ArcBooks(Books):
    policy = "arc"
    exact = False


def keys_of(sequence: tuple) -> list[bytes]:
    return block_keys(sequence, 1)


TestLruBooks = Books.TestCase
TestArcBooks = ArcBooks.TestCase
TestLruBooks.settings = TestArcBooks.settings = settings(max_examples=120, stateful_step_count=40)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_beginning_of_a_sequence_stays_longest(policy: str) -> None:
    """A tail without its beginning cannot be found."""
    manager = HostBlockManager(4, 1, policy)
    keys, others = keys_of((0, 1, 0, 1)), keys_of((1, 1, 1))
    store(manager, keys)
    for count in range(1, 4):
        store(manager, others[:count])
        assert manager.lookup(keys) == 4 - count
        assert manager.lookup(others) == count
    assert manager.evictions == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", [1, 2])
def test_a_sequence_that_came_in_several_stores_leaves_from_its_end(policy: str, factor: int) -> None:
    """Passes store their blocks one after another, and nobody ever asks for the first ones again."""
    manager = HostBlockManager(5, factor, policy)
    keys, others = keys_of((0,) * 4 * factor), keys_of((1,) * 5 * factor)
    for first in range(4):
        store(manager, keys[first * factor : (first + 1) * factor], keys[first * factor - 1] if first else START)
    for count in range(1, 5):
        store(manager, others[(count - 1) * factor : count * factor], [START, *others][(count - 1) * factor])
        assert manager.lookup(keys) == min(4, 5 - count) * factor
        assert manager.lookup(others) == count * factor


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_that_is_touched_at_its_end_stays(policy: str) -> None:
    manager = HostBlockManager(5, 1, policy)
    keys = keys_of((0,) * 4)
    store(manager, keys[:3])
    for other in range(1, 30):
        manager.touch_last(keys)  # of which the fourth is not there
        store(manager, keys_of((other,)))
        assert manager.lookup(keys) == 3


def test_a_sequence_alone_does_not_push_out_its_own_beginning() -> None:
    manager = HostBlockManager(3)
    keys = keys_of((0,) * 6)
    assert store(manager, keys).keys == tuple(keys[:3])
    assert manager.prepare_store(keys[3:], keys[2]) is None
    assert manager.lookup(keys) == 3
    manager.check()


def test_tails_and_parts_are_found_by_their_tokens() -> None:
    manager = HostBlockManager(3)
    first = block_keys(range(4), 4)
    tail = tail_key(first[0], (4, 5, 6))
    ticket = manager.prepare_store(first, START, [range(4)])
    assert manager.lookup_part(START, (0, 1)) is None  # not before it is there
    assert ticket is not None
    manager.complete_store(ticket, ok=True)
    assert manager.lookup_part(START, (0, 1, 9)) == (first[0], 2)
    store(manager, [tail], first[0], [(4, 5, 6)])
    assert manager.lookup_part(first[0], (4, 5, 6, 7)) == (tail, 3)
    assert manager.lookup_part(first[0], (5,)) is None
    assert manager.prepare_load([*first, tail]).parts.tolist() == [0, 1]
    for number in range(2):  # the tail is held by the load, the block before it is followed
        assert (manager.prepare_store(keys_of((number,))) is None) == bool(number)
    manager.check()


def test_what_left_is_not_found_by_its_tokens() -> None:
    manager = HostBlockManager(1)
    key = block_keys(range(4), 4)
    store(manager, key, START, [range(4)])
    ticket = manager.prepare_store(keys_of((1,)), START, [(1,)])
    assert manager.lookup_part(START, (0,)) is None
    assert ticket is not None
    manager.complete_store(ticket, ok=False)
    assert manager.lookup_part(START, (1,)) is None
    manager.check()


def test_a_store_is_cut_to_whole_host_blocks() -> None:
    manager = HostBlockManager(3, 2)
    assert store(manager, keys_of((0, 1, 0))).sources.tolist() == [0, 1]
    assert manager.lookup(keys_of((0, 1, 0))) == 2
    assert store(manager, keys_of((0,))).keys == ()
    assert store(manager, keys_of((0, 1, 0, 1))).sources.tolist() == [2, 3]
    # A load may begin inside a host block, and does not end inside one.
    assert manager.lookup(keys_of((0, 1, 0, 1, 1))[1:]) == 3
    np.testing.assert_array_equal(manager.prepare_load(keys_of((0, 1, 0, 1))[1:]).parts, [1, 2, 3])


@pytest.mark.parametrize(("blocks", "factor", "policy"), [(0, 1, "lru"), (1, 0, "lru"), (1, 1, "mru")])
def test_bad_numbers_are_refused(blocks: int, factor: int, policy: str) -> None:
    with pytest.raises(ConfigError):
        HostBlockManager(blocks, factor, policy)


def store(
    manager: HostBlockManager, keys: list[bytes], after: bytes = START, tokens: list | None = None
) -> StoreTicket:
    ticket = manager.prepare_store(keys, after, tokens)
    assert ticket is not None
    manager.complete_store(ticket, ok=True)
    manager.check()
    return ticket
