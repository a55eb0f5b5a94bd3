"""Which KV block leaves host memory when another needs its place. Every operation takes constant time."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from greenroom.kv.prefix import BlockKey


class EvictionPolicy(ABC):
    """Knows the resident blocks by key, and in what order they would leave.

    A block is held while it is copied: it stays resident and out of the order. ``release`` puts it back as the one
    used last.
    """

    def __init__(self, capacity: int) -> None:
        """
        Args:
            capacity: blocks that may be resident, at least 1.
        """
        self.capacity = capacity

    @property
    @abstractmethod
    def evictable(self) -> int:
        """Resident blocks that nobody holds."""

    @abstractmethod
    def admit(self, key: BlockKey, full: bool) -> BlockKey | None:
        """A block that was not resident becomes so, held.

        Args:
            full: another has to leave for it; then ``evictable`` must not be 0.

        Returns:
            The one that left, if ``full``.
        """

    @abstractmethod
    def hold(self, key: BlockKey) -> None:
        """A resident block is used, and stays until it is released. It may be held already."""

    @abstractmethod
    def release(self, key: BlockKey) -> None:
        """A held block may leave again."""

    @abstractmethod
    def drop(self, key: BlockKey) -> None:
        """A held block leaves, as if it had never been there: its bytes are not what they should be."""

    @abstractmethod
    def resident(self) -> set[BlockKey]:
        """Keys of all resident blocks, for tests."""

    @abstractmethod
    def check(self) -> None:
        """Raises AssertionError if the policy contradicts itself."""


class LruPolicy(EvictionPolicy):
    """The block that was used longest ago leaves."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: set[BlockKey] = set()

    @property
    def evictable(self) -> int:
        """See ``EvictionPolicy``."""
        return len(self._order)

    def admit(self, key: BlockKey, full: bool) -> BlockKey | None:
        """See ``EvictionPolicy``."""
        victim = self._order.popitem(last=False)[0] if full else None
        self._held.add(key)
        return victim

    def hold(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``."""
        if key not in self._held:
            del self._order[key]
            self._held.add(key)

    def release(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``."""
        self._held.remove(key)
        self._order[key] = None

    def drop(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``."""
        self._held.remove(key)

    def resident(self) -> set[BlockKey]:
        """See ``EvictionPolicy``."""
        return self._held | self._order.keys()

    def check(self) -> None:
        """See ``EvictionPolicy``."""
        assert not self._held & self._order.keys()
        assert len(self._held) + len(self._order) <= self.capacity


class _Blocks:
    """One of ARC's two lists of resident blocks: those that may leave, oldest first, and those held."""

    def __init__(self) -> None:
        self.order: OrderedDict[BlockKey, None] = OrderedDict()
        self.held: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self.order) + len(self.held)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.order or key in self.held

    def discard(self, key: BlockKey) -> None:
        self.order.pop(key, None)
        self.held.discard(key)


class ArcPolicy(EvictionPolicy):
    """Adaptive replacement (Megiddo and Modha, 2003).

    ``recent`` holds blocks used once, ``frequent`` those used again. Each has a list of ghosts, keys of blocks that
    left it; a block that comes back while its ghost is there moves ``target``, the size that ``recent`` should have.
    The algorithm knows no blocks that cannot leave: where the list that should give one up has only held ones, the
    other gives.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.target = 0.0
        self._recent = _Blocks()
        self._frequent = _Blocks()
        self._recent_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    @property
    def evictable(self) -> int:
        """See ``EvictionPolicy``."""
        return len(self._recent.order) + len(self._frequent.order)

    def admit(self, key: BlockKey, full: bool) -> BlockKey | None:
        """See ``EvictionPolicy``."""
        recent_ghosts, frequent_ghosts = self._recent_ghosts, self._frequent_ghosts
        if key in recent_ghosts:
            step = max(1.0, len(frequent_ghosts) / len(recent_ghosts))
            self.target = min(float(self.capacity), self.target + step)
            victim = self._replace(from_frequent_ghosts=False) if full else None
            del recent_ghosts[key]
            self._frequent.held.add(key)
        elif key in frequent_ghosts:
            step = max(1.0, len(recent_ghosts) / len(frequent_ghosts))
            self.target = max(0.0, self.target - step)
            victim = self._replace(from_frequent_ghosts=True) if full else None
            del frequent_ghosts[key]
            self._frequent.held.add(key)
        else:
            victim = self._make_room(full)
            self._recent.held.add(key)
        return victim

    def hold(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``. From here on the block counts as used more than once."""
        self._recent.discard(key)
        self._frequent.order.pop(key, None)
        self._frequent.held.add(key)

    def release(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``."""
        blocks = self._recent if key in self._recent.held else self._frequent
        blocks.held.remove(key)
        blocks.order[key] = None

    def drop(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``."""
        blocks = self._recent if key in self._recent.held else self._frequent
        blocks.held.remove(key)

    def resident(self) -> set[BlockKey]:
        """See ``EvictionPolicy``."""
        return self._recent.held | self._recent.order.keys() | self._frequent.held | self._frequent.order.keys()

    def check(self) -> None:
        """See ``EvictionPolicy``."""
        recent, frequent = len(self._recent), len(self._frequent)
        recent_ghosts, frequent_ghosts = len(self._recent_ghosts), len(self._frequent_ghosts)
        assert len(self.resident()) == recent + frequent <= self.capacity
        assert recent + recent_ghosts <= self.capacity
        assert recent + frequent + recent_ghosts + frequent_ghosts <= 2 * self.capacity
        assert not self.resident() & (self._recent_ghosts.keys() | self._frequent_ghosts.keys())
        assert not self._recent_ghosts.keys() & self._frequent_ghosts.keys()
        assert 0 <= self.target <= self.capacity

    def _make_room(self, full: bool) -> BlockKey | None:
        """Before a block of which nothing is known."""
        recent, recent_ghosts = len(self._recent), len(self._recent_ghosts)
        total = recent + recent_ghosts + len(self._frequent) + len(self._frequent_ghosts)
        if recent + recent_ghosts == self.capacity:
            if recent == self.capacity:
                return self._recent.order.popitem(last=False)[0]  # leaves no ghost
            self._recent_ghosts.popitem(last=False)
        elif total == 2 * self.capacity:
            self._frequent_ghosts.popitem(last=False)
        return self._replace(from_frequent_ghosts=False) if full else None

    def _replace(self, from_frequent_ghosts: bool) -> BlockKey:
        recent = len(self._recent)
        give_recent = recent > 0 and (recent > self.target or (from_frequent_ghosts and recent == self.target))
        if give_recent and not self._recent.order:
            give_recent = False
        elif not give_recent and not self._frequent.order:
            give_recent = True
        blocks, ghosts = (self._recent, self._recent_ghosts) if give_recent else (self._frequent, self._frequent_ghosts)
        key = blocks.order.popitem(last=False)[0]
        ghosts[key] = None
        return key


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}
"""By name."""
