"""DecodeBuckets: passes of few tokens, each one CUDA graph with all its layers and its experts in it.

Every token is a row of its own, whether a sequence has one or several of them: within a layer all rows write their
keys and values before any of them attends, and each sees as many tokens of its blocks as its length says.

A graph is made for each bucket, when it is first needed or ahead of time. All share one path for the experts, one
pool of memory, and one buffer of inputs.

Where no token sees another one of the pass, it may also run as two halves at once (see ``dbo``): two forward passes on
two streams, each with its own path for the experts. Of what they share neither writes what the other reads or writes:
they have rows of their own in the inputs, the logits and the KV cache.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.dbo import DboPolicy
from greenroom.engine.hostless_steps import WARM_UP_STEPS, HostlessSteps
from greenroom.engine.paged.attention import PAGED, attends_through, paged_attention
from greenroom.engine.paged.cache import PagedCache
from greenroom.engine.paged.inputs import DecodeInputs, Division, Layout, Rows, Staged
from greenroom.engine.paged.packing import Packing
from greenroom.engine.sizes import BUCKETS, bucket_for, buckets_to

logger = logging.getLogger(__name__)


@dataclass
class _Bucket:
    """Passes of so many tokens as ``layout`` has rows, and their graphs: in one piece, and as halves."""

    layout: Layout
    graph: torch.cuda.CUDAGraph | None = None
    halves_graph: torch.cuda.CUDAGraph | None = None

    def graph_of(self, halves: bool) -> torch.cuda.CUDAGraph | None:
        return self.halves_graph if halves else self.graph


@dataclass(frozen=True)
class Ready:
    """A pass that only lacks being sent to the device. may_halve: it could run either way."""

    packing: Packing
    bucket: _Bucket
    may_halve: bool
    staged: Staged


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
        dbo: DboPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            model: offloaded; it has run before. What it caches is what it attends to.
            max_tokens: that a pass may ever have; the largest bucket holds so many, as far as there is one.
            max_context: tokens of one sequence at most.
            graph: capture passes.
            watchdog_s: see ``HostlessSteps``.
            dbo: which passes run as halves; None for none.
            clock: seconds.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the buffers.
        """
        self.max_rows = min(max_tokens, BUCKETS[-1])
        self._model = model
        self._cache = cache
        self._cache_name = cache_argument(model)
        self._use_graph = graph
        largest = bucket_for(self.max_rows)
        self._inputs = DecodeInputs(cache, largest, -(-max_context // cache.block_size))
        self._largest = largest
        self._logits: torch.Tensor | None = None  # [largest, vocabulary], made by the first pass
        self._buckets: dict[int, _Bucket] = {}
        self._dbo = dbo or DboPolicy.off("not asked for")
        self._clock = clock
        self._hostless = HostlessSteps(model, largest, watchdog_s)  # last: it holds what has to be closed
        if self._dbo.in_use:
            self._open_second()

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
        for rows in reversed(buckets_to(self.max_rows)):
            self._prepare(self._bucket(rows), Division(1))
            if self._dbo.may_halve(rows):
                self._prepare(self._bucket(rows), Division.of(1, halves=True))

    def ready(self, packing: Packing) -> Ready:
        """Does what a pass needs of the host before it; the one before may still run.

        Args:
            packing: by ``pack_rows``, of at most ``max_rows`` tokens.

        Returns:
            For ``run``, before anything else is made ready.
        """
        tokens = packing.singles
        rows = bucket_for(tokens)
        bucket = self._bucket(rows)
        may_halve = packing.is_decode and tokens > 1 and self._dbo.may_halve(rows)
        division = Division.of(tokens, may_halve and self._dbo.halves(rows))
        return Ready(packing, bucket, may_halve, self._inputs.fill(bucket.layout, packing, division))

    def run(
        self,
        packing: Packing,
        meanwhile: Callable[[], None] | None = None,
        behind: Callable[[torch.Tensor], None] | None = None,
        ready: Ready | None = None,
    ) -> torch.Tensor:
        """
        Args:
            packing: by ``pack_rows``, of at most ``max_rows`` tokens.
            meanwhile, behind: see ``BatchRunner.run``.
            ready: what ``ready`` made of the packing, whose ids may have changed since.

        Returns:
            [chunks, vocabulary] on the device, until the next pass.

        Raises:
            EngineError: see ``HostlessSteps.run``.
        """
        if ready is None or not self._is_still(ready):
            ready = self.ready(packing)
        else:
            ready.staged.set_ids(packing.ids)
        bucket, division = ready.bucket, ready.staged.division
        self._inputs.send(ready.staged)
        self._make_graph(bucket, division)
        graph = bucket.graph_of(division.halves)
        work = self._forward(bucket, division.halves) if graph is None else graph.replay
        logits = None

        def enqueued() -> None:
            nonlocal logits
            if meanwhile is not None:
                meanwhile()
            try:
                logits = self._logits_of(ready)
            except torch.OutOfMemoryError:
                return  # the pass must not be given up for that
            if behind is not None:
                behind(logits)

        started = self._clock()
        self._run(work, division, meanwhile=enqueued)
        if ready.may_halve and self._dbo.took(bucket.layout.rows, self._clock() - started):
            self._settle(bucket)
        if logits is None:
            logits = self._logits_of(ready)
            if behind is not None:
                behind(logits)
        return logits

    def close(self) -> None:
        """Frees the graphs and what the experts need. Idempotent."""
        self._hostless.close()
        self._buckets.clear()
        self._logits = None

    def _bucket(self, rows: int) -> _Bucket:
        if rows not in self._buckets:
            self._buckets[rows] = _Bucket(self._inputs.lay_out(rows))
        return self._buckets[rows]

    def _is_still(self, ready: Ready) -> bool:
        """Whether a pass would be divided now as it has been. What the one before has measured may have decided it."""
        rows = ready.bucket.layout.rows
        if not ready.may_halve:
            return True
        return self._dbo.may_halve(rows) and ready.staged.division.halves == self._dbo.halves(rows)

    def _open_second(self) -> None:
        """What second halves need; ``auto`` does without them if there is no memory for it."""
        try:
            self._hostless.open_second(self._dbo.most_rows // 2)
        except torch.OutOfMemoryError:
            if not self._dbo.give_up("the GPU has no memory left for what a second half needs"):
                self._hostless.close()
                raise

    def _prepare(self, bucket: _Bucket, division: Division) -> None:
        self._inputs.send(self._inputs.fill(bucket.layout, self._inputs.padding(), division))
        self._make_graph(bucket, division)

    def _run(
        self,
        work: Callable[[], None],
        division: Division,
        learn: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._hostless.run(work, division.first, learn, division.second, meanwhile)

    def _make_graph(self, bucket: _Bucket, division: Division) -> None:
        """Captures a pass if that is wanted and has not been done; the passes that warm up write what this one will."""
        halves = division.halves
        if not self._use_graph or bucket.graph_of(halves) is not None:
            return
        if halves and self._logits is None:
            # Their memory must belong to no stream that still uses it for something else.
            self._run(self._forward(bucket, halves=False), Division(0), learn=False)
        for _ in range(WARM_UP_STEPS):
            self._run(self._forward(bucket, halves), division, learn=False)
        pool = next((other.graph.pool() for other in self._buckets.values() if other.graph is not None), None)
        graph = self._hostless.capture(*self._passes(bucket, halves), pool=pool)
        if halves:
            bucket.halves_graph = graph
        else:
            bucket.graph = graph

    def _settle(self, bucket: _Bucket) -> None:
        """It has been found out how the bucket's passes run. Those in one piece are needed in either case."""
        rows = bucket.layout.rows
        logger.info("decode passes of up to %d tokens: %s", rows, self._dbo.choice(rows))
        if not self._dbo.may_halve(rows):
            bucket.halves_graph = None
        if not self._dbo.in_use:
            self._hostless.close_second()

    def _forward(self, bucket: _Bucket, halves: bool) -> Callable[[], None]:
        return self._hostless.hostless(*self._passes(bucket, halves))

    def _passes(self, bucket: _Bucket, halves: bool) -> list[Callable[[], None]]:
        parts = bucket.layout.halves if halves else (bucket.layout.whole,)
        return [partial(self._compute, rows) for rows in parts]

    @torch.no_grad()
    def _compute(self, rows: Rows) -> None:
        """From inputs to logits and the cache, all on the device."""
        self._cache.batch = rows.batch
        with attends_through(self._model, PAGED, paged_attention):
            output = self._model(
                input_ids=rows.ids[None],
                position_ids=rows.positions[None],
                use_cache=True,
                paged=rows.batch,
                **{self._cache_name: self._cache},
            )
        logits = output.logits[0]
        if self._logits is None:
            # Never within a capture, since passes that warm up come before.
            self._logits = logits.new_empty(self._largest, logits.shape[-1])
        self._logits[rows.start : rows.start + len(logits)] = logits

    def _logits_of(self, ready: Ready) -> torch.Tensor:
        """[chunks, vocabulary]: of a pass that has been enqueued, without its padding."""
        assert self._logits is not None
        pieces = ready.staged.division.pieces(ready.bucket.layout.rows)
        if len(pieces) == 1 or pieces[0].stop == pieces[1].start:
            logits = self._logits[: pieces[-1].stop]
        else:
            logits = torch.cat([self._logits[piece] for piece in pieces])
        if ready.packing.is_decode:
            return logits
        last = torch.from_numpy(ready.packing.last)
        # Page-locked, since a copy from other memory might wait for the pass.
        last = last.pin_memory() if logits.device.type == "cuda" else last
        return logits[last.to(logits.device, non_blocking=True)]
