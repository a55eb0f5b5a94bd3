"""HostBlockManager: which KV blocks are in host memory, where, and which may leave."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from greenroom.errors import ConfigError
from greenroom.kv.eviction import EvictionPolicy
from greenroom.kv.followers import Followers
from greenroom.kv.layouts import sub_blocks
from greenroom.kv.policies import POLICIES
from greenroom.kv.prefix import START, BlockKey


@dataclass(frozen=True)
class LoadTicket:
    """A load under way. keys: of the host blocks it reads. parts: int64 [device blocks], what to copy, in order."""

    keys: tuple[BlockKey, ...]
    parts: np.ndarray


@dataclass(frozen=True)
class StoreTicket:
    """A store under way.

    keys: of the host blocks it writes.
    sources: int64 [n], which of the device blocks given to copy. parts: int64 [n], where to.
    """

    keys: tuple[BlockKey, ...]
    sources: np.ndarray
    parts: np.ndarray


@dataclass
class _HostBlock:
    """``number`` says where it lies. ``users``: loads that read it, or the one store that writes it."""

    number: int
    users: int
    ready: bool


class HostBlockManager:
    """Host blocks, each of ``factor`` device blocks that follow one another in a sequence.

    The key of a host block is that of its last device block, so it stands for all tokens up to there. Host blocks
    begin at multiples of ``factor`` device blocks of a sequence. A host block's part s of block h has the
    number ``h * factor + s``.

    A host block of one device block may also be a *tail*, which is not full and ends a sequence. Tails, and parts of
    full ones, are found by their tokens.

    One thread. It keeps books and copies nothing: the bytes move between ``prepare_*`` and ``complete_*``.
    """

    def __init__(self, num_blocks: int, factor: int = 1, policy: str = "lru") -> None:
        """
        Args:
            num_blocks: host blocks.
            factor: device blocks in each.
            policy: one of ``POLICIES``.

        Raises:
            ConfigError: no block, no part, or an unknown policy.
        """
        if num_blocks < 1 or factor < 1:
            raise ConfigError("host memory for KV blocks must hold at least one block of at least one device block")
        if policy not in POLICIES:
            raise ConfigError(f"the policy of KV blocks is one of {', '.join(POLICIES)}, not '{policy}'")
        self.num_blocks = num_blocks
        self.factor = factor
        self.evictions = 0
        self._policy: EvictionPolicy = POLICIES[policy](num_blocks)
        self._blocks: dict[BlockKey, _HostBlock] = {}
        self._followers: Followers[BlockKey] = Followers()  # of resident blocks, those whose tokens are known
        self._free = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        """Host blocks in use, those being written included."""
        return len(self._blocks)

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first ``keys`` can be loaded now: up to the end of a whole host block, or 0.

        Args:
            keys: of consecutive device blocks of a sequence. The first may be any part of its host block.
        """
        return self._host_keys(keys)[0]

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """What ``lookup`` finds counts as used, now."""
        self._use(self._host_keys(keys)[1])

    def touch_last(self, keys: Sequence[BlockKey]) -> None:
        """The last one of ``keys`` that is there counts as used, now. What it follows cannot leave before it.

        Args:
            keys: of consecutive device blocks of a sequence.
        """
        key = next((key for key in reversed(keys) if key in self._blocks), None)
        if key is not None:
            self._use([key])

    def lookup_part(self, after: BlockKey, tokens: Sequence[int]) -> tuple[BlockKey, int] | None:
        """The block to load that has most of the first ``tokens``, and how many; it counts as used, now.

        Args:
            after: key of the block before it.
        """
        found = self._followers.longest(after, tokens, self._is_ready)
        if found is not None:
            self._use([found[0]])
        return found

    def prepare_load(self, keys: Sequence[BlockKey]) -> LoadTicket:
        """Keeps the blocks in place until ``complete_load``.

        Args:
            keys: all of which ``lookup`` finds.

        Raises:
            ValueError: it does not.
        """
        found, host_keys = self._host_keys(keys)
        if found != len(keys):
            raise ValueError(f"of {len(keys)} blocks only {found} are in host memory")
        for key in reversed(host_keys):
            self._blocks[key].users += 1
            self._policy.hold(key)
        parts = np.empty(found, dtype=np.int64)
        numbers = np.array([self._blocks[key].number for key in host_keys], dtype=np.int64)
        sub_blocks(numbers, self.factor, -found % self.factor, parts)
        return LoadTicket(tuple(host_keys), parts)

    def complete_load(self, ticket: LoadTicket) -> None:
        """The copies have ended, well or not."""
        # From the last to the first: a sequence is found from its beginning, so that must stay longest.
        for key in reversed(ticket.keys):
            self._release(key)

    def prepare_store(
        self,
        keys: Sequence[BlockKey],
        after: BlockKey = START,
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> StoreTicket | None:
        """Takes places for the whole host blocks of ``keys`` that are not there yet, and evicts others if it must.

        Args:
            keys: of consecutive device blocks of a sequence, the first at the beginning of a host block. What does
                not fill a host block at the end is left out.
            after: key of the device block before them.
            tokens: of each device block, so that ``lookup_part`` finds it. If a host block is several of them, it
                does not.

        Returns:
            For as many of the first new ones as there is room. None if there is none for any; then nothing has
            changed, except that those of the keys that are there count as used.
        """
        ends = list(keys[self.factor - 1 :: self.factor])
        present = [key for key in ends if key in self._blocks]
        places = [place for place, key in enumerate(ends) if key not in self._blocks]
        numbers: list[int] = []
        # The sequence's own blocks must not leave for its others.
        self._hold(present)
        for place in places:
            before = ends[place - 1] if place else after
            if not self._free and not self._policy.can_evict(sparing=before):
                break
            numbers.append(self._place(ends[place], before))
        for key in reversed(present):
            self._let_go(key)
        if places and not numbers:
            return None
        del places[len(numbers) :]
        if tokens is not None and self.factor == 1:
            for place in places:
                self._followers.add(keys[place], keys[place - 1] if place else after, tokens[place])
        sources, parts = np.empty((2, len(places) * self.factor), dtype=np.int64)
        sub_blocks(np.array(places, dtype=np.int64), self.factor, 0, sources)
        sub_blocks(np.array(numbers, dtype=np.int64), self.factor, 0, parts)
        return StoreTicket(tuple(ends[place] for place in places), sources, parts)

    def complete_store(self, ticket: StoreTicket, ok: bool) -> None:
        """The copies have ended: from here on the blocks can be loaded, or, if it failed, are forgotten."""
        for key in reversed(ticket.keys):
            if ok:
                self._blocks[key].ready = True
                self._release(key)
            else:
                self._policy.drop(key)
                self._followers.discard(key)
                self._free.append(self._blocks.pop(key).number)

    def check(self) -> None:
        """Raises AssertionError if the books contradict one another."""
        self._policy.check()
        assert self._policy.resident() == self._blocks.keys()
        numbers = [block.number for block in self._blocks.values()] + self._free
        assert sorted(numbers) == list(range(self.num_blocks))
        held = sum(block.users > 0 for block in self._blocks.values())
        assert self._policy.idle == len(self._blocks) - held
        self._followers.check()
        assert all(key in self._blocks for key in self._followers)
        assert all(block.ready or block.users == 1 for block in self._blocks.values())

    def _host_keys(self, keys: Sequence[BlockKey]) -> tuple[int, list[BlockKey]]:
        """What ``lookup`` returns, and the keys of the host blocks that it found."""
        # Host blocks of a sequence do not overlap, so at most one ends in the first ``factor`` places.
        first = next((end for end, key in enumerate(keys[: self.factor]) if self._is_ready(key)), None)
        if first is None:
            return 0, []
        found = []
        for end in range(first, len(keys), self.factor):
            if not self._is_ready(keys[end]):
                break
            found.append(keys[end])
        return first + 1 + (len(found) - 1) * self.factor, found

    def _is_ready(self, key: BlockKey) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.ready

    def _place(self, key: BlockKey, after: BlockKey) -> int:
        """Makes ``key`` resident, being written; ``after`` is the host block before it."""
        victim = self._policy.admit(key, after, full=not self._free)
        if victim is None:
            number = self._free.pop()
        else:
            number = self._blocks.pop(victim).number
            self._followers.discard(victim)
            self.evictions += 1
        self._blocks[key] = _HostBlock(number, users=1, ready=False)
        return number

    def _use(self, keys: Sequence[BlockKey]) -> None:
        self._hold(keys)
        for key in reversed(keys):
            self._let_go(key)

    def _hold(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._policy.hold(key)

    def _let_go(self, key: BlockKey) -> None:
        if self._blocks[key].users == 0:
            self._policy.release(key)

    def _release(self, key: BlockKey) -> None:
        self._blocks[key].users -= 1
        self._let_go(key)
