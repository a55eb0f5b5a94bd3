"""Random traffic through a runner: sequences begin, grow in chunks, end, and leave their blocks to others."""

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import BatchRunner, SequenceChunk
from tests.engine.offloaded import random_ids


@dataclass
class Growing:
    """A sequence with all its tokens; ``done`` of them have been run."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0

    def next_chunk(self, count: int, block_size: int, pool: list[int]) -> SequenceChunk:
        """Takes blocks out of ``pool`` as they are needed."""
        start, self.done = self.done, min(self.done + count, len(self.tokens))
        while len(self.blocks) * block_size < self.done:
            self.blocks.append(pool.pop())
        return SequenceChunk(self.tokens[start : self.done], start, tuple(self.blocks))


class Traffic:
    """Drives ``runner`` and holds every row that it returns against ``stock``, run over the whole sequence."""

    def __init__(
        self, runner: BatchRunner, stock: PreTrainedModel, seed: int, longest: int = 40, atol: float = 2e-4
    ) -> None:
        self.runner, self.stock, self.longest, self.atol = runner, stock, longest, atol
        self.random = random.Random(seed)
        self.pool = list(range(runner.num_blocks))
        self.random.shuffle(self.pool)
        self.growing: list[Growing] = []
        self.begun = 0
        self.announced: tuple[list[Growing], list[SequenceChunk]] | None = None

    def begin(self, length: int | None = None) -> Growing:
        self.begun += 1
        length = length or self.random.randint(1, self.longest)
        sequence = Growing(random_ids(1, length, self.random.randint(0, 10**6))[0].tolist(), [])
        self.growing.append(sequence)
        return sequence

    def end(self, sequence: Growing) -> None:
        self.growing.remove(sequence)
        self.pool.extend(sequence.blocks)
        self.random.shuffle(self.pool)

    def run(self, counts: list[tuple[Growing, int]], then: list[Growing] | None = None) -> None:
        """``then``: announces that the next pass will be a token of each of these."""
        chunks = self._chunks(counts)

        def behind(logits: torch.Tensor) -> None:
            if then is not None:
                self.announced = then, [self._coming(sequence) for sequence in then]
                self.runner.expect(self.announced[1])

        logits = self.runner.run(chunks, behind=behind)
        assert logits.shape[0] == len(chunks)
        for row, (sequence, _) in zip(logits, counts, strict=True):
            self.check(row, sequence)

    def _chunks(self, counts: list[tuple[Growing, int]]) -> list[SequenceChunk]:
        """Those that were announced, if they are the same."""
        announced, self.announced = self.announced, None
        if announced is None or counts != [(sequence, 1) for sequence in announced[0]]:
            return [sequence.next_chunk(count, self.runner.block_size, self.pool) for sequence, count in counts]
        for sequence, chunk in zip(*announced, strict=True):
            assert isinstance(chunk.token_ids, list)
            chunk.token_ids.append(sequence.tokens[sequence.done])
            sequence.done += 1
        return announced[1]

    def _coming(self, sequence: Growing) -> SequenceChunk:
        """The next token's chunk, without the token."""
        chunk = sequence.next_chunk(1, self.runner.block_size, self.pool)
        sequence.done -= 1
        return SequenceChunk([], chunk.start, chunk.blocks)

    @torch.no_grad()
    def check(self, row: torch.Tensor, sequence: Growing) -> None:
        seen = torch.tensor([sequence.tokens[: sequence.done]], device=row.device)
        torch.testing.assert_close(row, self.stock(seen).logits[0, -1], rtol=1e-3, atol=self.atol)

    def step(self, most: int) -> None:
        """Some of the sequences, in any order, some of them anew."""
        while len(self.growing) < most and self.random.random() < 0.7:
            self.begin()
        if not self.growing:
            self.begin()
        taking = self.random.sample(self.growing, self.random.randint(1, len(self.growing)))
        self.run([(sequence, self.random.choice([1, 1, 1, 2, 7, 19])) for sequence in taking])
        for sequence in list(self.growing):
            if sequence.done == len(sequence.tokens):
                self.end(sequence)
