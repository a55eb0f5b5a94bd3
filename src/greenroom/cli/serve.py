"""``greenroom serve``: a model behind OpenAI's interface."""

import gc
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from greenroom.cli import options, output
from greenroom.cli.offload_options import takes_offload_config
from greenroom.config import OffloadConfig, parse_size
from greenroom.engine.dbo import DboPolicy, check_dbo
from greenroom.engine.sizes import KV_BLOCK
from greenroom.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from greenroom.engine.held_memory import HeldMemory
    from greenroom.engine.model_shape import ModelShape
    from greenroom.experts.counters import OffloadStats
    from greenroom.serving.engine import ServingEngine


@takes_offload_config
def serve(
    model: options.Model,
    *,
    host: Annotated[str, typer.Option("--host", metavar="H", help="Address to listen on; 0.0.0.0 for all.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", metavar="P", help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", help="That clients have to send as a bearer token.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", metavar="NAME", help="By default the last part of MODEL.")
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option("--max-context", metavar="N", help="Tokens of a prompt with its output; by default up to 4096."),
    ] = None,
    max_sequences: Annotated[int, typer.Option("--max-sequences", metavar="N", help="Outputs made at once.")] = 8,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", metavar="N", help="Outputs that wait beside them; more get status 429.")
    ] = 128,
    max_step_tokens: Annotated[
        int, typer.Option("--max-step-tokens", metavar="N", help="Of one pass: a longer prompt takes several.")
    ] = 2048,
    kv_cache: Annotated[
        str | None,
        typer.Option("--kv-cache", metavar="SIZE", help="By default room for all sequences at full length."),
    ] = None,
    kv_offload: Annotated[
        str | None, typer.Option("--kv-offload", metavar="SIZE", help="Host memory for KV blocks that lost theirs.")
    ] = None,
    kv_offload_policy: Annotated[
        str | None, typer.Option("--kv-offload-policy", metavar="NAME", help="What leaves it when full: lru or arc.")
    ] = None,
    kv_offload_block_factor: Annotated[
        int | None,
        typer.Option(
            "--kv-offload-block-factor", metavar="N", help="Blocks that are kept there together; by default 1."
        ),
    ] = None,
    sampling_defaults: Annotated[
        str,
        typer.Option(
            "--sampling-defaults", metavar="NAME", help="model (its generation_config.json) or openai (temperature 1)."
        ),
    ] = "model",
    max_body: Annotated[str, typer.Option("--max-body", metavar="SIZE", help="Of a request; more is 413.")] = "4MiB",
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", metavar="S", help="Seconds that a request may take; then 504.")
    ] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", metavar="S", help="Seconds that requests get to finish at the end.")
    ] = 60.0,
    dbo: options.Dbo = "off",
    dtype: options.Dtype = "auto",
    config: OffloadConfig,
) -> None:
    """Serve a model over HTTP, with OpenAI's interface."""
    check_dbo(dbo)
    kv_bytes = None if kv_cache is None else parse_size(kv_cache)
    body_bytes = parse_size(max_body)
    _check(max_sequences, max_waiting, request_timeout, drain_timeout, body_bytes, api_key)
    for flag, tokens in (("--max-context", max_context), ("--max-step-tokens", max_step_tokens)):
        if tokens is not None and tokens < 1:
            raise ConfigError(f"{flag} must be at least 1, not {tokens}")
    if not host.strip():
        raise ConfigError("--host is empty; give an address, 0.0.0.0 for all")
    if served_model_name is not None and not served_model_name.strip():
        raise ConfigError("--served-model-name is empty; give a name, or leave it out for the last part of MODEL")
    if sampling_defaults not in ("model", "openai"):
        raise ConfigError(f"--sampling-defaults is model or openai, not '{sampling_defaults}'")
    try:
        from greenroom.server import app as server
        from greenroom.server import metrics, run
    except ImportError as error:
        raise ConfigError(
            f'the server needs packages that are not installed ({error.name or error}): pip install "greenroom[serve]"'
        ) from error
    import greenroom
    from greenroom.engine.demand import DEFAULT_CONTEXT, Demand
    from greenroom.engine.generation import context_length
    from greenroom.engine.offload import offload_of
    from greenroom.engine.runners import dbo_of
    from greenroom.kv.config import KVOffloadConfig
    from greenroom.serving import open as opening
    from greenroom.serving.requests import SamplingParams

    kv_config = KVOffloadConfig.from_options(kv_offload, kv_offload_block_factor, kv_offload_policy)
    with ExitStack() as stack:
        listener = stack.enter_context(run.listen(host, port))
        shape = None if max_context is None and kv_bytes is None else _shape_of(model, dtype)
        _refuse_early(shape, config.device, dbo, max_context)
        context = max_context or DEFAULT_CONTEXT
        sequences = max_sequences if kv_bytes is None else _sequences_in(shape, kv_bytes, context)
        kv_offload_bytes = 0 if kv_config is None else kv_config.num_bytes
        demand = Demand(context, sequences, max_step_tokens, True, dbo, kv_offload_bytes)
        loaded, tokenizer = greenroom.load(model, config=config, demand=demand, dtype=dtype)
        stack.callback(greenroom.close, loaded)
        sampling = opening.sampling_defaults(loaded) if sampling_defaults == "model" else SamplingParams()
        context = max_context or min(DEFAULT_CONTEXT, context_length(loaded) or DEFAULT_CONTEXT)
        engine = opening.open_engine(
            loaded,
            tokenizer,
            kv_bytes=kv_bytes,
            num_blocks=max_sequences * -(-context // KV_BLOCK) if kv_bytes is None else None,
            max_context=context,
            max_step_tokens=max_step_tokens,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            block_size=KV_BLOCK,
            kv_offload=kv_config,
            dbo=dbo,
        )
        stack.callback(engine.close)
        name = served_model_name or Path(model).name
        stores = offload_of(loaded).manager.store.formats
        halves = dbo_of(loaded)
        expert_bytes = [fmt.block_bytes for fmt in stores]
        observed = metrics.ServerMetrics(
            engine, lambda: greenroom.stats(loaded), expert_bytes, dbo=lambda: halves.choices
        )
        service = server.Service(
            engine, tokenizer, server.ServerConfig(name, api_key, body_bytes, request_timeout, sampling), observed
        )
        stack.callback(service.close)

        # What is there now lives as long as the server: collections that look through it all stop every request.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)

        def ready(url: str) -> None:
            memory = offload_of(loaded).memory(loaded)
            _print_active(name, url, greenroom.stats(loaded), memory, engine, max_sequences, kv_offload, halves)

        def drain(requests: int) -> None:
            output.error_console().print(
                f"ending: {requests} running or waiting, at most {drain_timeout:g} s; a second signal quits at once"
            )

        run.run_server(
            server.create_app(service), service, listener, drain_timeout=drain_timeout, on_ready=ready, on_drain=drain
        )


def _check(
    max_sequences: int,
    max_waiting: int,
    request_timeout: float,
    drain_timeout: float,
    body_bytes: int,
    api_key: str | None,
) -> None:
    if max_sequences < 1:
        raise ConfigError(f"--max-sequences must be at least 1, not {max_sequences}")
    if max_waiting < 0:
        raise ConfigError(f"--max-waiting must be 0 or more, not {max_waiting}")
    if not request_timeout > 0:
        raise ConfigError(f"--request-timeout must be above 0 seconds, not {request_timeout:g}")
    if not drain_timeout >= 0:
        raise ConfigError(f"--drain-timeout must be 0 seconds or more, not {drain_timeout:g}")
    if body_bytes < 1:
        raise ConfigError("--max-body must be at least 1 byte")
    if api_key is not None and not api_key.strip():
        raise ConfigError("--api-key is empty; give a key, or leave it out to serve without one")


def _refuse_early(shape: "ModelShape | None", device: str, dbo: str, max_context: int | None) -> None:
    """What would otherwise be refused when all weights have been read.

    Raises:
        ConfigError: more context than the model has, or halves of steps without a GPU.
    """
    from greenroom.engine.generation import check_context
    from greenroom.engine.request import choose_device

    if dbo == "on" and choose_device(device).type != "cuda":
        raise ConfigError("dbo cannot be on: decode steps are no graphs on a CPU; leave it out, or say auto")
    if shape is not None and max_context is not None:
        check_context(max_context, shape.max_context)


def _shape_of(model: str, dtype: str) -> "ModelShape | None":
    """From the configuration; None if it cannot be told, of which loading warns."""
    from greenroom.engine.loader import find_model
    from greenroom.engine.model_shape import probe_shape
    from greenroom.engine.skeleton import read_config, resolve_dtype

    hf_config = read_config(find_model(model, weights=False))
    try:
        return probe_shape(hf_config, resolve_dtype(dtype, hf_config))
    except UnsupportedModelError:
        return None


def _sequences_in(shape: "ModelShape | None", kv_bytes: int, context: int) -> int:
    """Sequences of full length that a KV cache holds, for which loading keeps memory."""
    from greenroom.engine.demand import Demand, working_memory

    if shape is None:
        return 1
    one = Demand(min(context, shape.max_context or context), serving=True)
    return max(1, -(-kv_bytes // max(1, working_memory(shape, one, on_gpu=False).kv_bytes)))


def _print_active(
    name: str,
    url: str,
    stats: "OffloadStats",
    memory: "HeldMemory",
    engine: "ServingEngine",
    max_sequences: int,
    kv_offload: str | None,
    halves: DboPolicy,
) -> None:
    """What is active, on stderr."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    rows = active_rows(name, url, stats, memory, engine.stats().kv_blocks, engine.context_length, max_sequences)
    rows.insert(-1, ("DBO", str(halves)))
    if kv_offload is not None:
        rows.insert(-1, ("KV offload", f"{output.format_size(parse_size(kv_offload))} of host memory"))
    for row in rows:
        table.add_row(*row)
    output.error_console().print(table)


def active_rows(
    name: str,
    url: str,
    stats: "OffloadStats",
    memory: "HeldMemory",
    kv_blocks: int,
    context: int,
    max_sequences: int,
) -> list[tuple[str, str]]:
    """Names and values of what is active."""
    locked = "page-locked" if stats.page_locked else "not page-locked"
    rows = [
        ("model", f"{name}, {context} tokens of context, {max_sequences} sequences at once"),
        ("device", f"{stats.device}, {stats.cache_expert_num} expert slots a layer, policy {stats.policy}"),
        (
            "expert memory",
            f"{output.format_size(stats.host_bytes)} on the host, {locked}; "
            f"{output.format_size(stats.device_bytes)} of slots and buffers",
        ),
        *_memory_rows(memory),
        ("CPU engine", f"{stats.isa}, {stats.threads} thread{'' if stats.threads == 1 else 's'}"),
        ("KV cache", f"{kv_blocks} blocks of {KV_BLOCK} tokens"),
    ]
    if stats.weights_offload != "none":
        rows.append(
            ("other weights", f"{stats.weights_offload}, {output.format_size(stats.weights_host_bytes)} on the host")
        )
    return [*rows, ("serving", f"{url}/v1")]


def _memory_rows(memory: "HeldMemory") -> list[tuple[str, str]]:
    """What is held now, beside what was planned."""
    rows = [("host memory", f"{output.format_size(memory.host)}, {output.format_size(memory.host_planned)} planned")]
    if memory.device is not None and memory.device_planned is not None:
        held, planned = output.format_size(memory.device), output.format_size(memory.device_planned)
        rows.insert(0, ("GPU memory", f"{held}, {planned} planned"))
    return rows
