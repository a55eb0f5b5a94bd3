"""Decode and prefill speed of a whole model with random weights, its experts offloaded."""

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from greenroom.bench.bandwidth import measure_bandwidth
from greenroom.bench.result import LayersResult, gpu_name
from greenroom.bench.served import ServedDecode
from greenroom.bench.shapes import shape_config
from greenroom.bench.synthetic import override_routing, random_model
from greenroom.config import OffloadConfig
from greenroom.engine.cache_argument import cache_argument
from greenroom.engine.dbo import check_dbo
from greenroom.engine.offload import Offload, close, offload_of
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
    """

    bound_from: dict[str, float]
    miss_bytes: float
    hit_rate: float
    weights_offload: str
    weight_bytes: int
    dbo: dict[str, Any] | None = None


def bench_decode(
    shape: str,
    batch: int,
    knobs: OffloadConfig,
    routing: str,
    steps: int = 16,
    repeats: int = 5,
    graph: bool = True,
    dbo: str | None = None,
) -> ModelBenchmark:
    """Times ``repeats`` runs of ``steps`` decode steps of ``batch`` sequences.

    On a GPU each step is a CUDA graph; with ``graph=False``, and without a GPU, the host decides layer by layer.

    Args:
        dbo: steps are run as ``serve`` runs them, and batches as two halves at once: "auto", "on" or "off". None: as
            ``generate`` runs them.
    """
    _require_positive(batch=batch, steps=steps, repeats=repeats)
    if dbo is not None:
        check_dbo(dbo)
        if not graph:
            raise ConfigError("dbo is about decode graphs; leave out eager")
    with _Bench("decode", shape, batch, steps, knobs, routing) as bench:
        if dbo is not None:
            return _bench_served_decode(bench, batch, steps, repeats, dbo)
        if not graph or bench.model.device.type != "cuda":
            return _bench_eager_decode(bench, batch, steps, repeats)
        from greenroom.engine.step_runner import StepRunner  # needs triton, which only GPU builds of torch bring

        runner = StepRunner(bench.model, batch, _CONTEXT + 1 + steps * (repeats + _WARM_UP))
        try:
            runner.prefill(bench.random_ids(batch, _CONTEXT))

            def run() -> None:
                for _ in range(steps):
                    runner.step()

            return bench.measure(run, batch * steps, steps, repeats)
        finally:
            runner.close()


def _bench_eager_decode(bench: "_Bench", batch: int, steps: int, repeats: int) -> ModelBenchmark:
    cache = DynamicCache(config=bench.model.config)
    token = bench.forward(bench.random_ids(batch, _CONTEXT), cache)

    def run() -> None:
        nonlocal token
        for _ in range(steps):
            token = bench.forward(token, cache)

    return bench.measure(run, batch * steps, steps, repeats)


def _bench_served_decode(bench: "_Bench", batch: int, steps: int, repeats: int, dbo: str) -> ModelBenchmark:
    served = ServedDecode(bench.model, batch, _CONTEXT, steps * (repeats + _WARM_UP), dbo)
    try:

        def run() -> None:
            for _ in range(steps):
                served.step()

        result = bench.measure(run, batch * steps, steps, repeats)
        return replace(result, dbo=served.dbo.to_dict())
    finally:
        served.close()


def bench_prefill(
    shape: str, batch: int, tokens: int, knobs: OffloadConfig, routing: str, repeats: int = 5
) -> ModelBenchmark:
    """Times ``repeats`` prefills of ``batch`` prompts of ``tokens`` tokens each."""
    _require_positive(batch=batch, tokens=tokens, repeats=repeats)
    with _Bench("prefill", shape, batch, tokens, knobs, routing) as bench:
        prompt = bench.random_ids(batch, tokens)

        def run() -> None:
            bench.forward(prompt, DynamicCache(config=bench.model.config))

        return bench.measure(run, batch * tokens, 1, repeats)


class _Bench:
    """A random model for the time of one measurement."""

    def __init__(self, bench: str, shape: str, batch: int, tokens: int, knobs: OffloadConfig, routing: str) -> None:
        self._labels: dict[str, Any] = {
            "bench": bench,
            "shape": shape,
            "batch": batch,
            "tokens": tokens,
            "routing": routing,
        }
        self.model: PreTrainedModel = random_model(shape_config(shape), knobs)
        self._cache_name = cache_argument(self.model)
        try:
            override_routing(self.model, routing)
        except BaseException:
            close(self.model)
            raise

    def __enter__(self) -> "_Bench":
        return self

    def __exit__(self, *error: object) -> None:
        close(self.model)

    def random_ids(self, batch: int, tokens: int) -> torch.Tensor:
        ids = torch.randint(0, self.model.config.vocab_size, (batch, tokens))
        return ids.to(self.model.device)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The likeliest next token of each sequence, [batch, 1]."""
        logits = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}).logits
        return logits[:, -1:].argmax(-1)

    def measure(self, run: Any, tokens: int, steps: int, repeats: int) -> ModelBenchmark:
        """Median of ``repeats`` timings of ``run``, which makes ``tokens`` tokens in ``steps`` steps."""
        offload = offload_of(self.model)
        for _ in range(_WARM_UP):
            run()
        offload.manager.counters.reset()
        seconds = [self._seconds(run) for _ in range(repeats)]
        median = statistics.median(seconds)
        layers = offload.manager.counters.layers()
        blocks = [layer.format.block_bytes for layer in offload.spec.layers]
        miss_bytes = sum(c.misses * size for c, size in zip(layers, blocks, strict=True)) / (steps * repeats)
        total = offload.manager.counters.total()
        selection = offload.weights.selection
        bound, rates = _bound(offload, miss_bytes * steps, selection.pass_bytes * steps, tokens)
        return ModelBenchmark(
            **self._labels,
            cache_expert_num=max(offload.plan.num_slots),
            value=tokens / median,
            unit="tok/s",
            bound=bound,
            bound_from=rates,
            miss_bytes=miss_bytes,
            hit_rate=total.hits / max(total.hits + total.misses, 1),
            repeats=repeats,
            threads=offload.engine.threads,
            isa=offload.engine.isa.label,
            device=str(offload.device),
            gpu=gpu_name(offload.device),
            weights_offload=str(selection),
            weight_bytes=selection.pass_bytes,
        )

    def _seconds(self, run: Any) -> float:
        self._settle()
        started = time.perf_counter()
        run()
        self._settle()
        return time.perf_counter() - started

    def _settle(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _bound(
    offload: Offload, miss_bytes: float, weight_bytes: float, tokens: int
) -> tuple[float | None, dict[str, float]]:
    """Tokens a second if only the missing bytes took time, and the rates it was computed from.

    Experts take either lane, other weights only that to the device.
    """
    rates = measure_bandwidth(offload.engine.threads)
    on_gpu = offload.device.type == "cuda"
    lanes = {"cpu": rates.cpu_together or rates.cpu_alone} | ({"copy": rates.copy_together or 0.0} if on_gpu else {})
    if not on_gpu:
        weight_bytes = 0.0
    seconds = (miss_bytes + weight_bytes) / (sum(lanes.values()) * 1e9)
    if weight_bytes:
        seconds = max(seconds, weight_bytes / (lanes["copy"] * 1e9))
    return (tokens / seconds if seconds else None), lanes


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
