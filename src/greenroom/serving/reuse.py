"""PrefixReuse: what a request finds of its beginning in the KV blocks of others, and what it leaves to them."""

from array import array
from collections.abc import Callable

from greenroom.kv.blocks import BlockPool
from greenroom.kv.prefix import START, BlockKey, block_keys
from greenroom.serving.leaders import Wait, find_waits
from greenroom.serving.sequence import Sequence
from greenroom.serving.transfers import BlockTransfers


class PrefixReuse:
    """Full blocks are shared; of a block of which only the first tokens agree, a request gets a copy. One thread.

    A sequence writes behind what is registered of its blocks, and nowhere else, so a copy is right however far its
    source has grown meanwhile.
    """

    def __init__(
        self,
        pool: BlockPool,
        transfers: BlockTransfers,
        block_size: int,
        copy_block: Callable[[int, int], None],
        enabled: bool,
    ) -> None:
        """
        Args:
            copy_block: enqueues a copy of one block into another one, behind all passes so far.
            enabled: if not, nothing is found or left.
        """
        self._pool = pool
        self._transfers = transfers
        self._size = block_size
        self._copy_block = copy_block
        self._enabled = enabled

    def find(self, sequence: Sequence) -> tuple[list[int], list[BlockKey]]:
        """Blocks on the device that begin the sequence, and the keys behind them that host memory may have.

        The last token is always computed again: its logits choose the next one.
        """
        if not self._enabled:
            return [], []
        size = self._size
        sequence.keys = block_keys(sequence.tokens, size, sequence.keys)
        keys = sequence.keys[: (len(sequence.tokens) - 1) // size]
        found = self._pool.lookup(keys)
        return found, keys[len(found) :]

    def load(self, sequence: Sequence, keys: list[BlockKey]) -> bool:
        """Begins to load what host memory has behind the sequence's blocks, if there is any and room for it.

        Args:
            keys: of the full blocks behind those.
        """
        if not self._enabled:
            return False
        count = self._transfers.lookup(keys)
        if count == 0:  # what is always found on the device is used all the same
            self._transfers.touch(sequence.keys[: sequence.registered])
        place, after = sequence.registered + count, keys[count - 1] if count else sequence.last_key
        names, length, wanted = keys[:count], place * self._size, self._wanted(sequence, place)
        part = self._transfers.lookup_part(after, wanted)
        if part is not None and self._on_device(after, wanted) < part[1]:
            names.append(part[0])
            length += part[1]
        return bool(names) and self._transfers.load(sequence, names, length)

    def adopt(self, sequence: Sequence) -> None:
        """Takes what others have computed since: requests with the same prompt compute it once."""
        if not self._enabled or sequence.pending == 1:
            return
        before = sequence.computed
        self._adopt_blocks(sequence)
        self._adopt_part(sequence)
        in_prompt = len(sequence.tokens) == sequence.prompt_tokens
        if sequence.cached_tokens is not None and in_prompt and not sequence.preempted:
            sequence.cached_tokens += sequence.computed - before

    def waits(self, running: list[Sequence]) -> dict[int, Wait]:
        """Who can take over in the next pass what another one computes in this one. See ``find_waits``."""
        return find_waits(running, self._size) if self._enabled else {}

    def _adopt_blocks(self, sequence: Sequence) -> None:
        """Full blocks take the place of its own."""
        start = sequence.registered
        found = self._pool.lookup(sequence.keys[start : (len(sequence.tokens) - 1) // self._size])
        if not found:
            return
        self._pool.acquire(found)
        end = start + len(found)
        self._pool.release(sequence.blocks[start:end])
        sequence.blocks[start:end] = array("q", found)
        sequence.registered, sequence.computed = end, end * self._size

    def _adopt_part(self, sequence: Sequence) -> None:
        """Behind those, the beginning of another block that agrees with the sequence: copied, or taken over."""
        place, size = sequence.registered, self._size
        match = self._pool.match(sequence.last_key, self._wanted(sequence, place))
        if match is None or place * size + match[1] <= sequence.computed:
            return
        source, count = match
        if place == len(sequence.blocks) and self._pool.is_idle_tail(source, count):
            self._pool.acquire([source])
            sequence.blocks.append(source)
        elif not self._copy_into(sequence, place, source):
            return
        sequence.computed = place * size + count

    def _wanted(self, sequence: Sequence, place: int) -> list[int]:
        """Tokens of the block at ``place`` that may be found."""
        return sequence.tokens[place * self._size : min((place + 1) * self._size, len(sequence.tokens) - 1)]

    def _on_device(self, after: BlockKey, tokens: list[int]) -> int:
        """How many of the first tokens a block on the device has."""
        match = self._pool.match(after, tokens)
        return match[1] if match is not None else 0

    def _copy_into(self, sequence: Sequence, place: int, source: int) -> bool:
        """Copies ``source`` into the sequence's own block at ``place``; False if there is none to be had for it."""
        self._pool.acquire([source])  # or it might be the one that is given away for the copy
        if place == len(sequence.blocks):
            sequence.blocks.extend(self._pool.allocate(1) or [])
        has_own = place < len(sequence.blocks)
        if has_own:
            self._copy_block(source, sequence.blocks[place])
        self._pool.release([source])
        return has_own

    def name(self, sequence: Sequence) -> None:
        """Computes the keys that ``register`` will need, so that it is quick."""
        if len(sequence.tokens) // self._size > len(sequence.keys):
            sequence.keys = block_keys(sequence.tokens, self._size, sequence.keys)

    def register(self, sequence: Sequence) -> None:
        """Names the blocks that have become full, and offers them to host memory."""
        full = sequence.computed // self._size
        if full <= sequence.registered:
            return
        self.name(sequence)
        before = sequence.last_key
        for place in range(sequence.registered, full):
            key = sequence.keys[place]
            self._pool.register(sequence.blocks[place], key, before, self._tokens(sequence, place))
            before = key
        self._store(sequence, self._transfers.storable(sequence.registered, full))
        sequence.registered = full

    def register_tail(self, sequence: Sequence) -> None:
        """What is computed of the block behind the full ones may begin another request's."""
        if self._enabled and (tokens := self._tail(sequence)):
            self._pool.register_tail(sequence.blocks[sequence.registered], sequence.last_key, tokens)

    def store_tail(self, sequence: Sequence) -> None:
        """The same for host memory, once the sequence has ended."""
        if self._enabled and (tokens := self._tail(sequence)):
            self._transfers.store_tail(sequence.blocks[sequence.registered], sequence.last_key, tokens)

    def check_tail(self, sequence: Sequence) -> None:
        """
        Raises:
            AssertionError: a block is registered with tokens that are not the sequence's, or not computed yet.
        """
        for place, block in enumerate(sequence.blocks):
            first, tail = place * self._size, self._pool.tail(block)
            assert first + len(tail) <= sequence.computed or not tail
            assert [*tail] == sequence.tokens[first : first + len(tail)]

    def _store(self, sequence: Sequence, places: range) -> None:
        """Offers full blocks to host memory."""
        self._transfers.store(
            [sequence.keys[place] for place in places],
            [sequence.blocks[place] for place in places],
            sequence.keys[places.start - 1] if places.start else START,
            [self._tokens(sequence, place) for place in places],
        )

    def _tokens(self, sequence: Sequence, place: int) -> list[int]:
        """Of a full block."""
        return sequence.tokens[place * self._size : (place + 1) * self._size]

    def _tail(self, sequence: Sequence) -> list[int]:
        """What is computed behind the full blocks."""
        return sequence.tokens[sequence.registered * self._size : sequence.computed]
