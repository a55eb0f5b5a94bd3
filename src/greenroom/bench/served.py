"""Decode steps as ``serve`` runs them: a batch of sequences whose keys and values are in blocks."""

import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.dbo import DECIDED_AFTER, DboPolicy
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.runners import make_runner
from greenroom.engine.sizes import KV_BLOCK, bucket_for, check_batch
from greenroom.errors import ConfigError


class ServedDecode:
    """``batch`` sequences that grow by a token a step; ready, and with ``dbo`` decided, once made."""

    def __init__(self, model: PreTrainedModel, batch: int, context: int, steps: int, dbo: str) -> None:
        """
        Args:
            context: tokens of each sequence before the first step.
            steps: that will be run.
            dbo: "auto", "on" or "off".

        Raises:
            ConfigError: too many sequences, or ``dbo`` is on and cannot be.
        """
        check_batch(batch)
        longest = context + 1 + steps + DECIDED_AFTER
        blocks = -(-longest // KV_BLOCK)
        runner = make_runner(
            model,
            max_tokens=batch * context,
            max_context=longest,
            num_blocks=batch * blocks,
            block_size=KV_BLOCK,
            max_sequences=batch,
            dbo=dbo,
        )
        if not isinstance(runner, PagedRunner):
            runner.close()
            raise ConfigError(f"{type(model).__name__} is served one sequence at a time, so dbo has nothing to halve")
        self._runner = runner
        self._blocks = [tuple(range(row * blocks, (row + 1) * blocks)) for row in range(batch)]
        self._length = context
        prompts = torch.randint(0, model.config.vocab_size, (batch, context)).tolist()
        chunks = [SequenceChunk(ids, 0, own) for ids, own in zip(prompts, self._blocks, strict=True)]
        self._tokens = self._likeliest(chunks)
        runner.prepare()
        size = bucket_for(batch)
        for _ in range(DECIDED_AFTER):
            if not runner.dbo.may_halve(size) or runner.dbo.choice(size).halves is not None:
                break
            self.step()

    @property
    def dbo(self) -> DboPolicy:
        """What has been decided."""
        return self._runner.dbo

    def step(self) -> None:
        """One token more for every sequence, the likeliest one."""
        rows = zip(self._tokens, self._blocks, strict=True)
        self._tokens = self._likeliest([SequenceChunk([token], self._length, own) for token, own in rows])
        self._length += 1

    def close(self) -> None:
        """Frees graphs and KV cache. Idempotent."""
        self._runner.close()

    def _likeliest(self, chunks: list[SequenceChunk]) -> list[int]:
        tokens: list[int] = self._runner.run(chunks).argmax(-1).tolist()
        return tokens
