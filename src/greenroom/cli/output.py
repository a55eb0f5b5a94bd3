"""What commands show: results on stdout, everything about them on stderr."""

import json
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from greenroom.engine.generation import Generation
    from greenroom.experts.counters import OffloadStats


def stream_text(piece: str) -> None:
    """Writes a piece of generated text to stdout at once."""
    typer.echo(piece, nl=False)


def print_json(value: dict[str, Any]) -> None:
    """Writes one JSON object, on one line, to stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def generation_dict(result: "Generation", stats: "OffloadStats") -> dict[str, Any]:
    """The object of ``generate --json``; docs/cli.md lists its fields."""
    return {
        **result.to_dict(),
        "load_s": stats.load_seconds,
        **stats.total.to_dict(),
        "policy": stats.policy,
        "device": stats.device,
        "isa": stats.isa,
        "threads": stats.threads,
        "cache_expert_num": stats.cache_expert_num,
        "host_bytes": stats.host_bytes,
        "device_bytes": stats.device_bytes,
        "weights_offload": stats.weights_offload,
        "weights_host_bytes": stats.weights_host_bytes,
        "weights_device_bytes": stats.weights_device_bytes,
        "layers": [layer.to_dict() for layer in stats.layers],
    }


def print_summary(result: "Generation", stats: "OffloadStats") -> None:
    """Speed and counters, as a small table on stderr."""
    total = stats.total
    used = total.hits + total.misses
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("load", f"{stats.load_seconds:.2f} s, {format_size(stats.host_bytes)} of experts in host memory")
    table.add_row("prefill", f"{result.prompt_tokens} tokens, {_rate(result.prefill_tok_s)}")
    table.add_row("decode", f"{len(result.token_ids)} tokens, {_rate(result.decode_tok_s)}, {result.decode}")
    table.add_row(
        "experts",
        f"{total.hits:,} hits{f' ({total.hits / used:.0%})' if used else ''}, {total.misses:,} misses, "
        f"{total.cpu:,} on the CPU, {total.copies:,} copies, {total.evictions:,} evictions",
    )
    table.add_row(
        "cache",
        f"{stats.cache_expert_num} a layer ({format_size(stats.device_bytes)}), policy {stats.policy}, "
        f"device {stats.device}",
    )
    table.add_row("CPU engine", f"{stats.isa}, {stats.threads} thread{'' if stats.threads == 1 else 's'}")
    if stats.weights_offload != "none":
        table.add_row(
            "other weights",
            f"{stats.weights_offload}, {format_size(stats.weights_host_bytes)} in host memory, "
            f"{format_size(stats.weights_device_bytes)} of buffers",
        )
    error_console().print(table)


def print_fields(fields: dict[str, str]) -> None:
    """A result of named values, on stdout."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in fields.items():
        table.add_row(name, value)
    # Lines in a file or a pipe are for other programs, and as long as they need to be.
    console = Console(soft_wrap=True)
    (console if console.is_terminal else Console(soft_wrap=True, width=10_000)).print(table)


def error_console() -> Console:
    """A console on the stderr of this moment (tests and redirections replace it)."""
    return Console(stderr=True, highlight=False)


def _rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:.1f} tok/s"


def format_size(count: int) -> str:
    """Bytes in binary units, for people."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
