"""``greenroom plan``: what a model would need and how fast it would be, from its configuration alone."""

from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli import options, output
from greenroom.cli.session import one_json_object
from greenroom.config import OffloadConfig, parse_size
from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from greenroom.engine.plan import Machine, ModelPlan
    from greenroom.engine.speed import Rates

EXIT_DOES_NOT_FIT = 1


def plan(
    model: options.Model,
    vram: Annotated[
        str | None, typer.Option("--vram", metavar="SIZE", help="GPU memory in all; by default what is free here.")
    ] = None,
    ram: Annotated[
        str | None, typer.Option("--ram", metavar="SIZE", help="Host memory; by default what is available here.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", help="Tokens of each sequence; by default 4096.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", metavar="N", help="Sequences at once.")] = 1,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", help="Prompt for which prefill is predicted.")
    ] = 512,
    hit_rate: Annotated[
        float | None, typer.Option("--hit-rate", metavar="H", help="Share of needed experts with a slot, 0 to 1.")
    ] = None,
    cpu_bandwidth: Annotated[
        float | None, typer.Option("--cpu-bandwidth", metavar="GB/S", help="Instead of measuring it.")
    ] = None,
    pcie_bandwidth: Annotated[
        float | None, typer.Option("--pcie-bandwidth", metavar="GB/S", help="Instead of measuring it.")
    ] = None,
    gpu_bandwidth: Annotated[
        float | None, typer.Option("--gpu-bandwidth", metavar="GB/S", help="Of GPU memory, instead of measuring it.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure again what is known of this machine.")] = False,
    cache_expert_num: options.CacheExpertNum = None,
    context_num_threads: options.ContextNumThreads = None,
    device: options.Device = OffloadConfig.device,
    weights_offload_group_size: options.WeightsGroupSize = None,
    weights_offload_num_in_group: options.WeightsNumInGroup = None,
    weights_offload_prefetch_step: options.WeightsPrefetchStep = None,
    weights_offload_params: options.WeightsParams = None,
    weights_offload_backend: options.WeightsBackend = None,
    kv_offload: Annotated[
        str | None, typer.Option("--kv-offload", metavar="SIZE", help="Host memory for KV blocks, as for serve.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """What goes where, whether it fits, and how fast it will be. Reads config.json, no weights."""
    config = OffloadConfig(
        cache_expert_num=cache_expert_num,
        context_num_threads=context_num_threads,
        device=device,
        weights_offload_group_size=weights_offload_group_size,
        weights_offload_num_in_group=weights_offload_num_in_group,
        weights_offload_prefetch_step=weights_offload_prefetch_step,
        weights_offload_params=weights_offload_params,
        weights_offload_backend=weights_offload_backend,
    )
    vram_bytes = None if vram is None else parse_size(vram)
    ram_bytes = None if ram is None else parse_size(ram)
    kv_offload_bytes = 0 if kv_offload is None else parse_size(kv_offload)
    if device == "cpu" and any(given is not None for given in (vram, pcie_bandwidth, gpu_bandwidth)):
        raise ConfigError("--vram, --pcie-bandwidth and --gpu-bandwidth are of a GPU; leave them out with --device cpu")
    for flag, rate in (("cpu", cpu_bandwidth), ("pcie", pcie_bandwidth), ("gpu", gpu_bandwidth)):
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"--{flag}-bandwidth must be a finite number of GB/s above 0, not {rate:g}")
    with one_json_object(as_json):
        from greenroom.engine.demand import DEFAULT_CONTEXT, Demand
        from greenroom.engine.loader import find_model
        from greenroom.engine.model_shape import probe_shape
        from greenroom.engine.plan import plan_model
        from greenroom.engine.request import weights_config
        from greenroom.engine.skeleton import read_config, resolve_dtype

        weights = weights_config(config)
        hf_config = read_config(find_model(model, weights=False))
        shape = probe_shape(hf_config, resolve_dtype("auto", hf_config))
        if context is None:
            context = min(DEFAULT_CONTEXT, shape.max_context or DEFAULT_CONTEXT)
        demand = Demand(context, concurrency, serving=True, kv_offload_bytes=kv_offload_bytes)
        machine = _machine(device, vram_bytes, ram_bytes)
        given = {"cpu_gb_s": cpu_bandwidth, "pcie_gb_s": pcie_bandwidth, "dense_gb_s": gpu_bandwidth}
        rates = _rates(machine.device_bytes is not None, given, context_num_threads, measure)
        result = plan_model(
            shape, config, weights, demand, machine, rates, prompt_tokens=prompt_tokens, hit_rate=hit_rate
        )
    if as_json:
        output.print_json({"model": model, **result.to_dict()})
    else:
        _show(model, result)
    if result.problem is not None:
        typer.echo(f"greenroom: {result.problem}", err=True)
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _machine(device: str, vram_bytes: int | None, ram_bytes: int | None) -> "Machine":
    """This machine, or the one that was described. GPU memory alone describes a GPU."""
    import torch

    from greenroom import hardware
    from greenroom.engine.plan import Machine
    from greenroom.engine.request import choose_device

    if vram_bytes is None:
        found = choose_device(device)
        if found.type == "cuda":
            vram_bytes = torch.cuda.mem_get_info(found)[0]
    return Machine(vram_bytes, hardware.available_host_bytes() if ram_bytes is None else ram_bytes)


_NAMES = {"cpu_gb_s": "CPU", "pcie_gb_s": "PCIe", "dense_gb_s": "GPU memory"}


def _rates(on_gpu: bool, given: dict[str, float | None], threads: int | None, measure: bool) -> "Rates":
    """Measured, but for what is given. Nothing is measured if both lanes are given and no GPU is here to be timed."""
    from dataclasses import replace

    import torch

    from greenroom.bench.machine import given_rates, machine_rates

    cpu, pcie = given["cpu_gb_s"], given["pcie_gb_s"]
    changes = {name: value for name, value in given.items() if value is not None}
    if not on_gpu and set(changes) - {"cpu_gb_s"}:
        raise ConfigError("--pcie-bandwidth and --gpu-bandwidth are of a GPU, and there is none; give --vram as well")
    if cpu is not None and (not on_gpu or (pcie is not None and not torch.cuda.is_available())):
        rates = given_rates(cpu, pcie)
    else:
        rates = machine_rates(on_gpu, threads, again=measure)
    if not changes:
        return rates
    source = f"{', '.join(_NAMES[name] for name in changes)} given, the rest {rates.source}"
    return replace(rates, **changes, source=source)


def _show(name: str, result: "ModelPlan") -> None:
    data = result.to_dict()
    fields = {
        "model": f"{name}: {data['expert_layers']} layers of {data['experts']} experts, {data['top_k']} a token, "
        f"{output.format_size(data['expert_bytes'])} each",
        "runs": f"{data['concurrency']} sequence{'' if data['concurrency'] == 1 else 's'} of "
        f"{data['context']:,} tokens, on {'a GPU' if data['device'] == 'cuda' else 'the CPU'}",
    }
    for place, title in (("device_bytes", "GPU memory"), ("host_bytes", "host memory")):
        parts = dict(data[place])
        total, available = parts.pop("total"), parts.pop("available")
        if not parts:
            continue
        fields[title] = f"{output.format_size(total)} of {output.format_size(available)}"
        for part, size in parts.items():
            if size:
                fields[f"  {title.split()[0]}: {part.replace('_', ' ')}"] = output.format_size(size)
    rates = result.rates
    lanes = f"CPU {rates.cpu_gb_s:,.0f} GB/s" + (f", PCIe {rates.pcie_gb_s:,.0f} GB/s" if rates.pcie_gb_s else "")
    if data["device"] == "cuda":
        fields["cache slots"] = (
            f"{data['cache_expert_num']} a layer, {data['hit_rate']:.0%} hits ({data['hit_rate_from']})"
        )
    if result.selection.units:
        fields["other weights"] = data["weights_offload"]
    fields["rates"] = f"{lanes}, other weights {rates.dense_gb_s:,.0f} GB/s ({rates.source})"
    fields["decode"] = f"{data['decode_tok_s']:,.1f} tok/s for one sequence"
    if result.demand.concurrency > 1:
        fields["decode"] += f", {data['decode_all_tok_s']:,.1f} for {result.demand.concurrency} together"
    fields["prefill"] = f"{data['prefill_tok_s']:,.0f} tok/s for {data['prompt_tokens']:,} tokens"
    fields["fits"] = "yes" if result.problem is None else "no"
    output.print_fields(fields)
