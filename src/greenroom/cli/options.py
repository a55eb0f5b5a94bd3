"""Command-line options that several commands share."""

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face id or folder of a model.")]

Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="T", help="Of all weights: auto (the checkpoint's), bfloat16, float16, float32."),
]

CacheExpertNum = Annotated[
    int | None, typer.Option("--cache-expert-num", metavar="N", help="Cache slots a layer on the device.")
]
Vram = Annotated[
    str | None,
    typer.Option(
        "--vram", metavar="SIZE", help="Device memory for the cache, like 8GiB; instead of --cache-expert-num."
    ),
]
CacheTopk = Annotated[
    int | None,
    typer.Option("--cache-topk", metavar="K", help="Only a token's K heaviest experts may enter the cache."),
]
UpdateExpertNum = Annotated[
    int, typer.Option("--update-expert-num", metavar="N", help="Experts that may be replaced a layer a step.")
]
ContextNumThreads = Annotated[
    int | None, typer.Option("--context-num-threads", metavar="N", help="Threads of the CPU engine.")
]
Policy = Annotated[
    str, typer.Option("--policy", metavar="NAME", help="What stays cached: lru, lfu, lfru, static or first-come.")
]
Profile = Annotated[str | None, typer.Option("--profile", metavar="FILE", help="Routing profile of the static policy.")]
Device = Annotated[str, typer.Option("--device", metavar="D", help="auto, cpu, cuda or cuda:N.")]
Isa = Annotated[str, typer.Option("--isa", metavar="I", help="Instruction set of the CPU engine; auto takes the best.")]
NoPinMemory = Annotated[bool, typer.Option("--no-pin-memory", help="Do not page-lock host memory.")]
NoGraph = Annotated[bool, typer.Option("--no-graph", help="Decode layer by layer, without CUDA graphs.")]
WeightsGroupSize = Annotated[
    int | None,
    typer.Option("--weights-offload-group-size", metavar="G", help="Of each G layers, some keep weights on the host."),
]
WeightsNumInGroup = Annotated[
    int | None, typer.Option("--weights-offload-num-in-group", metavar="N", help="Those are the last N of each G.")
]
WeightsPrefetchStep = Annotated[
    int | None,
    typer.Option("--weights-offload-prefetch-step", metavar="P", help="Layers that are copied ahead; buffers."),
]
WeightsParams = Annotated[
    str | None,
    typer.Option("--weights-offload-params", metavar="PATTERN", help="Only weights whose names match, as self_attn."),
]
WeightsBackend = Annotated[
    str | None, typer.Option("--weights-offload-backend", metavar="NAME", help="prefetch, uva or none.")
]
_DBO = "Decode batches as two halves at once: auto (where that measures faster), on or off."
Dbo = Annotated[str, typer.Option("--dbo", metavar="MODE", help=_DBO)]
BenchDbo = Annotated[str | None, typer.Option("--dbo", metavar="MODE", help=f"Decode as serve does. {_DBO}")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

Temperature = Annotated[float, typer.Option("--temperature", metavar="T", help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", metavar="P", help="Sample from the likeliest tokens of mass P.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="S", help="Seed of the sampler.")]
