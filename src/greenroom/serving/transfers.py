"""BlockTransfers: the blocks that are on their way from or to host memory, and who waits for them."""

from greenroom.kv.base import KVOffload
from greenroom.kv.blocks import BlockPool
from greenroom.kv.prefix import BlockKey
from greenroom.serving.sequence import Sequence, no_blocks


class BlockTransfers:
    """Keeps references to blocks as long as jobs of a ``KVOffload`` work on them. One thread.

    A sequence that is being loaded owns its blocks itself. If it ends before its job does, the job owns them.
    """

    def __init__(self, pool: BlockPool, offload: KVOffload | None) -> None:
        self._pool = pool
        self._offload = offload
        self._loads: dict[int, Sequence] = {}
        self._held: dict[int, list[int]] = {}  # by job: stores, and loads that nobody waits for any more

    @property
    def loading(self) -> list[Sequence]:
        """Sequences that wait for their keys and values."""
        return [*self._loads.values()]

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

    def load(self, sequence: Sequence, keys: list[BlockKey]) -> bool:
        """Begins to load the blocks behind those that the sequence has, if host memory has any and there is room.

        Args:
            keys: of the blocks behind those.
        """
        if self._offload is None or not keys:
            return False
        count = self._offload.lookup(keys)
        blocks = self._pool.allocate(count) if count else None
        if blocks is None:
            return False
        sequence.blocks.extend(blocks)
        self._loads[self._offload.start_load(keys[:count], blocks)] = sequence
        return True

    def store(self, keys: list[BlockKey], blocks: list[int]) -> None:
        """Offers full blocks, of which somebody else holds a reference at this moment."""
        if self._offload is None or not keys:
            return
        job = self._offload.start_store(keys, blocks)
        if job is not None:
            self._pool.acquire(blocks)
            self._held[job] = blocks

    def poll(self) -> list[tuple[Sequence, bool]]:
        """Sequences whose loads have ended, and whether they went well. Frees what ended jobs held."""
        if self._offload is None:
            return []
        ended = self._offload.poll()
        loaded = []
        for job, well in [*((job, True) for job in ended.done), *((job, False) for job in ended.failed)]:
            if job in self._loads:
                loaded.append((self._loads.pop(job), well))
            else:
                self._pool.release(self._held.pop(job))
        return loaded

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: its job, if it has one, keeps its blocks until it ends too."""
        for job, other in self._loads.items():
            if other is sequence:
                del self._loads[job]
                self._held[job] = [*sequence.blocks]
                sequence.blocks = no_blocks()
                return
