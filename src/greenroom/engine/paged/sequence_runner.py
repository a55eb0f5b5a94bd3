"""SequenceRunner: a batch of sequences of equal length, decoded over KV blocks."""

import torch
from transformers import PreTrainedModel

from greenroom.engine.batch import SequenceChunk
from greenroom.engine.paged.packing import Limits
from greenroom.engine.paged.probe import PagedModel
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.sizes import KV_BLOCK, check_batch
from greenroom.errors import ConfigError, EngineError, MemoryLimitError

_PASS_TOKENS = 2048
"""Of prompts that one pass takes, so that activations have a bound: the one that ``Demand`` assumes."""


class SequenceRunner:
    """What ``StepRunner`` is, for models whose cache blocks hold but a plain K/V cache does not: those with sliding
    windows, attention sinks, latent attention.

    One thread at a time. The model must not be closed before the runner, and its forward may be called between steps.

    Attributes:
        rows: sequences.
        max_length: tokens of each one, prompt included.
        prepared: whether ``prepare`` has been done.
        runs_ahead: no: a step has ended when ``start`` returns.
    """

    runs_ahead = False

    def __init__(
        self,
        model: PreTrainedModel,
        kept: PagedModel,
        rows: int,
        max_length: int,
        *,
        decode_path: bool | None = None,
    ) -> None:
        """
        Args:
            model: offloaded.
            kept: what each of its layers keeps of a token, from ``probe``.
            rows: sequences, at most the largest bucket.
            max_length: tokens of each one, prompt included.
            decode_path: see ``PagedRunner``.

        Raises:
            ConfigError: too many rows.
            MemoryLimitError: the device has no memory for the KV cache and for decode.
        """
        check_batch(rows)
        self.rows = rows
        self.max_length = max_length
        self.prepared = False
        blocks = -(-max_length // KV_BLOCK)
        vocabulary = model.config.get_text_config().vocab_size
        limits = Limits(KV_BLOCK, rows * blocks, rows, _PASS_TOKENS, max_length, vocabulary)
        try:
            # Graphs for more rows than there are would take memory, and short prompts would wait for their captures.
            self._runner = PagedRunner(model, kept, limits, decode_path=decode_path, decode_tokens=rows)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"the GPU has no memory left for {rows} x {max_length} tokens of KV cache and for decode; ask for fewer"
            ) from error
        self._blocks = [tuple(range(row * blocks, (row + 1) * blocks)) for row in range(rows)]
        self._length: int | None = None  # tokens in the KV cache; None while there is nothing to continue

    @property
    def usable(self) -> bool:
        """Whether ``prefill`` may be called: neither closed nor given up."""
        return self._runner.usable

    def prefill(self, prompts: torch.Tensor, *, prepare: bool = True) -> torch.Tensor:
        """Starts all sequences anew.

        Args:
            prompts: int64 [rows, T].
            prepare: also calls ``prepare``; otherwise the first step captures what it needs.

        Returns:
            [rows, vocabulary] on the device: logits of the last position, until the next step.

        Raises:
            ConfigError: the prompts do not fit.
            EngineError: the runner was closed or given up, or a pass failed.
        """
        rows, length = prompts.shape
        if rows != self.rows or not 1 <= length < self.max_length:
            raise ConfigError(
                f"the runner takes [{self.rows}, < {self.max_length}] prompt tokens, not {[*prompts.shape]}"
            )
        if prepare:
            self.prepare()  # first, since it overwrites logits
        passes = -(-length // (_PASS_TOKENS // rows))
        size = -(-length // passes)
        for start in range(0, length, size):
            logits = self._run(prompts[:, start : start + size].tolist(), start)
        return logits

    def prepare(self) -> None:
        """Captures the graphs, on a GPU, once.

        Raises:
            EngineError: a pass failed, or the runner was closed or given up.
        """
        if self.prepared:
            return
        try:
            self._runner.prepare()
        except BaseException:
            self.close()
            raise
        self.prepared = True

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """One token more for every sequence.

        Args:
            ids: int64 [rows, 1], the tokens to feed.

        Returns:
            [rows, vocabulary] logits, until the next step.

        Raises:
            ConfigError: the KV cache is full.
            EngineError: nothing has been prefilled, the runner was closed or given up, or the pass failed: the
                sequences are lost.
        """
        if self._length is None:
            raise EngineError("the runner has no sequences to continue; call prefill first")
        if self._length >= self.max_length:
            raise ConfigError(f"the KV cache of {self.max_length} tokens is full")
        return self._run(ids.tolist(), self._length)

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        """``step``."""
        return self.step(ids)

    def wait(self) -> None:
        """Nothing is under way."""

    def discard(self) -> None:
        """Counts the last step; no other one is under way."""
        self.flush()

    def flush(self) -> None:
        """Counts the last step, which is otherwise done while the next one runs."""
        self._runner.flush()

    def close(self) -> None:
        """Frees graphs and KV cache. Idempotent."""
        self._runner.close()
        self._length = None

    def _run(self, tokens: list[list[int]], start: int) -> torch.Tensor:
        """tokens: as many more of each sequence, which has ``start``."""
        self._length = None  # until it has gone well
        rows = zip(tokens, self._blocks, strict=True)
        logits = self._runner.run([SequenceChunk(own, start, blocks) for own, blocks in rows])
        self._length = start + len(tokens[0])
        return logits
