"""BlockPool: which KV blocks of the device are used, which hold something worth keeping, and which are free."""

from collections import OrderedDict
from collections.abc import Sequence

from greenroom.kv.prefix import BlockKey


class BlockPool:
    """Counts references to blocks, and finds the blocks of a known prefix again. One thread.

    A block is *used* while it has references, else *cached* if it is registered under a key, else *free*.
    Cached blocks are given away only when none is free, the least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` could hand out."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks with references."""
        return self.num_blocks - self.available

    def references(self, block: int) -> int:
        """References to one block."""
        return self._references[block]

    def lookup(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks that hold the first ``keys`` in a row. Takes no reference: ``acquire`` does."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference to each block, all of which are used or cached."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each and nothing of worth in them, or None if there are not so many."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def register(self, block: int, key: BlockKey) -> bool:
        """Says that a used block holds what ``key`` names and will not change again.

        Returns:
            False if another block has that key already, or this one has a key: then nothing changes.
        """
        if not self._references[block]:
            raise ValueError(f"block {block} has no owner")
        if key in self._block_of or self._key_of[block] is not None:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Of a sequence's blocks the last ones are given away before the first ones."""
        for block in reversed(blocks):
            if not self._references[block]:
                raise ValueError(f"block {block} has no owner")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._key_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def check(self) -> None:
        """
        Raises:
            AssertionError: the pool contradicts itself.
        """
        everything = range(self.num_blocks)
        used = {block for block in everything if self._references[block]}
        assert min(self._references, default=0) >= 0
        assert len(set(self._free)) == len(self._free)
        assert sorted([*used, *self._free, *self._cached]) == [*everything]
        assert all(self._key_of[block] is None for block in self._free)
        assert all(self._key_of[block] is not None for block in self._cached)
        assert self._block_of == {key: block for block, key in enumerate(self._key_of) if key is not None}

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            key = self._key_of[block]
            assert key is not None
            del self._block_of[key]
            self._key_of[block] = None
        self._references[block] = 1
        return block
