"""``greenroom chat``: a conversation, with the model's own chat template."""

import sys
from typing import Annotated, Any

import typer

from greenroom.cli import options, output
from greenroom.cli.offload_options import takes_offload_config
from greenroom.cli.session import open_model, silence
from greenroom.config import OffloadConfig
from greenroom.errors import ConfigError, GreenroomError, UnsupportedModelError

_INTRODUCTION = "/reset starts over, /exit or Ctrl-D ends."


@takes_offload_config
def chat(
    model: options.Model,
    *,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens a reply at most.")] = 512,
    dtype: options.Dtype = "auto",
    config: OffloadConfig,
    no_graph: options.NoGraph = False,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
) -> None:
    """Talk with a model whose experts are offloaded. Reads one message a line."""
    from greenroom.engine import generation

    generation.check_request("-", max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if system is not None:
        generation.check_text(system, "the system message")
    interactive = sys.stdin.isatty()
    opened = open_model(model, config, quiet=not interactive, tokens=max_tokens, dtype=dtype)
    with silence(not interactive), opened as (loaded, tokenizer):
        if not tokenizer.chat_template:
            raise UnsupportedModelError(f"'{model}' has no chat template; use 'greenroom generate' instead")
        if interactive:
            typer.echo(_INTRODUCTION, err=True)
        conversation = Conversation(tokenizer, system)
        while (message := _read_message(interactive)) is not None:
            if message == "/exit":
                break
            if message == "/reset":
                conversation.reset()
                continue
            if not message:
                continue
            try:
                generation.check_text(message, "the message")
                prompt = conversation.prompt(message)
                limit = generation.context_length(loaded)
                room = max_tokens if limit is None else max(1, limit - len(prompt))
                reply = generation.generate(
                    loaded,
                    tokenizer,
                    prompt,
                    min(max_tokens, room),
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed,
                    on_text=output.stream_text,
                    graph=not no_graph,
                )
            except GreenroomError as error:
                if not interactive:
                    raise
                # A conversation that has outgrown the context is worth keeping: the user may shorten or reset.
                typer.echo(f"greenroom: {error} (or /reset)", err=True)
                continue
            typer.echo()
            conversation.add(message, reply.text)


class Conversation:
    """The turns so far, and their rendering by the model's chat template."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all turns but the system message."""
        self.turns = list(self._opening)

    def prompt(self, message: str) -> list[int]:
        """Token ids of the conversation with ``message`` as the user's next turn, up to the reply.

        Raises:
            UnsupportedModelError: the template is broken, or refuses the conversation, as some do a system message.
        """
        from jinja2 import TemplateError

        turns = [*self.turns, {"role": "user", "content": message}]
        try:
            encoded = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"the model's chat template cannot render this conversation ({reason}); "
                "leave out --system, or use 'greenroom generate' instead"
            ) from error
        return list(encoded["input_ids"])

    def add(self, message: str, reply: str) -> None:
        """Records a finished turn."""
        self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": reply}]


def _read_message(interactive: bool) -> str | None:
    """The next line without surrounding blanks, or None at the end of the input."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigError("the input is not valid UTF-8; convert it") from error
