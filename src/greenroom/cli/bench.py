"""``greenroom bench``: measurements of parts on this machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from greenroom.cli import options, output
from greenroom.cli.session import one_json_object
from greenroom.config import OffloadConfig
from greenroom.errors import ConfigError

app = typer.Typer(help="Measure a part of greenroom on this machine.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    pass


@app.command("experts")
def experts(
    hidden: Annotated[int, typer.Option("--hidden", help="Width of the model.")] = 2048,
    inter: Annotated[int, typer.Option("--inter", help="Inner width of an expert.")] = 768,
    num_experts: Annotated[int, typer.Option("--experts", help="Experts of the layer.")] = 128,
    topk: Annotated[int, typer.Option("--topk", help="Experts a token.")] = 8,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens a call.")] = 1,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads.")] = None,
    isa: options.Isa = "auto",
    as_json: options.AsJson = False,
) -> None:
    """The CPU expert engine alone, beside torch on the same weights. The shape defaults to Qwen3-30B-A3B's."""
    for name, value in (
        ("--hidden", hidden),
        ("--inter", inter),
        ("--experts", num_experts),
        ("--topk", topk),
        ("--tokens", tokens),
        ("--threads", 1 if threads is None else threads),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if topk > num_experts:
        raise ConfigError(f"--topk {topk} is more than the layer's {num_experts} experts")
    from greenroom.bench.experts import run_expert_benchmark

    with one_json_object(as_json):
        result = run_expert_benchmark(
            hidden=hidden, inter=inter, experts=num_experts, topk=topk, tokens=tokens, threads=threads, isa=isa
        ).to_dict()
    if as_json:
        _show(result, as_json)
        return
    output.print_fields(
        {
            "shape": f"{tokens} token{'' if tokens == 1 else 's'}, {topk} of {num_experts} experts, "
            f"hidden {hidden}, inter {inter}",
            "engine": f"{result['isa']}, {result['threads']} thread{'' if result['threads'] == 1 else 's'}",
            "time": f"{result['us']:,.0f} us",
            "bandwidth": f"{result['gb_s']:.1f} GB/s",
            "compute": f"{result['tflop_s']:.3f} TFLOP/s",
            "maximum error": f"{result['max_error']:.1e} of the result's root mean square",
            "torch": f"{result['torch_us']:,.0f} us, maximum error {result['torch_error']:.1e}",
            "speedup": f"{result['speedup']:.2f}x",
        }
    )


Shape = Annotated[str, typer.Option("--shape", metavar="NAME", help="q30-12L, q30-48L or small.")]
Batch = Annotated[int, typer.Option("--batch", help="Sequences.")]
Batches = Annotated[list[int], typer.Option("--batch", metavar="N", help="Sequences; several times: a result each.")]
Lengths = Annotated[
    list[int], typer.Option("--tokens", metavar="N", help="Tokens of each prompt; several times: a result each.")
]
Routing = Annotated[
    str,
    typer.Option("--routing", help="uniform (drawn afresh), own (the random model's) or a .npy trace to replay."),
]


@app.command("bandwidth")
def bandwidth(
    threads: options.ContextNumThreads = None, isa: options.Isa = "auto", as_json: options.AsJson = False
) -> None:
    """Expert bytes a second that the CPU engine reads and that cross to the device, alone and together."""
    from greenroom.bench.bandwidth import measure_bandwidth

    with one_json_object(as_json):
        result = measure_bandwidth(threads, isa).to_dict()
    _show(result, as_json)


@app.command("decode")
def decode(
    shape: Shape = "q30-12L",
    batches: Batches = [1],  # noqa: B006, nothing changes it
    steps: Annotated[int, typer.Option("--steps", help="Decode steps a timed run.")] = 16,
    routing: Routing = "uniform",
    cache_expert_num: options.CacheExpertNum = 0,
    update_expert_num: options.UpdateExpertNum = OffloadConfig.update_expert_num,
    context_num_threads: options.ContextNumThreads = None,
    policy: options.Policy = OffloadConfig.policy,
    device: options.Device = OffloadConfig.device,
    weights_offload_group_size: options.WeightsGroupSize = None,
    weights_offload_num_in_group: options.WeightsNumInGroup = None,
    weights_offload_prefetch_step: options.WeightsPrefetchStep = None,
    weights_offload_params: options.WeightsParams = None,
    weights_offload_backend: options.WeightsBackend = None,
    dbo: options.BenchDbo = None,
    eager: Annotated[bool, typer.Option("--eager", help="On a GPU: no CUDA graph, layer by layer.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Decode speed of a model with random weights made in place."""
    from greenroom.bench.model import bench_decode

    knobs = OffloadConfig(
        cache_expert_num=cache_expert_num,
        update_expert_num=update_expert_num,
        context_num_threads=context_num_threads,
        policy=policy,
        device=device,
        weights_offload_group_size=weights_offload_group_size,
        weights_offload_num_in_group=weights_offload_num_in_group,
        weights_offload_prefetch_step=weights_offload_prefetch_step,
        weights_offload_params=weights_offload_params,
        weights_offload_backend=weights_offload_backend,
    )
    _show_each(bench_decode(shape, batches, knobs, routing, steps, graph=not eager, dbo=dbo), as_json)


@app.command("prefill")
def prefill(
    shape: Shape = "q30-12L",
    batch: Batch = 1,
    lengths: Lengths = [512],  # noqa: B006, nothing changes it
    routing: Routing = "uniform",
    cache_expert_num: options.CacheExpertNum = 0,
    context_num_threads: options.ContextNumThreads = None,
    device: options.Device = OffloadConfig.device,
    as_json: options.AsJson = False,
) -> None:
    """Prefill speed of a model with random weights made in place."""
    from greenroom.bench.model import bench_prefill

    knobs = OffloadConfig(cache_expert_num=cache_expert_num, context_num_threads=context_num_threads, device=device)
    _show_each(bench_prefill(shape, batch, lengths, knobs, routing), as_json)


@app.command("handoff")
def handoff(
    batch: Batch = 1,
    layers: Annotated[int, typer.Option("--layers", help="Layers a step.")] = 48,
    context_num_threads: options.ContextNumThreads = None,
    isa: options.Isa = "auto",
    as_json: options.AsJson = False,
) -> None:
    """What handing experts to the CPU costs a layer of a decode step when the CPU has next to nothing to do."""
    from greenroom.bench.handoff import bench_handoff

    OffloadConfig(context_num_threads=context_num_threads)  # refuses a number below 1
    with one_json_object(as_json):
        result = bench_handoff(batch, layers, context_num_threads, isa).to_dict()
    _show(result, as_json)


@app.command("kv")
def kv(
    shape: Shape = "q30-12L",
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of the prompt.")] = 3500,
    part: Annotated[str, typer.Option("--part", help="blocks, prefix or all.")] = "all",
    cache_expert_num: options.CacheExpertNum = 0,
    context_num_threads: options.ContextNumThreads = None,
    device: options.Device = OffloadConfig.device,
    as_json: options.AsJson = False,
) -> None:
    """KV blocks to and from host memory: their speed, and a long prefix loaded against computed again."""
    from greenroom.bench.kv import bench_kv
    from greenroom.bench.kv_prefix import bench_kv_prefix

    if part not in ("blocks", "prefix", "all"):
        raise ConfigError(f"--part is blocks, prefix or all, not '{part}'")
    knobs = OffloadConfig(cache_expert_num=cache_expert_num, context_num_threads=context_num_threads, device=device)
    fields = {}
    for transfer in _each(bench_kv(device) if part != "prefix" else iter(()), as_json):
        if as_json:
            _show(transfer.to_dict(), as_json)
        fields[f"{transfer.way}, {transfer.run_bytes >> 10} KiB"] = (
            f"{transfer.value:.1f} GB/s load, {transfer.store_gb_s:.1f} store; together "
            f"{transfer.load_gb_s_together:.1f} and {transfer.store_gb_s_together:.1f}"
        )
    if fields and not as_json:
        output.print_fields(fields)
    if part != "blocks":
        with one_json_object(as_json):
            result = bench_kv_prefix(shape, tokens, knobs).to_dict()
        _show(result, as_json)


@app.command("serving")
def serving(
    shape: Shape = "q30-12L",
    requests: Annotated[int, typer.Option("--requests", help="That decode at once.")] = 8,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of the prompt that arrives meanwhile.")] = 3900,
    max_step_tokens: Annotated[int, typer.Option("--max-step-tokens", metavar="N", help="Of one pass.")] = 2048,
    steps: Annotated[int, typer.Option("--steps", help="Tokens of each request in a timed stretch.")] = 32,
    routing: Routing = "uniform",
    cache_expert_num: options.CacheExpertNum = 0,
    context_num_threads: options.ContextNumThreads = None,
    device: options.Device = OffloadConfig.device,
    as_json: options.AsJson = False,
) -> None:
    """What a server's requests wait for: tokens alone, together, and while a long prompt arrives."""
    from greenroom.bench.serving import bench_serving

    knobs = OffloadConfig(cache_expert_num=cache_expert_num, context_num_threads=context_num_threads, device=device)
    with one_json_object(as_json):
        result = bench_serving(shape, requests, tokens, knobs, routing, max_step_tokens, steps).to_dict()
    _show(result, as_json)


@app.command("load")
def load(
    shape: Shape = "q30-12L",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", metavar="PATH", help="Keeps the checkpoint there, or finds it there; else it is removed."
        ),
    ] = None,
    device: options.Device = OffloadConfig.device,
    as_json: options.AsJson = False,
) -> None:
    """How fast a random checkpoint is loaded, and the peak of host memory."""
    from greenroom.bench.load import bench_load

    with one_json_object(as_json):
        result = bench_load(shape, folder, device, progress=not as_json).to_dict()
    _show(result, as_json)


@app.command("kernels")
def kernels(as_json: options.AsJson = False) -> None:
    """Each GPU kernel of a decode step against the memory limit; one line a kernel."""
    from greenroom.bench.kernels import bench_kernels

    fields = {}
    for measured in _each(bench_kernels(), as_json):
        result = measured.to_dict()
        if as_json:
            _show(result, as_json)
        fields[f"{result['kernel']}, {result['tokens']} x {result['shape']}"] = _against_limit(result)
    if not as_json:
        output.print_fields(fields)


def _against_limit(result: Mapping[str, Any]) -> str:
    if result["share"] is None:
        return f"{result['value']:,.1f} us"
    return (
        f"{result['value']:,.1f} us, {result['gb_s']:,.0f} GB/s, "
        f"{result['share']:.0%} of {result['limit_gb_s']:,.0f} GB/s ({result['limit']})"
    )


def _each(results: Iterator[Any], as_json: bool) -> Iterator[Any]:
    """Results as they are measured; for JSON nothing else reaches stdout meanwhile."""
    while True:
        with one_json_object(as_json):
            result = next(results, None)
        if result is None:
            return
        yield result


def _show_each(results: Iterator[Any], as_json: bool) -> None:
    """Whole results, each as soon as it is there."""
    for number, result in enumerate(_each(results, as_json)):
        if number and not as_json:
            typer.echo()
        _show(result.to_dict(), as_json)


def _show(result: dict[str, Any], as_json: bool) -> None:
    """A benchmark's whole result."""
    if as_json:
        output.print_json(result)
    else:
        output.print_fields({name.replace("_", " "): _text(value) for name, value in result.items()})


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return str(value)
