"""What all policies of eviction share: blocks that follow one another, and the order of their last use.

A sequence is found from its beginning, so a block that others follow stays at least as long as they do: only blocks
that nothing resident follows may leave. Every operation takes constant time, apart from blocks that are passed over
as they are followed; each of these was used once since it was passed over last.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict

from greenroom.kv.prefix import BlockKey


class EvictionPolicy(ABC):
    """Knows the resident blocks by key, what they follow, and in what order they would leave.

    A block is held while it is copied: it stays resident and out of the order. ``release`` puts it back as the one
    used last.
    """

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: blocks that may be resident, at least 1.
        """
        self.capacity = capacity
        self._after: dict[BlockKey, BlockKey] = {}  # of resident blocks
        self._followers: dict[BlockKey, int] = {}  # how many resident blocks follow one, resident or not

    @property
    @abstractmethod
    def idle(self) -> int:
        """Resident blocks that nobody holds."""

    def can_evict(self, sparing: BlockKey) -> bool:
        """Whether a block other than ``sparing`` may leave: nobody holds it, and nothing follows it."""
        self._follow(sparing)
        result = self._can_evict()
        self._unfollow(sparing)
        return result

    def admit(self, key: BlockKey, after: BlockKey, full: bool) -> BlockKey | None:
        """A block that was not resident becomes so, held.

        Args:
            after: the block that it follows, resident or not.
            full: another has to leave for it; then ``can_evict(after)`` must hold.

        Returns:
            The one that left, if ``full``.
        """
        self._after[key] = after
        self._follow(after)
        victim = self._admit(key, full)
        if victim is not None:
            self._forget(victim)
        return victim

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """A resident block is used, and stays until it is released. It may be held already."""

    @abstractmethod
    def release(self, key: BlockKey) -> None:
        """A held block may leave again."""

    def drop(self, key: BlockKey) -> None:
        """A held block leaves, as if it had never been there: its bytes are not what they should be."""
        self._drop(key)
        self._forget(key)

    def resident(self) -> set[BlockKey]:
        """Keys of all resident blocks, for tests."""
        return {*self._after}

    def check(self) -> None:
        """Raises AssertionError if the policy contradicts itself."""
        counts: dict[BlockKey, int] = {}
        for after in self._after.values():
            counts[after] = counts.get(after, 0) + 1
        assert counts == self._followers
        assert len(self._after) <= self.capacity

    @abstractmethod
    def _can_evict(self) -> bool:
        """See ``can_evict``."""

    @abstractmethod
    def _admit(self, key: BlockKey, full: bool) -> BlockKey | None:
        """See ``admit``."""

    @abstractmethod
    def _drop(self, key: BlockKey) -> None:
        """See ``drop``."""

    @abstractmethod
    def _uncover(self, key: BlockKey) -> None:
        """Nothing follows ``key`` any more. It need not be resident."""

    def _forget(self, key: BlockKey) -> None:
        self._unfollow(self._after.pop(key))

    def _follow(self, after: BlockKey) -> None:
        self._followers[after] = self._followers.get(after, 0) + 1

    def _unfollow(self, after: BlockKey) -> None:
        self._followers[after] -= 1
        if not self._followers[after]:
            del self._followers[after]
            self._uncover(after)


class OrderedBlocks:
    """Resident blocks: those held, and the others in the order of their last release.

    Attributes:
        order: oldest first. Some may be followed by others: those are set aside when they are the oldest.
        covered: those set aside.
    """

    def __init__(self, followers: dict[BlockKey, int]) -> None:
        """``followers``: has a key for each block that others follow."""
        self.order: OrderedDict[BlockKey, None] = OrderedDict()
        self.covered: set[BlockKey] = set()
        self.held: set[BlockKey] = set()
        self._followers = followers
        self._released: dict[BlockKey, int] = {}  # when, of those in order or covered
        self._clock = 0

    def __len__(self) -> int:
        return self.idle + len(self.held)

    @property
    def idle(self) -> int:
        """Blocks that nobody holds."""
        return len(self.order) + len(self.covered)

    def oldest(self) -> BlockKey | None:
        """The one that has to leave next, if any may."""
        while self.order:
            key = next(iter(self.order))
            if key not in self._followers:
                return key
            del self.order[key]
            self.covered.add(key)
        return None

    def pop_oldest(self) -> BlockKey:
        """It leaves; there must be one."""
        key = self.oldest()
        assert key is not None
        del self.order[key], self._released[key]
        return key

    def uncover(self, key: BlockKey) -> None:
        """Nothing follows it any more: back to its place in the order, which is at the beginning or close to it."""
        if key not in self.covered:
            return
        self.covered.remove(key)
        older = []
        while self.order and self._released[first := next(iter(self.order))] < self._released[key]:
            del self.order[first]
            older.append(first)
        for other in [key, *reversed(older)]:
            self.order[other] = None
            self.order.move_to_end(other, last=False)

    def release(self, key: BlockKey) -> None:
        """A held block is now the last one in the order."""
        self.held.remove(key)
        self.order[key] = None
        self._released[key] = self._clock
        self._clock += 1

    def discard(self, key: BlockKey) -> None:
        """It is not here any more, if it was."""
        self.held.discard(key)
        self.covered.discard(key)
        self.order.pop(key, None)
        self._released.pop(key, None)

    def check(self) -> None:
        """Raises AssertionError if it contradicts itself."""
        assert not self.held & self._released.keys()
        assert not self.covered & self.order.keys()
        assert self.covered | self.order.keys() == self._released.keys()
        assert self.covered <= self._followers.keys()
        times = [self._released[key] for key in self.order]
        assert times == sorted(times)
