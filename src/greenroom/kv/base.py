"""What a scheduler asks of a second home of KV blocks: copies to it and back, while the model runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from greenroom.kv.prefix import BlockKey


@dataclass(frozen=True)
class Transfers:
    """Ids of jobs that have ended since the last poll. Each job is reported once.

    done: their blocks hold what they should, for all device work enqueued from now on.
    failed: nothing may be said of the blocks that they were to write, on either side.
    """

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


@dataclass(frozen=True)
class LaneStats:
    """What went one way. seconds: that jobs took, from the first copy of each to its last.

    blocks, nbytes: of jobs that went well, in device blocks.
    """

    jobs: int = 0
    failed: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class KVOffloadStats:
    """Counts so far.

    queried_blocks, hit_blocks: full device blocks that were asked for, and those of them that could be loaded.
    refused_stores: for which nothing could leave. evictions: host blocks that left for others.
    host_blocks, host_blocks_used: of ``block_factor`` device blocks each.
    """

    load: LaneStats = LaneStats()
    store: LaneStats = LaneStats()
    queried_blocks: int = 0
    hit_blocks: int = 0
    refused_stores: int = 0
    evictions: int = 0
    host_blocks: int = 0
    host_blocks_used: int = 0
    host_bytes: int = 0


class KVOffload(Protocol):
    """Copies KV blocks from the device to a larger memory and back.

    Called by one thread; blocks in ``wait`` and ``close`` alone.

    A device block belongs to its job from ``start_*`` until ``poll`` reports the job: the caller holds a reference
    meanwhile, so nobody else writes it, and nobody reads a block that is being loaded.

    Attributes:
        block_factor: blocks of a sequence that are kept together. They are found again only as a whole.
    """

    block_factor: int

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first keys in a row could be loaded now. They count as used."""

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """The last one of the keys that is there counts as used, now; so those before it stay as well.

        Args:
            keys: that begin a sequence.
        """

    def lookup_part(self, after: BlockKey, tokens: Sequence[int]) -> tuple[BlockKey, int] | None:
        """A block that could be loaded now and begins with some of ``tokens``, the more the better, and how many.

        It counts as used. Where ``block_factor`` is not 1, none is found.

        Args:
            after: key of the block before it, b"" at the start.
        """

    def start_load(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> int:
        """Begins to copy ``keys`` into the device's blocks, behind all device work enqueued so far.

        Args:
            keys: what ``lookup`` has just promised, what ``lookup_part`` has, or the latter behind the former.
            block_ids: one for each.

        Returns:
            The job's id.
        """

    def start_store(
        self,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        after: BlockKey,
        tokens: Sequence[Sequence[int]],
    ) -> int | None:
        """Begins to copy the device's blocks, as they are once the device work enqueued so far has ended.

        Keys that are there already are not copied again; where room lacks, only the first ones are kept.

        Args:
            keys: of consecutive blocks of a sequence, the first at a multiple of ``block_factor``. Those at the end
                that do not make up another multiple are left out. Only if ``block_factor`` is 1, the last one may be
                the ``tail_key`` of a block that is not full.
            after: key of the block before them, b"" at the start. It does not leave before them.
            tokens: what each block begins with.
            block_ids: one for each.

        Returns:
            The job's id, or None if nothing is copied: then no reference is needed.
        """

    def poll(self) -> Transfers:
        """Jobs that have ended."""

    def wait(self, timeout_s: float) -> None:
        """Returns once a job has ended that ``poll`` has not reported, or after ``timeout_s`` seconds."""

    def stats(self) -> KVOffloadStats:
        """Counts so far."""

    def close(self) -> None:
        """Waits for what is under way and frees everything. Idempotent."""
