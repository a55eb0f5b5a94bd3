"""BlockTransfers: the blocks that are on their way from or to host memory, and who waits for them."""

from collections.abc import Sequence as TypingSequence

from greenroom.kv.base import KVOffload
from greenroom.kv.blocks import BlockPool
from greenroom.kv.prefix import BlockKey, tail_key
from greenroom.serving.sequence import Sequence, no_blocks


class BlockTransfers:
    """Keeps references to blocks as long as jobs of a ``KVOffload`` work on them. One thread.

    A sequence that is being loaded owns its blocks itself. If it ends before its job does, the job owns them.
    """

    def __init__(self, pool: BlockPool, offload: KVOffload | None) -> None:
        self._pool = pool
        self._offload = offload
        self._loads: dict[int, tuple[Sequence, int]] = {}  # by job: who waits, and how many tokens it will have
        self._held: dict[int, list[int]] = {}  # by job: stores, and loads that nobody waits for any more

    @property
    def loading(self) -> list[Sequence]:
        """Sequences that wait for their keys and values."""
        return [sequence for sequence, _ in self._loads.values()]

    @property
    def busy(self) -> bool:
        """Whether any job is under way."""
        return bool(self._loads or self._held)

    def held(self) -> list[int]:
        """Blocks to which jobs have references of their own, one entry a reference."""
        return [block for blocks in self._held.values() for block in blocks]

    def storable(self, first: int, full: int) -> range:
        """Which of a sequence's ``full`` full blocks to offer if those from ``first`` on are new: whole groups."""
        factor = self._offload.block_factor if self._offload is not None else 1
        return range(first // factor * factor, full // factor * factor)

    def lookup(self, keys: list[BlockKey]) -> int:
        """How many of the first keys host memory has."""
        return self._offload.lookup(keys) if self._offload is not None and keys else 0

    def touch(self, keys: list[BlockKey]) -> None:
        """Full blocks that begin a sequence, and need not be loaded, stay in host memory as if they had been."""
        if self._offload is not None and keys:
            self._offload.touch(keys)

    def lookup_part(self, after: BlockKey, tokens: list[int]) -> tuple[BlockKey, int] | None:
        """The block of host memory that has most of the first ``tokens`` behind a block, and how many."""
        return self._offload.lookup_part(after, tokens) if self._offload is not None else None

    def load(self, sequence: Sequence, keys: list[BlockKey], length: int) -> bool:
        """Begins to load blocks behind those that the sequence has, if there is room.

        Args:
            keys: that have just been found.
            length: tokens that the sequence will have then.
        """
        assert self._offload is not None
        blocks = self._pool.allocate(len(keys))
        if blocks is None:
            return False
        sequence.blocks.extend(blocks)
        self._loads[self._offload.start_load(keys, blocks)] = sequence, length
        return True

    def store(
        self, keys: list[BlockKey], blocks: list[int], after: BlockKey, tokens: TypingSequence[TypingSequence[int]]
    ) -> None:
        """Offers blocks, of which somebody else holds a reference at this moment. See ``KVOffload.start_store``."""
        if self._offload is None or not keys:
            return
        job = self._offload.start_store(keys, blocks, after, tokens)
        if job is not None:
            self._pool.acquire(blocks)
            self._held[job] = blocks

    def store_tail(self, block: int, after: BlockKey, tokens: list[int]) -> None:
        """Offers a block that is not full and will not be written any more, unless host memory has its tokens."""
        if self._offload is None or self._offload.block_factor > 1:
            return
        known = self._offload.lookup_part(after, tokens)
        if known is None or known[1] < len(tokens):
            self.store([tail_key(after, tokens)], [block], after, [tokens])

    def poll(self) -> list[tuple[Sequence, int | None]]:
        """Sequences whose loads have ended, and the tokens that they have now, None if it failed.

        Frees what ended jobs held.
        """
        if self._offload is None:
            return []
        ended = self._offload.poll()
        loaded: list[tuple[Sequence, int | None]] = []
        for job, well in [*((job, True) for job in ended.done), *((job, False) for job in ended.failed)]:
            if job in self._loads:
                sequence, length = self._loads.pop(job)
                loaded.append((sequence, length if well else None))
            else:
                self._pool.release(self._held.pop(job))
        return loaded

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: its job, if it has one, keeps its blocks until it ends too."""
        for job, (other, _) in self._loads.items():
            if other is sequence:
                del self._loads[job]
                self._held[job] = [*sequence.blocks]
                sequence.blocks = no_blocks()
                return
