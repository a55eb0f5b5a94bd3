"""``greenroom bench``: measurements of parts on this machine."""

from typing import Annotated

import typer

from greenroom.cli import options, output
from greenroom.cli.session import one_json_object
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
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
        output.print_json(result)
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
