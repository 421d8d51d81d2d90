"""One flag for every key of an experiment, from the schema; and two pages of help for them.

A page of help should fit a screen; we count a screen as 40 lines of 100 columns, since the flags
that nearly every call needs do not fit the 24 lines of the oldest terminals. ``--help`` leaves out
the flags that are needed rarely, and ``--help-all`` shows them all. They work in the same way, are
completed by the shell, and are keys of an experiment file.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from copy import copy
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from sartor.cli import completion
from sartor.cli.completion import Complete
from sartor.cli.config import SUFFIXES, Experiment, build, parse_pairs, read_file
from sartor.core.errors import ConfigError
from sartor.training.schema import flag, help_text, settings_on

F = TypeVar("F", bound=Callable[..., Any])


def option(text: str, show: str | None = None, *names: str, **checks: Any) -> Any:
    """Return what typer needs of an option: its help, the placeholder of its value, its names."""
    return typer.Option(*names, help=text, metavar=show, **checks)


def argument(text: str, show: str, complete: Complete | None = None) -> Any:
    """Return what typer needs of an argument: its help, its placeholder, its completion."""
    return typer.Argument(help=text, metavar=show, autocompletion=complete)


Json = Annotated[bool, option("Machine-readable last line on stdout.", None, "--json")]
Overwrite = Annotated[bool, option("Replace an existing run folder.", None, "--overwrite")]
Folder = Annotated[Path, argument("A run folder.", "FOLDER", completion.run_folders)]

LINES, COLUMNS = 40, 100
"""What we call a screen."""

TABLES = ("set", "sweep")
"""Keys whose flags take NAME=VALUE and may be repeated."""

ONLY = inspect.Parameter.KEYWORD_ONLY
_ALL = "sartor.help_all"


def rare_flags() -> frozenset[str]:
    """Return the keys of an experiment whose flags ``--help`` leaves out."""
    return frozenset(settings_on("file").keys() - settings_on("file", "everyday") - {"methods"})


def with_flags(*surface: str, pages: bool = True) -> Callable[[F], F]:
    """Give a command that takes ``**flags`` one flag for every setting on a surface.

    A flag that is not given arrives as None. Values stay words: the schema reads them, as it reads
    a file, so a fault is reported in the same way wherever it comes from.

    Args:
        surface: words of the schema, such as "advise"; every flag has "file" as well.
        pages: whether there is a second page of help.
    """
    keys = [key for key in settings_on("file", *surface) if key != "methods"]
    made = [inspect.Parameter(key, ONLY, default=None, annotation=_annotation(key)) for key in keys]
    made += [_help_all(keys)] if pages else []

    def wrap(command: F) -> F:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in own]

        @functools.wraps(command)
        def wrapped(help_all: bool = False, **words: Any) -> Any:
            return command(**words)

        wrapped.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *made]}
        return wrapped  # type: ignore[return-value]

    return wrap


def _annotation(key: str) -> Any:
    setting = settings_on("file")[key]
    text, group = help_text(setting), setting.group
    if setting.kind == "switch":
        return Annotated[bool | None, typer.Option(help=text, rich_help_panel=group)]
    complete = completion.of_setting(setting)
    found = option(text, setting.show, flag(key), rich_help_panel=group, autocompletion=complete)
    return Annotated[list[str] | None if key in TABLES else str | None, found]


def _help_all(keys: Collection[str]) -> inspect.Parameter:
    """Return the flag ``--help-all`` of a command with the flags of these keys."""
    left_out = len(rare_flags().intersection(keys))

    def show(ctx: typer.Context, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            typer.echo(ctx.get_help(), color=ctx.color)
            raise typer.Exit

    text = f"Show all flags, also the {left_out} that are needed rarely."
    annotation = Annotated[bool, option(text, None, "--help-all", callback=show, is_eager=True)]
    return inspect.Parameter("help_all", ONLY, default=False, annotation=annotation)


class ShortHelp(TyperCommand):
    """A command whose ``--help`` shows the everyday flags alone."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; after ``--help-all``, with every flag.

        The flags are hidden for the time of writing only: one that is always hidden would not be
        completed by the shell. Switches are listed under training, without their ``--no-`` forms.
        """
        if ctx.meta.get(_ALL):
            super().format_help(ctx, formatter)
            return
        kept, rare, known = self.params, rare_flags(), settings_on("file")
        self.params = [copy(param) for param in kept if param.name not in rare]
        for param in self.params:
            if param.name in known and known[param.name].kind == "switch":
                param.secondary_opts = []
                param.rich_help_panel = "Training"  # type: ignore[attr-defined]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = kept


def read_experiment(target: str, flags: dict[str, Any], *, many: bool) -> Experiment:
    """Make the experiment of a command from its argument and its flags.

    ``target`` is a method (with ``many``: several, with commas), or an experiment file.
    """
    given = {key: value for key, value in flags.items() if value not in (None, [])}
    for table in TABLES:
        if table in given:
            given[table] = parse_pairs(flag(table), given[table])
    if Path(target).suffix in SUFFIXES:
        experiment = build(read_file(target), flags=given, source=target)
    else:
        experiment = build({}, flags={"methods": target, **given})
    if not many and len(experiment.methods) > 1:
        names = ",".join(experiment.methods)
        words = target if Path(target).suffix in SUFFIXES else names
        raise ConfigError(
            f"This command takes one method, got {names}; name one of them, or put them side by "
            f"side with: sartor compare {words}"
        )
    return experiment
