"""One flag for every key of an experiment, made from the schema, so the two cannot drift apart.

And the words that several commands share.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from sartor.cli.config import SUFFIXES, Experiment, build, parse_pairs, read_file
from sartor.cli.help_pages import help_all
from sartor.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

Json = Annotated[bool, typer.Option("--json", help="Machine-readable last line on stdout.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run folder.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A run folder.")]

TABLES = ("set", "sweep")
"""Keys whose flags take NAME=VALUE and may be repeated."""


def flag(key: str) -> str:
    """Return the flag of a key.

    >>> flag("eval_every")
    '--eval-every'
    """
    return f"--{key.replace('_', '-')}"


def with_experiment_flags(command: F) -> F:
    """Give a command that takes ``**flags`` one flag for every key of :class:`Experiment`.

    A flag that is not given arrives as None. Values stay words: the schema reads them, as it reads
    a file, so a fault is told in the same way wherever it comes from.
    """
    return _with_flags(command, tuple(Experiment.model_fields))


def with_flags(*keys: str) -> Callable[[F], F]:
    """Give a command that takes ``**flags`` the flags of some keys of :class:`Experiment`."""
    return lambda command: _with_flags(command, keys)


def _with_flags(command: F, keys: tuple[str, ...]) -> F:
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in own]
    made = [
        inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(key)
        )
        for key in keys
        if key != "methods"
    ]
    made.append(help_all(keys))

    @functools.wraps(command)
    def wrapped(help_all: bool, **words: Any) -> Any:
        return command(**words)

    wrapped.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *made]}
    return wrapped  # type: ignore[return-value]


def _annotation(key: str) -> Any:
    field = Experiment.model_fields[key]
    extra: Any = field.json_schema_extra
    text = field.description or ""
    if field.default not in (None, {}, False, ()):
        many = isinstance(field.default, tuple)
        text = f"{text} ({','.join(field.default) if many else field.default})"
    if field.annotation is bool:
        return Annotated[bool | None, typer.Option(help=text, rich_help_panel=extra["group"])]
    option = typer.Option(
        flag(key), help=text, metavar=extra["show"], rich_help_panel=extra["group"]
    )
    return Annotated[list[str] | None if key in TABLES else str | None, option]


def read_experiment(target: str, flags: dict[str, Any], *, many: bool) -> Experiment:
    """Make the experiment of a command from its argument and its flags.

    Args:
        target: a method (with ``many``: several, with commas), or the path of an experiment file.
        flags: what :func:`with_experiment_flags` collected.
        many: whether the command takes several methods.

    Raises:
        ConfigError: listing every fault.
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
