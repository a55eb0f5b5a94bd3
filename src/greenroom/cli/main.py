"""The command's entry point, and the one place where errors become exit codes."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from greenroom import __version__
from greenroom.cli import bench, chat, generate, plan, serve
from greenroom.errors import GreenroomError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class _Commands(TyperGroup):
    """Turns errors that a user can act on into one sentence. Any other exception is a bug and shows."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GreenroomError as error:
            typer.echo(f"greenroom: {error}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from error
        except KeyboardInterrupt as error:
            typer.echo(err=True)
            raise typer.Exit(EXIT_INTERRUPTED) from error


app = typer.Typer(
    cls=_Commands,
    help="Run Mixture-of-Experts language models that do not fit in GPU memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("plan")(plan.plan)
app.command("serve")(serve.serve)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"greenroom {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command and exits: 0, 2 for what a user can put right, 130 when interrupted."""
    app(prog_name="greenroom")
