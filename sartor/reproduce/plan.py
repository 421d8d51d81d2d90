"""What a reproduction is: rows × columns of settings, what was published, and the shape to find.

A plan is a TOML file in ``plans/``; no plan is code. Its parts::

    base = "another-plan"          take the parts that are not given here from another plan
    title, paper, item, about      what is reproduced, in words
    differs = ["..."]              how ours differs from the paper
    references = ["LocalTrain"]    rows that every row is paired with, allocation by allocation

    [settings]                     shared by all cells; sartor/training/schema.py has the keys
    [quick]                        settings of the short form; rows = [...] and columns = [...]
                                   there keep only some
    [[rows]]                       name, method, set = {...}, and settings of its own; a sweep makes
                                   one row per value: name = "λ = {prox_strength:g}",
                                   sweep = {prox_strength = [0.1, 1.0]}; then = {...} are options
                                   that training does not see, such as finetune_steps: rows that
                                   differ in them alone are trained once
    [[columns]]                    name, x (a number), and settings of its own; sweep as for rows;
                                   values = {small = 0.2} are words that a row's set may use, as
                                   prox_strength = "small"; see derived.py for values from data
    [[tables]]                     title, measure, published = {row = [one value per column]},
                                   beside = "reference" where the numbers are not the paper's; or
                                   title and labels = COLUMN: counts of clients by classes
    [[figures]]                    kind, title, measure or curve, rows; those of one column draw one
                                   for each of columns = [...] or "all"; kinds: see
                                   ``sartor.report.reproduction_figures``
    [[rules]]                      claim, check, and what the check needs

Settings of a cell: the plan's, then the column's, then the row's, then those of the short form
(a row or column may have its own ``quick``, a row a ``set`` in it), then those of the call.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from sartor.core.errors import ConfigError, did_you_mean
from sartor.training.schema import settings_on
from sartor.training.settings import rows_of

PLANS = resources.files("sartor.reproduce") / "plans"

SETTINGS: dict[str, Any] = {k: s.default_on("plan") for k, s in settings_on("plan").items()}
"""The settings of a plan, with their defaults; ``sartor.training.schema`` declares them."""

LOCAL = tuple(settings_on("plan", "local"))
"""Those of local training, as in ``sartor.Local``; ``batch = 0`` takes all samples at once."""

DATA = tuple(key for key, setting in settings_on("plan").items() if setting.group == "Data")
"""Those of the federation."""


@dataclass(frozen=True)
class Row:
    """One method with its options: a row of a table, a curve of a figure."""

    name: str  # as shown
    method: str  # a name of ``sartor.methods.METHODS``
    set: dict[str, Any] = field(default_factory=dict)  # hyper-parameters and options
    point: str | None = None  # at which its models are scored where a measure does not say
    settings: dict[str, Any] = field(default_factory=dict)  # that differ from the plan's
    quick: dict[str, Any] = field(default_factory=dict)  # those that differ in the short form
    then: dict[str, Any] = field(default_factory=dict)  # options that training does not see


@dataclass(frozen=True)
class Column:
    """One federation: a column of a table, a place on the axis of a figure.

    ``values`` are words that stand for numbers in the sets of the rows.
    """

    name: str
    x: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    quick: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A reproduction, read and checked; see the module for the meaning of the parts."""

    name: str
    title: str
    paper: str
    item: str
    about: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    settings: dict[str, Any]
    tables: tuple[dict[str, Any], ...]
    figures: tuple[dict[str, Any], ...] = ()
    rules: tuple[dict[str, Any], ...] = ()
    differs: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    quick: bool = False

    def row(self, name: str) -> Row:
        """Return a row by its name."""
        return _find(name, self.rows, "row", self.name)

    def column(self, name: str) -> Column:
        """Return a column by its name."""
        return _find(name, self.columns, "column", self.name)

    def cells(self) -> Iterator[tuple[Row, Column, dict[str, Any]]]:
        """Yield every row and column with the settings of their cell."""
        for column, row in itertools.product(self.columns, self.rows):
            only = row.settings.get("columns")
            if only is None or column.name in only:
                yield row, column, self.settings_of(row, column)

    def settings_of(self, row: Row, column: Column) -> dict[str, Any]:
        """Return all settings of a cell."""
        own = {k: v for k, v in row.settings.items() if k != "columns"}
        short = {**column.quick, **row.quick} if self.quick else {}
        return {**SETTINGS, **self.settings, **column.settings, **own, **short}

    def overridden(self, changes: Mapping[str, Any]) -> Plan:
        """Return the plan with some settings replaced in every cell."""

        def over(part: Any) -> Any:
            own = {name: {**getattr(part, name), **changes} for name in ("settings", "quick")}
            return replace(part, **own)

        rows, columns = tuple(map(over, self.rows)), tuple(map(over, self.columns))
        return replace(self, settings={**self.settings, **changes}, rows=rows, columns=columns)


def names() -> list[str]:
    """Return the names of all plans, in order."""
    files = (file.name for file in PLANS.iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load(name: str, *, quick: bool = False, repeats: int | None = None) -> Plan:
    """Read a plan by its name, or its short form; ``repeats`` seeds in place of the plan's.

    Raises:
        ConfigError: there is no such plan, or it is not well formed.
    """
    if name not in names():
        raise ConfigError(f"No reproduction is called {name!r}{did_you_mean(name, names())}")
    plan = read(name, _content(name), quick=quick)
    return plan if repeats is None else plan.overridden({"seeds": repeats})


def _content(name: str) -> dict[str, Any]:
    own = tomllib.loads((PLANS / f"{name}.toml").read_text("utf-8"))
    base = own.pop("base", None)
    return own if base is None else {**_content(base), **own}


def read(name: str, content: Mapping[str, Any], *, quick: bool = False) -> Plan:
    """Make a plan of the content of its file; every fault is reported at once."""
    known = {"title", "paper", "item", "about", "differs", "references", "settings", "quick"}
    known |= {"rows", "columns", "tables", "figures", "rules"}
    faults = [f"unknown part {k!r}{did_you_mean(k, known)}" for k in content if k not in known]
    faults += [f"{k} is missing" for k in ("title", "paper", "item", "tables") if k not in content]
    short = dict(content.get("quick", {})) if quick else {}
    keep_rows, keep_columns = short.pop("rows", None), short.pop("columns", None)
    rows = [row for entry in content.get("rows", ()) for row in _rows(entry, quick, faults)]
    columns = [c for entry in content.get("columns", ({},)) for c in _columns(entry, faults)]
    settings = {**content.get("settings", {}), **short}
    _check(settings, "settings", faults)
    for found, what in ((rows, "row"), (columns, "column")):
        counted = sorted(Counter(one.name for one in found).items())
        faults += [f"{what} {name!r} is there twice" for name, k in counted if k > 1]
    if faults:
        raise ConfigError(f"Reproduction {name}: " + "; ".join(faults) + ".")
    return Plan(
        name=name,
        title=content["title"],
        paper=content["paper"],
        item=content["item"],
        about=content.get("about", ""),
        rows=tuple(r for r in rows if keep_rows is None or r.name in keep_rows),
        columns=tuple(c for c in columns if keep_columns is None or c.name in keep_columns),
        settings=settings,
        tables=tuple(_with_columns(t, columns) for t in content["tables"]),
        **{k: tuple(content.get(k, ())) for k in ("figures", "rules", "differs", "references")},
        quick=quick,
    )


def _rows(entry: Mapping[str, Any], is_short: bool, faults: list[str]) -> Iterator[Row]:
    named = ("name", "method", "set", "then", "point", "sweep")
    own = {k: v for k, v in entry.items() if k not in named}
    quick, then = dict(own.pop("quick", {})), dict(entry.get("then", {}))
    other = quick.pop("set", {})  # hyper-parameters and options of the short form
    for some in (own, quick):
        _check({k: v for k, v in some.items() if k != "columns"}, "row", faults)
    for values in rows_of(entry.get("sweep", {})):
        name = str(entry.get("name", entry.get("method", "?"))).format(**values)
        chosen = {**entry.get("set", {}), **values, **(other if is_short else {})}
        yield Row(name, entry.get("method", "?"), chosen, entry.get("point"), own, quick, then)


def _columns(entry: Mapping[str, Any], faults: list[str]) -> Iterator[Column]:
    own = {k: v for k, v in entry.items() if k not in ("name", "x", "sweep", "quick", "values")}
    quick, words = entry.get("quick", {}), entry.get("values", {})
    for some in (own, quick):
        _check(some, "column", faults)
    for values in rows_of(entry.get("sweep", {})):
        _check(values, "column", faults)
        x = entry.get("x")
        place: Any = values.get(x) if isinstance(x, str) else x
        name = str(entry.get("name", "all")).format(**values)
        yield Column(name, place, own | values, quick, words)


def _check(given: Mapping[str, Any], where: str, faults: list[str]) -> None:
    known = settings_on("plan")
    for key, value in given.items():
        if key not in known:
            faults.append(f"unknown {where} key {key!r}{did_you_mean(key, known)}")
        elif fault := known[key].fault(value):
            faults.append(f"{where}: {fault.rstrip('.')}")


def _with_columns(table: Mapping[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    """Give every published number the name of its column, so that some can be left out."""
    published = {
        row: {c.name: None if math.isnan(v) else v for c, v in zip(columns, values, strict=True)}
        for row, values in table.get("published", {}).items()
    }
    plain = {"measure": "value samples"} if "labels" in table else {}
    return {**plain, **table, "published": published}


def _find(name: str, among: Sequence[Any], what: str, plan: str) -> Any:
    for one in among:
        if one.name == name:
            return one
    hint = did_you_mean(name, [one.name for one in among])
    raise ConfigError(f"Reproduction {plan} has no {what} {name!r}{hint}")
