"""The app: every command by its name. Each reads its words, calls the library and prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sartor._version import __version__
from sartor.cli import (
    advice,
    looking,
    network,
    newcomers,
    reproduction,
    search,
    training,
    using,
)
from sartor.cli.flags import ShortHelp, option


class _Commands(TyperGroup):
    """The group of all commands; its help leaves out the two flags of completion."""

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)
        for flag in found:
            if str(flag.name).endswith("_completion"):
                flag.hidden = True  # type: ignore[attr-defined]
        return found


app = typer.Typer(
    name="sartor",
    cls=_Commands,
    help="A model of its own for every client of a federation. Start with: sartor demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        print(f"sartor {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, option("Show the traceback of an error.", None, "--debug")] = False,
) -> None:
    """Read the flags of the program itself."""


_LARGE = (training.run, training.compare, search.search, advice.advise)
_LOOKING = (looking.report, looking.methods, looking.data, looking.doctor)
_NETWORK = (network.serve, network.join, network.status)
_USING = (training.resume, using.predict, using.export, newcomers.onboard)
_OTHERS = (*_USING, reproduction.reproduce, *_LOOKING, *_NETWORK)

# In the order in which ``sartor --help`` lists them.
app.command()(training.demo)
for large in _LARGE:
    app.command(cls=ShortHelp)(large)
for other in _OTHERS:
    app.command()(other)
app.add_typer(network.keys_app, name="keys")
