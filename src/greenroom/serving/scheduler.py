"""Scheduler: which tokens of which requests the next pass computes, and in which KV blocks."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from greenroom.engine.batch import SequenceChunk
from greenroom.errors import ConfigError
from greenroom.kv.base import KVOffload
from greenroom.kv.blocks import BlockPool
from greenroom.serving.budget import share_tokens
from greenroom.serving.planned import Ahead, Planned, plan_decode
from greenroom.serving.reuse import PrefixReuse
from greenroom.serving.sequence import Sequence, no_blocks
from greenroom.serving.transfers import BlockTransfers


@dataclass(frozen=True)
class SchedulerLimits:
    """What the runner takes. max_tokens: of one pass. reuse: blocks of one request may serve another."""

    block_size: int
    num_blocks: int
    max_sequences: int
    max_tokens: int
    reuse: bool


class Scheduler:
    """Requests wait, are admitted in the order of arrival, run together, and end. One thread.

    A request is admitted when a seat is free and the blocks suffice for its tokens and for what the running ones
    have still to compute. When blocks run out all the same, as outputs grow, the youngest running request gives
    up its blocks and waits again; they stay cached as long as nobody needs them. The oldest one never does, so
    something always proceeds.

    ``plan``, the pass, ``passed`` (or ``finish`` of those that failed with it), ``append`` or ``finish`` for
    every sequence that sampled: in this order. ``plan_ahead`` may be called during the pass.

    Attributes:
        pool: the blocks. Sequences and transfers hold references.
        waiting, running: in order of arrival. loading: their keys and values come from host memory.
        preemptions, loaded_tokens: counts.
    """

    def __init__(
        self, limits: SchedulerLimits, copy_block: Callable[[int, int], None], offload: KVOffload | None = None
    ) -> None:
        """
        Args:
            copy_block: enqueues a copy of one block into another one, behind all passes so far. Not called unless
                blocks may be reused.
        """
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.loaded_tokens = 0
        self._transfers = BlockTransfers(self.pool, offload if limits.reuse else None)
        self._ahead: Ahead | None = None
        self._reuse = PrefixReuse(self.pool, self._transfers, limits.block_size, copy_block, limits.reuse)

    @property
    def loading(self) -> list[Sequence]:
        return self._transfers.loading

    @property
    def transferring(self) -> bool:
        """Whether jobs are under way, whose end may let something proceed."""
        return self._transfers.busy

    def add(self, sequence: Sequence, max_length: int) -> None:
        """
        Args:
            max_length: tokens that it may ever have.

        Raises:
            ConfigError: not even alone would it fit.
        """
        capacity = self.limits.num_blocks * self.limits.block_size
        if max_length > capacity:
            raise ConfigError(f"{max_length} tokens do not fit the KV cache of {capacity}; ask for fewer")
        insort(self.waiting, sequence, key=_order)

    def plan(self) -> list[Planned]:
        """Admits, and decides on the next pass; nothing if there is nothing to compute at the moment.

        Returns:
            The very list that ``plan_ahead`` has returned last, its chunks' tokens filled in, if that is what is to
            be done.
        """
        self._take_loaded()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._holds(ahead):
            return self._follow(ahead)
        return self._plan_anew()

    def plan_ahead(self, planned: list[Planned]) -> list[Planned] | None:
        """What ``plan`` will decide if all of the pass under way go on, each with a token, and nothing else happens.

        Changes nothing but what is remembered for ``plan``, which looks whether it has come so.

        Args:
            planned: the pass, as ``plan`` returned it.

        Returns:
            One token a chunk, which is not in there yet; None if it cannot be said.
        """
        self._ahead = None
        if not all(item.samples for item in planned) or not self._admits_nobody():
            return None
        sequences = [item.sequence for item in planned]
        if sequences != self.running or len(planned) > self.limits.max_tokens:
            return None
        growing = [each for each in sequences if self._blocks_of(len(each.tokens) + 1) > len(each.blocks)]
        new = self.pool.peek(len(growing))
        if new is None:
            return None
        for sequence in sequences:
            self._reuse.name(sequence)
        self._ahead = plan_decode(sequences, growing, new)
        return self._ahead.planned

    def passed(self, planned: list[Planned]) -> None:
        """The pass went well: what it computed is there, and may serve others."""
        for item in planned:
            sequence = item.sequence
            sequence.computed += len(item.chunk.token_ids)
            if sequence.computed >= (sequence.registered + 1) * self.limits.block_size:
                self._reuse.register(sequence)
            if sequence.computed == sequence.prompt_tokens:
                self._reuse.register_tail(sequence)

    def append(self, sequence: Sequence, token: int) -> None:
        """A running sequence goes on with ``token``."""
        sequence.tokens.append(token)

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended, whatever its state: it gives back everything. Idempotent."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self._reuse.store_tail(sequence)
            self._release(sequence)
        else:
            self._transfers.forget(sequence)

    def check(self) -> None:
        """
        Raises:
            AssertionError: the scheduler contradicts itself, or a block is leaked or shared while it is written.
        """
        self.pool.check()
        size = self.limits.block_size
        references: dict[int, int] = {}
        for sequence in [*self.running, *self.loading]:
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert sequence.computed <= len(sequence.blocks) * size
            assert sequence.computed <= len(sequence.tokens)
            for block in sequence.blocks:
                references[block] = references.get(block, 0) + 1
            for block in sequence.blocks[sequence.computed // size :]:
                assert self.pool.references(block) == 1, "a block that is written has one owner"
            self._reuse.check_tail(sequence)
        for block in self._transfers.held():
            references[block] = references.get(block, 0) + 1
        for block in range(self.limits.num_blocks):
            assert self.pool.references(block) == references.get(block, 0)
        assert all(not sequence.blocks and not sequence.computed for sequence in self.waiting)
        seated = [*self.running, *self.loading]
        assert len(seated) <= self.limits.max_sequences
        orders = [sequence.order for sequence in [*sorted(seated, key=_order), *self.waiting]]
        assert orders == sorted(set(orders))
        assert [*self.running] == sorted(self.running, key=_order)

    def _plan_anew(self) -> list[Planned]:
        self._admit()
        for sequence in self.running:
            self._reuse.adopt(sequence)
        pending = [sequence.pending for sequence in self.running]
        shares = share_tokens(pending, self.limits.max_tokens, self._reuse.waits(self.running))
        planned = []
        for sequence, share in [*zip(self.running, shares, strict=True)]:
            # Older sequences take the blocks of younger ones, which come later in this loop or not at all.
            if sequence in self.running and share and self._make_room(sequence, sequence.computed + share):
                planned.append(_planned(sequence, share))
        return planned

    def _holds(self, ahead: Ahead) -> bool:
        """Whether planning anew would come to the same."""
        if ahead.sequences != self.running or not self._admits_nobody():
            return False
        for item in ahead.planned:
            sequence, start = item.sequence, item.chunk.start
            if sequence.computed != start or len(sequence.tokens) != start + 1:
                return False
        return not ahead.growing or self.pool.peek(len(ahead.growing)) == ahead.new

    def _follow(self, ahead: Ahead) -> list[Planned]:
        for sequence in ahead.growing:
            self._make_room(sequence, sequence.computed + 1)
        return ahead.fill_in()

    def _admits_nobody(self) -> bool:
        return not self.waiting or len(self.running) + len(self.loading) >= self.limits.max_sequences

    def _take_loaded(self) -> None:
        for sequence, length in self._transfers.poll():
            if length is not None:
                self.loaded_tokens += length - sequence.computed
                sequence.computed = length
                self._reuse.register(sequence)
            else:  # what was found on the device is good
                lost = sequence.blocks[sequence.registered :]
                del sequence.blocks[sequence.registered :]
                self.pool.release(lost)
            self._note_cached(sequence)
            insort(self.running, sequence, key=_order)

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.loading) < self.limits.max_sequences:
            sequence = self.waiting[0]
            found, keys = self._reuse.find(sequence)
            self.pool.acquire(found)
            if not self._has_room(sequence, len(found)):
                self.pool.release(found)
                return
            self.waiting.pop(0)
            sequence.blocks.extend(found)  # it had none
            sequence.registered = len(found)
            sequence.computed = len(found) * self.limits.block_size
            if not self._reuse.load(sequence, keys):
                self._note_cached(sequence)
                insort(self.running, sequence, key=_order)

    def _has_room(self, newcomer: Sequence, found: int) -> bool:
        """Whether the newcomer's tokens fit beside what was promised, with a block more for each of the others."""
        seated = [*self.running, *self.loading]
        promised = sum(max(0, self._blocks_of(len(other.tokens) + 1) - len(other.blocks)) for other in seated)
        needed = self._blocks_of(len(newcomer.tokens)) - found
        return self.pool.available >= needed + promised + len(seated)

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Gives the sequence blocks for ``length`` tokens; the youngest lose theirs if need be.

        Returns:
            False if it has to wait, or was the youngest itself.
        """
        needed = self._blocks_of(length) - len(sequence.blocks)
        if needed <= 0:
            return True
        while (blocks := self.pool.allocate(needed)) is None:
            victim = self.running[-1]
            if self.loading or (victim is sequence and self.transferring):
                return False  # the end of a transfer gives back blocks, or a younger victim
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(blocks)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preempted = True
        insort(self.waiting, sequence, key=_order)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._reuse.register_tail(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = no_blocks()
        sequence.computed = sequence.registered = 0

    def _note_cached(self, sequence: Sequence) -> None:
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)


def _planned(sequence: Sequence, count: int) -> Planned:
    start, end = sequence.computed, sequence.computed + count
    chunk = SequenceChunk(sequence.tokens[start:end], start, sequence.blocks[:])
    return Planned(sequence, chunk, end == len(sequence.tokens))


def _order(sequence: Sequence) -> int:
    return sequence.order
