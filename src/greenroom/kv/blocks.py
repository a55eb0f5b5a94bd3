"""BlockPool: which KV blocks of the device are used, which hold something worth keeping, and which are free."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from greenroom.kv.followers import Followers
from greenroom.kv.prefix import BlockKey


class BlockPool:
    """Counts references to blocks, and finds the blocks of a known prefix again. One thread.

    A block is *used* while it has references, else *cached* if it is registered, else *free*. Full blocks are
    registered under their keys. *Tails*, which are not full, are only found by their tokens, and so are parts of full
    blocks: whoever wants part of a block copies it, or takes over a tail that nobody uses.
    Cached blocks are given away only when none is free, the least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key_of: list[BlockKey | None] = [None] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._followers: Followers[int] = Followers()  # all registered blocks
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

    def peek(self, count: int) -> list[int] | None:
        """What ``allocate`` would hand out, as long as nothing changes. Changes nothing itself."""
        if count > self.available:
            return None
        free = self._free[: -count - 1 : -1] if count else []
        return [*free, *islice(self._cached, count - len(free))]

    def match(self, after: BlockKey, tokens: Sequence[int]) -> tuple[int, int] | None:
        """A block that begins with some of ``tokens``, the more the better, and how many. Takes no reference.

        Its owner, if it has one, goes on writing behind them.

        Args:
            after: key of the block before it.
        """
        return self._followers.longest(after, tokens)

    def is_idle_tail(self, block: int, count: int) -> bool:
        """Whether nobody uses the block and ``count`` tokens are all it holds: a new owner may write behind them."""
        if self._references[block] or self._key_of[block] is not None:
            return False
        return block in self._followers and len(self._followers.tokens(block)) == count

    def tail(self, block: int) -> tuple[int, ...]:
        """Tokens that a block is registered with as a tail; none if it is not."""
        is_tail = block in self._followers and self._key_of[block] is None
        return self._followers.tokens(block) if is_tail else ()

    def register(self, block: int, key: BlockKey, after: BlockKey, tokens: Sequence[int]) -> bool:
        """Says that a used block holds what ``key`` names and will not change again.

        Args:
            after: key of the block before it.
            tokens: those in the block.

        Returns:
            False if another block has that key already: then this one is not registered, as a tail neither. Or if
            this one has a key: then nothing changes.
        """
        self._check_owner(block)
        if self._key_of[block] is not None:
            return False
        self._followers.discard(block)
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        self._followers.add(block, after, tokens)
        return True

    def register_tail(self, block: int, after: BlockKey, tokens: Sequence[int]) -> bool:
        """Says that a used block begins with ``tokens`` and that these will not change again; more may follow.

        Args:
            after: key of the block before it.
            tokens: at least one, fewer than a block holds. They replace what was said of the block before.

        Returns:
            False if another block begins with them already: then this one is not registered.
        """
        self._check_owner(block)
        if self._key_of[block] is not None:
            raise ValueError(f"block {block} is full")
        self._followers.discard(block)
        known = self._followers.longest(after, tokens)
        if known is not None and known[1] == len(tokens):
            return False
        self._followers.add(block, after, tokens)
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Of a sequence's blocks the last ones are given away before the first ones."""
        for block in reversed(blocks):
            self._check_owner(block)
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._followers:
                self._cached[block] = None
            else:
                self._free.append(block)

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
        self._followers.check()
        assert not any(block in self._followers for block in self._free)
        assert all(block in self._followers for block in self._cached)
        assert all(block in self._followers for block in self._block_of.values())
        assert self._block_of == {key: block for block, key in enumerate(self._key_of) if key is not None}

    def _take_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._followers.discard(block)
            key = self._key_of[block]
            if key is not None:
                del self._block_of[key]
                self._key_of[block] = None
        self._references[block] = 1
        return block

    def _check_owner(self, block: int) -> None:
        if not self._references[block]:
            raise ValueError(f"block {block} has no owner")
