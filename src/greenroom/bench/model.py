"""Decode and prefill speed of a whole model with random weights, its experts offloaded."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from greenroom.bench.bandwidth import measure_bandwidth
from greenroom.bench.result import LayersResult, offload_labels
from greenroom.bench.served import ServedDecode
from greenroom.bench.shapes import shape_config
from greenroom.bench.stages import STEPS, Stages, decode_stages, prefill_stages
from greenroom.bench.synthetic import override_routing, random_model
from greenroom.config import OffloadConfig
from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.dbo import DboPolicy
from greenroom.engine.growing_cache import make_cache
from greenroom.engine.offload import close, offload_of
from greenroom.engine.request import choose_device
from greenroom.engine.sizes import buckets_to, check_batch
from greenroom.errors import ConfigError

_WARM_UP = 2
_CONTEXT = 64
"""Tokens in the KV cache before decode is timed."""


@dataclass(frozen=True, kw_only=True)
class ModelBenchmark(LayersResult):
    """One result. ``value`` is tokens a second over all sequences, the median of ``repeats``.

    miss_bytes: expert bytes a step (or prefill) that had no slot, on average. weight_bytes: of other weights, offloaded
    as ``weights_offload`` says, that cross to the device in each. bound: tokens a second if nothing took time but those
    bytes, over both lanes at once with the rates in ``bound_from`` (GB/s); None without any.
    dbo: of decode as ``serve`` runs it, what was asked for and chosen (see ``engine.dbo``); None for any other.
    stages: where the time goes, of prefill and of decode by graph (see ``bench.stages``); None for any other.
    """

    bound_from: dict[str, float]
    miss_bytes: float
    hit_rate: float
    weights_offload: str
    weight_bytes: int
    dbo: dict[str, Any] | None = None
    stages: Stages | None = None


def bench_decode(
    shape: str,
    batches: Sequence[int],
    knobs: OffloadConfig,
    routing: str,
    steps: int = 16,
    repeats: int = 5,
    graph: bool = True,
    dbo: str | None = None,
) -> Iterator[ModelBenchmark]:
    """Times ``repeats`` runs of ``steps`` decode steps with each number of sequences in ``batches``.

    On a GPU each step is a CUDA graph; with ``graph=False``, and without a GPU, the host decides layer by layer.
    One result a batch, all of one model: the routing begins anew for each, the cache holds what the one before left.

    Args:
        dbo: steps are run as ``serve`` runs them, and batches as two halves at once: "auto", "on" or "off". None: as
            ``generate`` runs them.

    Raises:
        ConfigError: before the model is made, numbers or flags that make no sense.
    """
    for batch in batches:
        _require_positive(batch=batch, steps=steps, repeats=repeats)
        if dbo is not None or (graph and choose_device(knobs.device).type == "cuda"):
            _check_decode_batch(batch, dbo)
    if dbo is not None and not graph:
        raise ConfigError("dbo is about decode graphs; leave out eager")

    def measure(bench: _Bench, batch: int) -> ModelBenchmark:
        if dbo is not None:
            return _bench_served_decode(bench, batch, steps, repeats, dbo)
        if graph and bench.model.device.type == "cuda":
            return _bench_graph_decode(bench, batch, steps, repeats)
        return _bench_eager_decode(bench, batch, steps, repeats)

    return _results("decode", shape, knobs, routing, batches, measure)


def _check_decode_batch(batch: int, dbo: str | None) -> None:
    """What a runner would refuse, known without a model."""
    check_batch(batch)
    if dbo is not None:
        DboPolicy(dbo, buckets_to(batch))  # raises if there is nothing to halve


def _bench_graph_decode(bench: "_Bench", batch: int, steps: int, repeats: int) -> ModelBenchmark:
    from greenroom.engine.step_runner import StepRunner  # needs triton, which only GPU builds of torch bring

    runner = StepRunner(bench.model, batch, _CONTEXT + 1 + steps * (repeats + _WARM_UP) + STEPS)
    try:
        runner.prefill(bench.random_ids(batch, _CONTEXT))

        def run() -> None:
            for _ in range(steps):
                runner.start()
            runner.wait()

        result = bench.measure(run, batch, steps, steps, repeats)
        return replace(result, stages=decode_stages(runner))
    finally:
        runner.close()


def _bench_eager_decode(bench: "_Bench", batch: int, steps: int, repeats: int) -> ModelBenchmark:
    cache = make_cache(bench.model)
    token = bench.forward(bench.random_ids(batch, _CONTEXT), cache)

    def run() -> None:
        nonlocal token
        for _ in range(steps):
            token = bench.forward(token, cache)

    return bench.measure(run, batch, steps, steps, repeats)


def _bench_served_decode(bench: "_Bench", batch: int, steps: int, repeats: int, dbo: str) -> ModelBenchmark:
    served = ServedDecode(bench.model, batch, _CONTEXT, steps * (repeats + _WARM_UP), dbo)
    try:

        def run() -> None:
            for _ in range(steps):
                served.step()

        result = bench.measure(run, batch, steps, steps, repeats)
        return replace(result, dbo=served.dbo.to_dict())
    finally:
        served.close()


def bench_prefill(
    shape: str, batch: int, lengths: Sequence[int], knobs: OffloadConfig, routing: str, repeats: int = 5
) -> Iterator[ModelBenchmark]:
    """Times ``repeats`` prefills of ``batch`` prompts with each number of tokens in ``lengths``.

    One result a length, all of one model: the routing begins anew for each, the cache holds what the one before left.

    Raises:
        ConfigError: before the model is made, numbers that make no sense.
    """
    for length in lengths:
        _require_positive(batch=batch, tokens=length, repeats=repeats)

    def measure(bench: _Bench, length: int) -> ModelBenchmark:
        prompt = bench.random_ids(batch, length)

        def run() -> None:
            bench.forward(prompt, DynamicCache(config=bench.model.config))

        result = bench.measure(run, batch, length, 1, repeats)
        return replace(result, stages=prefill_stages(offload_of(bench.model).manager.tier, run))

    return _results("prefill", shape, knobs, routing, lengths, measure)


def _results(
    name: str,
    shape: str,
    knobs: OffloadConfig,
    routing: str,
    values: Sequence[int],
    measure: Callable[["_Bench", int], ModelBenchmark],
) -> Iterator[ModelBenchmark]:
    """``measure`` of each value, over one model."""
    with _Bench(name, shape, knobs, routing) as bench:
        for value in values:
            bench.restart_routing()
            yield measure(bench, value)


class _Bench:
    """A random model for the time of some measurements."""

    def __init__(self, name: str, shape: str, knobs: OffloadConfig, routing: str) -> None:
        self._labels: dict[str, Any] = {"bench": name, "shape": shape, "routing": routing}
        self._routing = routing
        self.model: PreTrainedModel = random_model(shape_config(shape), knobs)
        self._cache_name = cache_argument(self.model)

    def __enter__(self) -> "_Bench":
        return self

    def __exit__(self, *error: object) -> None:
        close(self.model)

    def restart_routing(self) -> None:
        """Experts are chosen as they would be in a new model, from the table's first row on.

        Raises:
            ConfigError: as ``override_routing``.
        """
        override_routing(self.model, self._routing)

    def random_ids(self, batch: int, tokens: int) -> torch.Tensor:
        ids = torch.randint(0, self.model.config.vocab_size, (batch, tokens))
        return ids.to(self.model.device)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The likeliest next token of each sequence, [batch, 1]."""
        logits = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}).logits
        return logits[:, -1:].argmax(-1)

    def measure(self, run: Callable[[], None], batch: int, tokens: int, steps: int, repeats: int) -> ModelBenchmark:
        """Median of ``repeats`` timings of ``run``: ``tokens`` tokens of each of ``batch`` sequences, in ``steps``."""
        offload = offload_of(self.model)
        for _ in range(_WARM_UP):
            run()
        offload.manager.counters.reset()
        median = statistics.median(self._seconds(run) for _ in range(repeats))
        layers = offload.manager.counters.layers()
        blocks = [layer.format.block_bytes for layer in offload.spec.layers]
        miss_bytes = sum(c.misses * size for c, size in zip(layers, blocks, strict=True)) / (steps * repeats)
        total = offload.manager.counters.total()
        selection = offload.weights.selection
        seconds_at_best = _least_seconds(self._lanes, miss_bytes * steps, selection.pass_bytes * steps)
        return ModelBenchmark(
            **self._labels,
            batch=batch,
            tokens=tokens,
            value=batch * tokens / median,
            unit="tok/s",
            bound=batch * tokens / seconds_at_best if seconds_at_best else None,
            bound_from=self._lanes,
            miss_bytes=miss_bytes,
            hit_rate=total.hits / max(total.hits + total.misses, 1),
            repeats=repeats,
            **offload_labels(offload),
            weights_offload=str(selection),
            weight_bytes=selection.pass_bytes,
        )

    @cached_property
    def _lanes(self) -> dict[str, float]:
        """GB/s of each lane while all run, measured once."""
        offload = offload_of(self.model)
        rates = measure_bandwidth(offload.engine.threads)
        on_gpu = offload.device.type == "cuda"
        copy = {"copy": rates.copy_together or 0.0} if on_gpu else {}
        return {"cpu": rates.cpu_together or rates.cpu_alone} | copy

    def _seconds(self, run: Callable[[], None]) -> float:
        self._settle()
        started = time.perf_counter()
        run()
        self._settle()
        return time.perf_counter() - started

    def _settle(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _least_seconds(lanes: dict[str, float], miss_bytes: float, weight_bytes: float) -> float:
    """If only those bytes took time. Experts take either lane, other weights only that to the device, if there is one.

    lanes: GB/s by name.
    """
    if "copy" not in lanes:
        return miss_bytes / (lanes["cpu"] * 1e9)
    together = (miss_bytes + weight_bytes) / (sum(lanes.values()) * 1e9)
    return max(together, weight_bytes / (lanes["copy"] * 1e9)) if weight_bytes else together


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
