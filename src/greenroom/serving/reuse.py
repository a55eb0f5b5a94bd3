"""PrefixReuse: what a request finds of its beginning in the KV blocks of others, and what it leaves to them."""

from array import array
from collections.abc import Callable

from greenroom.kv.blocks import BlockPool
from greenroom.kv.prefix import block_keys
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

    def find(self, sequence: Sequence) -> tuple[list[int], list[bytes]]:
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
        wanted = sequence.tokens[place * size : min((place + 1) * size, len(sequence.tokens) - 1)]
        match = self._pool.match(sequence.last_key, wanted)
        if match is None or place * size + match[1] <= sequence.computed:
            return
        source, count = match
        if place == len(sequence.blocks) and self._pool.is_idle_tail(source, count):
            self._pool.acquire([source])
            sequence.blocks.append(source)
        elif not self._copy_into(sequence, place, source):
            return
        sequence.computed = place * size + count

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

    def register(self, sequence: Sequence) -> None:
        """Names the blocks that have become full, and offers them to host memory."""
        full = sequence.computed // self._size
        if full <= sequence.registered:
            return
        size, before = self._size, sequence.last_key
        sequence.keys = block_keys(sequence.tokens, size, sequence.keys)
        for index in range(sequence.registered, full):
            key = sequence.keys[index]
            self._pool.register(sequence.blocks[index], key, before, sequence.tokens[index * size : (index + 1) * size])
            before = key
        offered = self._transfers.storable(sequence.registered, full)
        self._transfers.store(
            [sequence.keys[index] for index in offered], [sequence.blocks[index] for index in offered]
        )
        sequence.registered = full

    def register_tail(self, sequence: Sequence) -> None:
        """What is computed of the block behind the full ones may begin another request's."""
        place = sequence.registered
        tokens = sequence.tokens[place * self._size : sequence.computed]
        if tokens:
            self._pool.register_tail(sequence.blocks[place], sequence.last_key, tokens)

    def check_tail(self, sequence: Sequence) -> None:
        """
        Raises:
            AssertionError: a block is registered with tokens that are not the sequence's, or not computed yet.
        """
        for place, block in enumerate(sequence.blocks):
            first, tail = place * self._size, self._pool.tail(block)
            assert first + len(tail) <= sequence.computed or not tail
            assert [*tail] == sequence.tokens[first : first + len(tail)]
