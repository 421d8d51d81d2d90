"""Two pages of help for a command with many flags: the everyday ones, and ``--help-all``.

A page of help should fit a screen; we count a screen as 40 lines of 100 columns, since the flags
that nearly every call needs do not fit the 24 lines of the oldest terminals. The rest of the flags
work as ever, are completed by the shell, and are the keys of an experiment file like all others;
only ``--help`` leaves them out.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from copy import copy
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sartor.cli.config import Experiment

LINES, COLUMNS = 40, 100
"""What we call a screen."""

SWITCHES = tuple(key for key, field in Experiment.model_fields.items() if field.annotation is bool)

_ALL = "sartor.help_all"


def rare_flags() -> frozenset[str]:
    """Return the keys of an experiment whose flags ``--help`` leaves out."""
    extras: dict[str, Any] = {
        key: field.json_schema_extra for key, field in Experiment.model_fields.items()
    }
    return frozenset(key for key, extra in extras.items() if extra and not extra["everyday"])


class ShortHelp(TyperCommand):
    """A command whose ``--help`` shows the everyday flags alone."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page; after ``--help-all``, with every flag.

        The flags are hidden for the time of writing only: one that is always hidden would not be
        completed by the shell. Switches stand under training, without their ``--no-`` forms.
        """
        if ctx.meta.get(_ALL):
            super().format_help(ctx, formatter)
            return
        kept, rare = self.params, rare_flags()
        self.params = [copy(param) for param in kept if param.name not in rare]
        switches: list[Any] = [param for param in self.params if param.name in SWITCHES]
        for switch in switches:
            switch.secondary_opts, switch.rich_help_panel = [], "Training"
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = kept


def help_all(keys: Collection[str]) -> inspect.Parameter:
    """Return the flag ``--help-all`` of a command with the flags of these keys."""
    left_out = len(rare_flags().intersection(keys))

    def show(ctx: typer.Context, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            typer.echo(ctx.get_help(), color=ctx.color)
            raise typer.Exit

    option = typer.Option(
        "--help-all",
        help=f"Show all flags, also the {left_out} that are needed rarely.",
        callback=show,
        is_eager=True,
    )
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter("help_all", only, default=False, annotation=Annotated[bool, option])
