"""``greenroom generate``: continue one prompt."""

from typing import Annotated

import typer

from greenroom.cli import options, output
from greenroom.cli.offload_options import takes_offload_config
from greenroom.cli.session import one_json_object, open_model
from greenroom.config import OffloadConfig


@takes_offload_config
def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")],
    *,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="New tokens at most.")] = 128,
    dtype: options.Dtype = "auto",
    config: OffloadConfig,
    no_graph: options.NoGraph = False,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    save_profile: Annotated[
        str | None,
        typer.Option("--save-profile", metavar="FILE", help="Write how often each expert was chosen, for --profile."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Continue a prompt with a model whose experts are offloaded."""
    # Imported here: torch and transformers take seconds that --help and a wrong knob need not wait for.
    import greenroom
    from greenroom.engine import generation, profiles

    if save_profile is not None:
        profiles.check_profile_path(save_profile)
    generation.check_request(prompt, max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    # Few tokens are longer than eight bytes, so that hardly a prompt has fewer.
    tokens = max_tokens + 1 + len(prompt.encode()) // 8
    with (
        one_json_object(as_json),
        open_model(model, config, quiet=as_json, tokens=tokens, dtype=dtype) as (loaded, tokenizer),
    ):
        result = generation.generate(
            loaded,
            tokenizer,
            prompt,
            max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            on_text=None if as_json else output.stream_text,
            graph=not no_graph,
        )
        stats = greenroom.stats(loaded)
        if save_profile is not None:
            profiles.save_profile(loaded, save_profile)
    if as_json:
        output.print_json(output.generation_dict(result, stats))
    else:
        typer.echo()
        output.print_summary(result, stats)
