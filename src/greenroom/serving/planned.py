"""Planned: what a scheduler decides for a sequence in a pass. Ahead: a pass planned before its tokens are known."""

from dataclasses import dataclass

from greenroom.engine.batch import SequenceChunk
from greenroom.serving.sequence import Sequence


@dataclass(frozen=True)
class Planned:
    """A chunk of a pass. ``samples``: it ends with the sequence's last token, so another one can be chosen."""

    sequence: Sequence
    chunk: SequenceChunk
    samples: bool


@dataclass(frozen=True)
class Ahead:
    """A pass that will be run if all sequences of the one before it go on.

    sequences: of ``planned``. tokens: of its chunks, empty until they are known.
    growing: sequences that begin a block. new: those blocks, in their order.
    """

    planned: list[Planned]
    sequences: list[Sequence]
    tokens: list[list[int]]
    growing: list[Sequence]
    new: list[int]

    def fill_in(self) -> list[Planned]:
        """The pass, now that each sequence has one token more."""
        for sequence, tokens in zip(self.sequences, self.tokens, strict=True):
            tokens.append(sequence.tokens[-1])
        return self.planned


def plan_decode(sequences: list[Sequence], growing: list[Sequence], new: list[int]) -> Ahead:
    """The next token of each sequence, whose last one is yet to be chosen; see ``Ahead``. Changes nothing."""
    begun = dict(zip(growing, new, strict=True))
    tokens: list[list[int]] = [[] for _ in sequences]
    planned = []
    for sequence, own in zip(sequences, tokens, strict=True):
        blocks = sequence.blocks[:]
        if (block := begun.get(sequence)) is not None:
            blocks.append(block)
        planned.append(Planned(sequence, SequenceChunk(own, len(sequence.tokens), blocks), samples=True))
    return Ahead(planned, sequences, tokens, growing, new)
