"""Time and accuracy of the CPU expert engine, beside torch on the same weights."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from greenroom.bench.result import BenchResult
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat, ExpertViews
from greenroom.experts.native import Isa
from greenroom.experts.store import HostStore
from greenroom.hardware import engine_cores
from greenroom.numa import engine_homes

_WARM_UP = 2
_CHECKED_TOKENS = 4
_SETTLE_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class ExpertBenchmark(BenchResult):
    """One layer's routed experts on the CPU; ``value`` is ``us``. Each run has routing and hidden states of its own.

    isa, threads: what ran. hidden, inter, experts, topk, tokens, dtype: the layer and the batch.
    experts_touched: distinct experts of a run; weight_bytes: their weights. Medians over runs.
    us, torch_us: median time in microseconds of the engine and of torch; speedup: their ratio.
    gb_s: weight_bytes / us, in 1e9 bytes per second; tflop_s: 2 * 3 * hidden * inter a (token, expert) pair.
    max_error: largest absolute difference from a float64 reference on the same weights and inputs, over a few
        tokens, relative to the reference's root mean square.
    torch_error: the same of torch.
    """

    isa: str
    threads: int
    hidden: int
    inter: int
    experts: int
    topk: int
    tokens: int
    dtype: str
    experts_touched: int
    weight_bytes: int
    us: float
    gb_s: float
    tflop_s: float
    max_error: float
    torch_us: float
    torch_error: float
    speedup: float


def run_expert_benchmark(
    hidden: int = 2048,
    inter: int = 768,
    experts: int = 128,
    topk: int = 8,
    tokens: int = 1,
    threads: int | None = None,
    isa: str = "auto",
    repeats: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> ExpertBenchmark:
    """Runs the engine and torch in turn on one layer of gated SiLU experts.

    Every run has fresh random hidden states and fresh uniform routing, ``topk`` distinct experts a token, so a
    small batch finds its weights in memory rather than in a cache. Each timed run follows at once on another one of
    the same side.

    Args:
        threads: workers of the engine and threads of torch; None takes as many as loading a model would.
        isa: an instruction set's label, or "auto".
        repeats: timed runs of each side, at least 5. None: 51 for up to 16 tokens, which take milliseconds, else 15.

    Raises:
        ValueError: ``repeats`` < 5, ``topk`` > ``experts``, or a size that is not positive.
        ConfigError: unknown ``isa``. EngineError: one that this machine does not run.
    """
    if repeats is None:
        repeats = 51 if tokens <= 16 else 15
    if repeats < 5:
        raise ValueError(f"a median needs at least 5 runs, not {repeats}")
    if not 1 <= topk <= experts or tokens < 1:
        raise ValueError(f"nothing to measure with {tokens} tokens and {topk} of {experts} experts")
    threads, cores = engine_cores(threads, beside_gpu=torch.cuda.is_available())
    format = ExpertFormat(hidden, inter, dtype, Activation(ActivationKind.SILU))
    generator = torch.Generator().manual_seed(0)
    store = HostStore([format], [experts], homes=engine_homes())
    views, addresses = store.views(0), store.addresses(0)
    _fill(views, format, generator)
    out = torch.empty(tokens, hidden)
    engine_us, torch_us, touched = [], [], []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with store, CpuExperts(threads, cores, Isa.parse(isa)) as engine:

            def native(batch: _Batch) -> None:
                x, ids, weights = batch
                engine.run(format, addresses, x, ids.to(torch.int32), weights, out)

            def in_torch(batch: _Batch) -> None:
                _torch_experts(views, *batch)

            for run in range(_WARM_UP + repeats):
                batches = [_random_batch(format, experts, topk, tokens, generator) for _ in range(4)]
                engine_time = _microseconds(native, *batches[:2])
                torch_time = _microseconds(in_torch, *batches[2:])
                if run >= _WARM_UP:
                    engine_us.append(engine_time)
                    torch_us.append(torch_time)
                    touched.append(int(batches[1][1].unique().numel()))
            x, ids, weights = batches[-1]
            # The last batch again, on both sides, against float64.
            engine.run(format, addresses, x, ids.to(torch.int32), weights, out)
            reference = _reference(views, x[:_CHECKED_TOKENS], ids, weights)
            max_error = _relative_error(out, reference)
            torch_error = _relative_error(_torch_experts(views, x, ids, weights), reference)
            label = engine.isa.label
    finally:
        torch.set_num_threads(before)
    us = statistics.median(engine_us)
    experts_touched = round(statistics.median(touched))
    weight_bytes = experts_touched * 3 * hidden * inter * dtype.itemsize
    return ExpertBenchmark(
        bench="experts",
        shape=f"{topk} of {experts} experts, hidden {hidden}, inter {inter}",
        value=us,
        unit="us",
        repeats=repeats,
        device="cpu",
        isa=label,
        threads=threads,
        hidden=hidden,
        inter=inter,
        experts=experts,
        topk=topk,
        tokens=tokens,
        dtype=str(dtype).removeprefix("torch."),
        experts_touched=experts_touched,
        weight_bytes=weight_bytes,
        us=us,
        gb_s=weight_bytes / us / 1e3,
        tflop_s=format.flops(tokens * topk) / us / 1e6,
        max_error=max_error,
        torch_us=statistics.median(torch_us),
        torch_error=torch_error,
        speedup=statistics.median(torch_us) / us,
    )


def _fill(views: ExpertViews, format: ExpertFormat, generator: torch.Generator) -> None:
    """Random weights, scaled so that outputs are of the order of inputs."""
    for up, down in zip(views.up, views.down, strict=True):
        up.copy_(torch.randn(up.shape, generator=generator) * format.hidden**-0.5)
        down.copy_(torch.randn(down.shape, generator=generator) * format.inter**-0.5)


def _random_batch(
    format: ExpertFormat, experts: int, topk: int, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [tokens, hidden], int64 ids and float32 weights [tokens, topk]."""
    x = torch.randn(tokens, format.hidden, generator=generator).to(format.dtype)
    ids = torch.rand(tokens, experts, generator=generator).topk(topk, dim=1).indices
    return x, ids, torch.rand(tokens, topk, generator=generator).softmax(dim=1)


_Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states, ids and weights."""


def _microseconds(body: Callable[[_Batch], None], first: _Batch, timed: _Batch) -> float:
    # Threads of whoever ran before, torch's among them, spin for a moment before they sleep.
    time.sleep(_SETTLE_SECONDS)
    # As in a model, where layer follows layer, the timed run finds its threads awake.
    body(first)
    start = time.perf_counter_ns()
    body(timed)
    return (time.perf_counter_ns() - start) / 1e3


def _torch_experts(views: ExpertViews, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same layer in torch, float32 [tokens, hidden]: one pass over each touched expert's weights."""
    topk = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    token = order // topk
    scale = weights.flatten()[order, None]
    touched, counts = torch.unique_consecutive(ids.flatten()[order], return_counts=True)
    rows = x[token]
    out = torch.zeros(x.shape, dtype=torch.float32)
    begin = 0
    for expert, count in zip(touched.tolist(), counts.tolist(), strict=True):
        pairs = slice(begin, begin + count)
        gate, up = F.linear(rows[pairs], views.up[expert]).chunk(2, dim=1)
        y = F.linear(F.silu(gate) * up, views.down[expert])
        out.index_add_(0, token[pairs], y.float() * scale[pairs])
        begin += count
    return out


def _reference(views: ExpertViews, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer's output for the rows of ``x`` in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            gate, up = (views.up[expert].double() @ row).chunk(2)
            out[t] += weight * (views.down[expert].double() @ (F.silu(gate) * up))
    return out


def _relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    difference = (got[: reference.shape[0]].double() - reference).abs().max()
    return float(difference / reference.square().mean().sqrt())
