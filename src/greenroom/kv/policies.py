"""Which KV block leaves host memory when another needs its place, of those that none follows: LRU and ARC."""

from collections import OrderedDict
from collections.abc import Callable

from greenroom.kv.eviction import EvictionPolicy, OrderedBlocks
from greenroom.kv.prefix import BlockKey


class LruPolicy(EvictionPolicy):
    """The block that was used longest ago leaves."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks = OrderedBlocks(self._followers)

    @property
    def idle(self) -> int:
        """See ``EvictionPolicy``."""
        return self._blocks.idle

    def _can_evict(self) -> bool:
        return self._blocks.oldest() is not None

    def hold(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``."""
        self._blocks.discard(key)
        self._blocks.held.add(key)

    def release(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``."""
        self._blocks.release(key)

    def check(self) -> None:
        """See ``EvictionPolicy``."""
        super().check()
        self._blocks.check()
        assert len(self._blocks) == len(self._after)

    def _admit(self, key: BlockKey, full: bool) -> BlockKey | None:
        victim = self._blocks.pop_oldest() if full else None
        self._blocks.held.add(key)
        return victim

    def _drop(self, key: BlockKey) -> None:
        self._blocks.held.remove(key)

    def _uncover(self, key: BlockKey) -> None:
        self._blocks.uncover(key)


class ArcPolicy(EvictionPolicy):
    """Adaptive replacement (Megiddo and Modha, 2003).

    ``recent`` holds blocks used once, ``frequent`` those used again. Each has a list of ghosts, keys of blocks that
    left it; a block that comes back while its ghost is there moves ``target``, the size that ``recent`` should have.
    The algorithm knows no blocks that cannot leave: where the list that should give one up has only such, the other
    gives.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.target = 0.0
        self._recent = OrderedBlocks(self._followers)
        self._frequent = OrderedBlocks(self._followers)
        self._recent_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """See ``EvictionPolicy``."""
        return self._recent.idle + self._frequent.idle

    def _can_evict(self) -> bool:
        return self._recent.oldest() is not None or self._frequent.oldest() is not None

    def hold(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``. From here on the block counts as used more than once."""
        self._recent.discard(key)
        self._frequent.discard(key)
        self._frequent.held.add(key)

    def release(self, key: BlockKey) -> None:
        """See ``EvictionPolicy``."""
        (self._recent if key in self._recent.held else self._frequent).release(key)

    def check(self) -> None:
        """See ``EvictionPolicy``."""
        super().check()
        self._recent.check()
        self._frequent.check()
        recent, frequent = len(self._recent), len(self._frequent)
        recent_ghosts, frequent_ghosts = len(self._recent_ghosts), len(self._frequent_ghosts)
        assert len(self.resident()) == recent + frequent
        assert recent + recent_ghosts <= self.capacity
        assert recent + frequent + recent_ghosts + frequent_ghosts <= 2 * self.capacity
        assert not self.resident() & (self._recent_ghosts.keys() | self._frequent_ghosts.keys())
        assert not self._recent_ghosts.keys() & self._frequent_ghosts.keys()
        assert 0 <= self.target <= self.capacity

    def _admit(self, key: BlockKey, full: bool) -> BlockKey | None:
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

    def _drop(self, key: BlockKey) -> None:
        (self._recent if key in self._recent.held else self._frequent).held.remove(key)

    def _uncover(self, key: BlockKey) -> None:
        self._recent.uncover(key)
        self._frequent.uncover(key)

    def _make_room(self, full: bool) -> BlockKey | None:
        """Before a block of which nothing is known."""
        recent, recent_ghosts = len(self._recent), len(self._recent_ghosts)
        total = recent + recent_ghosts + len(self._frequent) + len(self._frequent_ghosts)
        if recent + recent_ghosts == self.capacity:
            if recent == self.capacity:
                return self._recent.pop_oldest()  # leaves no ghost
            self._recent_ghosts.popitem(last=False)
        elif total == 2 * self.capacity:
            self._frequent_ghosts.popitem(last=False)
        return self._replace(from_frequent_ghosts=False) if full else None

    def _replace(self, from_frequent_ghosts: bool) -> BlockKey:
        recent = len(self._recent)
        give_recent = recent > 0 and (recent > self.target or (from_frequent_ghosts and recent == self.target))
        if give_recent and self._recent.oldest() is None:
            give_recent = False
        elif not give_recent and self._frequent.oldest() is None:
            give_recent = True
        blocks, ghosts = (self._recent, self._recent_ghosts) if give_recent else (self._frequent, self._frequent_ghosts)
        key = blocks.pop_oldest()
        ghosts[key] = None
        return key


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}
"""By name."""
