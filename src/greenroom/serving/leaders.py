"""Who computes what several prompts have in common: one of them, its leader; the others wait. Pure."""

from bisect import bisect_left
from collections.abc import Hashable
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass

from greenroom.serving.sequence import Sequence


@dataclass(frozen=True)
class Wait:
    """A sequence needs next what another one needs next too, and can take it over once that has computed it.

    leader: place of the other one, which is older and waits for nobody.
    tokens: that the leader has to compute of what both have in common.
    saves: tokens that the one that waits need not compute then, at least 1.
    """

    leader: int
    tokens: int
    saves: int


def find_waits(running: TypingSequence[Sequence], block_size: int) -> dict[int, Wait]:
    """Of the sequences that need the same block next, all but the oldest one wait, by their place.

    Good for one pass: if the oldest one is gone before it has computed anything, the next one leads. Sequences that
    decode neither wait nor lead.

    Args:
        running: the oldest first. They have taken what others have computed already.
        block_size: tokens of a block.
    """
    leaders: dict[Hashable, int] = {}
    waits: dict[int, Wait] = {}
    for place, sequence in enumerate(running):
        if (block := _next_block(sequence, block_size)) is None:
            continue
        leader = leaders.setdefault(block, place)
        if leader != place:
            end = _common_end(running[leader], sequence, block_size)
            saves = min(end, len(sequence.tokens) - 1) - sequence.computed
            waits[place] = Wait(leader, end - running[leader].computed, saves)
    return waits


def _next_block(sequence: Sequence, block_size: int) -> Hashable | None:
    """Names the block that a sequence computes next, with all that comes before; None if nobody else could use it."""
    if sequence.pending == 1:
        return None
    place = sequence.registered
    if place < len(sequence.keys):
        return sequence.keys[place]
    if len(sequence.tokens) > sequence.prompt_tokens:
        return None  # what is not full is left to others at the end of a prompt only
    return sequence.last_key, *sequence.tokens[place * block_size :]


def _common_end(one: Sequence, other: Sequence, block_size: int) -> int:
    """Where the part ends that two sequences have in common and one can take over; they need the same block next."""
    first, full = one.registered, min(len(one.keys), len(other.keys))
    if first >= full:
        return len(one.tokens)
    # A key stands for all tokens up to its block's end: once they differ, they differ from there on.
    return block_size * bisect_left(range(full), True, lo=first, key=lambda place: one.keys[place] != other.keys[place])
