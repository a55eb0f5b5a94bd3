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
from greenroom.kv.prefix import block_keys
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

    @rule(sequence=SEQUENCES)
    def store(self, sequence: tuple) -> None:
        before = self.snapshot()
        ticket = self.manager.prepare_store(keys_of(sequence))
        expected = self.model.store(sequence) if self.exact else self.model_follows(sequence, ticket)
        if ticket is None:
            assert expected is None
            assert self.snapshot() == before
            return
        assert expected is not None
        assert list(ticket.keys) == [keys_of(block["prefix"])[-1] for block in expected]
        factor = self.model.factor
        ends = [len(block["prefix"]) for block in expected]
        assert ticket.sources.tolist() == [source for end in ends for source in range(end - factor, end)]
        for part in ticket.parts.tolist():
            self.memory[part] = ...
        self.stores.append(Store(ticket, expected, sequence))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), ok=st.booleans())
    def end_store(self, data: st.DataObject, ok: bool) -> None:
        store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        for source, part in zip(store.ticket.sources.tolist(), store.ticket.parts.tolist(), strict=True):
            assert self.memory[part] is ...
            self.memory[part] = store.sequence[: source + 1] if ok else None
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

    def model_follows(self, sequence: tuple, ticket: StoreTicket | None) -> list[dict] | None:
        """For policies that choose other victims: those that the manager chose, if it might choose them."""
        model, after = self.model, self.snapshot()
        prefixes = [sequence[:end] for end in range(model.factor, len(sequence) + 1, model.factor)]
        new = [prefix for prefix in prefixes if model.find(prefix) is None]
        idle = [block for block in model.blocks if not block["users"] and block["prefix"] not in prefixes]
        excess = max(0, len(model.blocks) + len(new) - model.num_blocks)
        assert (ticket is None) == (excess > len(idle))
        if ticket is None:
            return None
        victims = [block for block in model.blocks if keys_of(block["prefix"])[-1] not in after]
        assert len(victims) == excess
        for block in victims:
            assert block in idle
            model.blocks.remove(block)
        stored = [{"prefix": prefix, "users": 1, "ready": False} for prefix in new]
        model.blocks += stored
        return stored


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


def store(manager: HostBlockManager, keys: list[bytes]) -> StoreTicket:
    ticket = manager.prepare_store(keys)
    assert ticket is not None
    manager.complete_store(ticket, ok=True)
    manager.check()
    return ticket
