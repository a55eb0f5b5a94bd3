"""Followers: of the blocks that continue a prefix, the one that agrees longest with given tokens."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from greenroom.kv.prefix import BlockKey

B = TypeVar("B", bound=Hashable)

_CANDIDATES = 16
"""Blocks that a search compares: behind a much used prefix there may be thousands."""


class Followers(Generic[B]):
    """Blocks, full or not, under the key of the block before them (b"" at the start) and the tokens they hold.

    Every operation takes constant time: a search looks at the blocks that were added or found last, of those whose
    first token is the right one.
    """

    def __init__(self) -> None:
        self._places: dict[B, tuple[BlockKey, tuple[int, ...]]] = {}
        # By prefix and first token, the ones used last at the end.
        self._alike: dict[tuple[BlockKey, int], dict[B, None]] = {}

    def __contains__(self, block: B) -> bool:
        return block in self._places

    def __iter__(self) -> Iterator[B]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def tokens(self, block: B) -> tuple[int, ...]:
        """What a block holds."""
        return self._places[block][1]

    def add(self, block: B, after: BlockKey, tokens: Sequence[int]) -> None:
        """
        Args:
            block: not added yet.
            after: key of the block before it.
            tokens: at least one.
        """
        self._places[block] = after, tuple(tokens)
        self._alike.setdefault((after, tokens[0]), {})[block] = None

    def discard(self, block: B) -> None:
        """Forgets a block, if it is there."""
        if (place := self._places.pop(block, None)) is None:
            return
        start = place[0], place[1][0]
        alike = self._alike[start]
        del alike[block]
        if not alike:
            del self._alike[start]

    def longest(
        self, after: BlockKey, tokens: Sequence[int], usable: Callable[[B], bool] | None = None
    ) -> tuple[B, int] | None:
        """The block that has most of the first ``tokens``, and how many; None if none has the first one.

        Args:
            usable: what else it must be.
        """
        alike = self._alike.get((after, tokens[0])) if tokens else None
        if alike is None:
            return None
        wanted = tuple(tokens)
        best: tuple[B, int] | None = None
        for block, _ in zip(reversed(alike), range(_CANDIDATES), strict=False):
            if usable is not None and not usable(block):
                continue
            count = _common(self._places[block][1], wanted)
            if best is None or count > best[1]:
                best = block, count
            if count == len(wanted):
                break
        if best is not None:
            del alike[best[0]]
            alike[best[0]] = None
        return best

    def check(self) -> None:
        """
        Raises:
            AssertionError: the books contradict one another.
        """
        assert all(self._alike.values())
        found = {block: start for start, alike in self._alike.items() for block in alike}
        assert found == {block: (after, tokens[0]) for block, (after, tokens) in self._places.items()}


def _common(held: tuple[int, ...], wanted: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(held), len(wanted))
    if held[:shorter] == wanted[:shorter]:
        return shorter
    return next(place for place in range(shorter) if held[place] != wanted[place])
