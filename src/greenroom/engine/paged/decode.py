"""DecodeBuckets: passes of few tokens, each one CUDA graph with all its layers and its experts in it.

Every token is a row of its own, whether a sequence has one or several of them: within a layer all rows write their
keys and values before any of them attends, and each sees as many tokens of its blocks as its length says.

A graph is made for each bucket, when it is first needed or ahead of time. All share one path for the experts, one
pool of memory, and one buffer of inputs, which a pass fills by a single copy from its page-locked twin.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.hostless_steps import BUCKETS, WARM_UP_STEPS, HostlessSteps, bucket_for
from greenroom.engine.paged.attention import PAGED, attends_through, paged_attention
from greenroom.engine.paged.cache import PagedBatch, PagedCache
from greenroom.engine.paged.packing import Packing

_WORDS = 4
"""Of a row beside its table: id, position, slot, length."""


@dataclass
class _Bucket:
    """Passes of ``rows`` tokens, whose inputs are the first words of the shared buffer."""

    rows: int
    ids: torch.Tensor
    positions: torch.Tensor
    batch: PagedBatch
    graph: torch.cuda.CUDAGraph | None = None


class DecodeBuckets:
    """One thread at a time.

    Attributes:
        max_rows: tokens that a pass takes at most.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        max_tokens: int,
        max_context: int,
        *,
        graph: bool,
        watchdog_s: float,
    ) -> None:
        """
        Args:
            model: offloaded; it has run before. What it caches is what it attends to.
            max_tokens: that a pass may ever have; the largest bucket holds so many, as far as there is one.
            max_context: tokens of one sequence at most.
            graph: capture passes.
            watchdog_s: see ``HostlessSteps``.
        """
        self.max_rows = min(max_tokens, BUCKETS[-1])
        self._model = model
        self._cache = cache
        self._cache_name = cache_argument(model)
        self._use_graph = graph
        largest = bucket_for(self.max_rows)
        self._width = -(-max_context // cache.block_size)
        words = largest * (_WORDS + self._width)
        self._inputs = torch.zeros(words, dtype=torch.int64, device=cache.device)
        self._twin = torch.zeros(words, dtype=torch.int64, pin_memory=cache.device.type == "cuda")
        self._largest = largest
        self._logits: torch.Tensor | None = None  # [largest, vocabulary], made by the first pass
        self._buckets: dict[int, _Bucket] = {}
        self._hostless = HostlessSteps(model, largest, watchdog_s)  # last: it holds what has to be closed

    @property
    def hostless(self) -> HostlessSteps:
        """The experts' side."""
        return self._hostless

    def prepare(self) -> None:
        """Makes every bucket ready, so that no later pass waits for a capture.

        Raises:
            EngineError: as ``run``.
        """
        # The largest first: the others' graphs find their memory in what it has left free.
        for rows in reversed(BUCKETS[: BUCKETS.index(bucket_for(self.max_rows)) + 1]):
            self._stage(self._bucket(rows), _padding(self._cache))
            self._make_graph(self._bucket(rows), 1)

    def run(self, packing: Packing) -> torch.Tensor:
        """
        Args:
            packing: by ``pack_rows``, of at most ``max_rows`` tokens.

        Returns:
            [chunks, vocabulary] on the device, until the next pass.

        Raises:
            EngineError: see ``HostlessSteps.run``.
        """
        bucket = self._bucket(bucket_for(packing.singles))
        self._stage(bucket, packing)
        self._make_graph(bucket, packing.singles)
        work = self._forward(bucket) if bucket.graph is None else bucket.graph.replay
        self._hostless.run(work, packing.singles)
        assert self._logits is not None
        if packing.is_decode:
            return self._logits[: packing.singles]
        return self._logits[torch.from_numpy(packing.last).to(self._logits.device)]

    def close(self) -> None:
        """Frees the graphs and what the experts need. Idempotent."""
        self._hostless.close()
        self._buckets.clear()
        self._logits = None

    def _bucket(self, rows: int) -> _Bucket:
        if rows not in self._buckets:
            self._buckets[rows] = self._lay_out(rows)
        return self._buckets[rows]

    def _lay_out(self, rows: int) -> _Bucket:
        inputs = self._inputs[: rows * (_WORDS + self._width)]
        ids, positions, slots, lengths = inputs[: _WORDS * rows].view(_WORDS, rows)
        batch = PagedBatch(
            cache=self._cache,
            slots=slots,
            singles=rows,
            tables=inputs[_WORDS * rows :].view(self._width, rows).T,
            lengths=lengths,
            single_keys=None,
            gather=None,
            spans=(),
        )
        return _Bucket(rows, ids, positions, batch)

    def _stage(self, bucket: _Bucket, packing: Packing) -> None:
        """Fills the bucket's inputs. The pass before has ended, so nobody reads the twin any more."""
        rows, used, columns = bucket.rows, packing.singles, packing.tables.shape[1]
        # Tables are stored block after block, so that those in use are one stretch of the buffer.
        twin = self._twin[: rows * (_WORDS + columns)]
        words, tables = (
            twin[: _WORDS * rows].view(_WORDS, rows).numpy(),
            twin[_WORDS * rows :].view(columns, rows).T.numpy(),
        )
        words[0, :used], words[1, :used], words[2, :used] = packing.ids, packing.positions, packing.slots
        words[3, :used] = packing.lengths
        tables[:used] = packing.tables
        words[:, used:] = np.array([[0], [0], [self._cache.scratch * self._cache.block_size], [1]])
        tables[used:, 0] = self._cache.scratch
        self._inputs[: len(twin)].copy_(twin, non_blocking=True)

    def _make_graph(self, bucket: _Bucket, rows: int) -> None:
        """Captures a pass if that is wanted and has not been done; the passes that warm up write what this one will."""
        if not self._use_graph or bucket.graph is not None:
            return
        for _ in range(WARM_UP_STEPS):
            self._hostless.run(self._forward(bucket), rows, learn=False)
        pool = next((other.graph.pool() for other in self._buckets.values() if other.graph is not None), None)
        bucket.graph = self._hostless.capture(lambda: self._compute(bucket), pool)

    def _forward(self, bucket: _Bucket) -> Callable[[], None]:
        return self._hostless.hostless(lambda: self._compute(bucket))

    def _compute(self, bucket: _Bucket) -> None:
        """From the bucket's inputs to its logits and the cache, all on the device."""
        self._cache.batch = bucket.batch
        with attends_through(self._model, PAGED, paged_attention):
            output = self._model(
                input_ids=bucket.ids[None],
                position_ids=bucket.positions[None],
                use_cache=True,
                paged=bucket.batch,
                **{self._cache_name: self._cache},
            )
        logits = output.logits[0]
        if self._logits is None:
            # Never within a capture, since passes that warm up come before.
            self._logits = logits.new_empty(self._largest, logits.shape[-1])
        self._logits[: bucket.rows] = logits


def _padding(cache: PagedCache) -> Packing:
    """One token that nobody asked for."""
    nothing = np.zeros(0, dtype=np.int64)
    return Packing(
        ids=np.zeros(1, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        slots=np.array([cache.scratch * cache.block_size]),
        last=np.zeros(1, dtype=np.int64),
        singles=1,
        lengths=np.ones(1, dtype=np.int64),
        tables=np.array([[cache.scratch]]),
        gather=nothing,
        spans=(),
    )
