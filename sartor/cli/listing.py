"""What there is: methods with their options, data sets with their places."""

from __future__ import annotations

import re
import types
import typing
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from sartor.cli.config import Experiment, is_folder
from sartor.cli.settings import federation_of, kind_of, label_of
from sartor.core.errors import ConfigError, FederationError, did_you_mean
from sartor.data.datasets import available
from sartor.data.examination import examine
from sartor.data.federation import Federation
from sartor.data.folder import holds_tables, table_of
from sartor.data.tables import read_table
from sartor.methods import METHODS, PAPERS
from sartor.methods.auto import FACTORIES
from sartor.methods.catalogue import AUTO
from sartor.results.tables import Table

Answer = tuple[Any, list[Table]]
"""The answer for a program, and the tables for a person."""


def _method(name: str) -> dict[str, Any]:
    from sartor.analysis.traffic import known

    entry, sent = METHODS[name], known(name)
    return {
        "name": name,
        "family": entry.family,
        "papers": [PAPERS[paper] for paper in entry.papers],
        "models_down": round(sent.down, 4),
        "models_up": round(sent.up, 4),
        "models_once": round(sent.once, 4),
        "gradients": round(sent.gradients, 4),
        "summary": entry.summary,
        "travels": entry.travels,
        "citation": entry.citation,
        "hyper": {
            key: {"default": h.default, "low": h.low, "high": h.high, "note": h.note}
            for key, h in entry.hyper.items()
        },
        "options": {
            key: {"default": default, "allowed": _allowed(hint)}
            for key, (default, hint) in entry.options.items()
        },
    }


def _allowed(hint: Any) -> list[Any]:
    """Return what an option may be: values, or names of kinds."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (types.UnionType, typing.Union):
        return [value for part in get_args(hint) for value in _allowed(part)]
    if hint is bool:
        return [True, False]
    if hint is type(None):
        return [None]
    if get_origin(hint) is tuple:
        return ["names with commas" if get_args(hint)[0] is str else "numbers with commas"]
    kinds = {int: "whole number", float: "number", str: "word"}
    return [kinds.get(hint, str(hint))]


def list_methods() -> Answer:
    """List every method."""
    found = [_method(name) for name in METHODS]
    tables = []
    columns = ["what it does", "travels a round", "once", "from", "studied in"]
    for family in dict.fromkeys(entry.family for entry in METHODS.values()):
        rows = [
            [
                entry["name"],
                entry["summary"],
                f"{entry['models_down']:.2f} down, {entry['models_up']:.2f} up",
                f"{entry['models_once']:.2f}",
                _short(entry["citation"]),
                ", ".join(METHODS[entry["name"]].papers),
            ]
            for entry in found
            if entry["family"] == family
        ]
        tables.append(Table([family, *columns], rows))
    tables[-1].notes.update(
        {
            "auto": f"{AUTO.summary}: sartor run auto",
            "travels": "per client, in sizes of the model; measured, for 64 inputs, 100 hidden "
            "units and 10 classes",
            "a family": "sartor compare all-regularised",
            "one in full": "sartor methods NAME",
            "set one": "sartor run NAME --set KEY=VALUE",
        }
    )
    return found, tables


def _short(citation: str) -> str:
    """Return the first author and the year of a citation."""
    first = citation.split(";")[0]
    year = re.search(r"\b(19|20)\d\d\b", first)
    return f"{first.split(',')[0]} {year.group()}" if year else first.split(",")[0]


def describe_method(name: str) -> Answer:
    """Describe one method: its hyper-parameters with their ranges, its options, its paper."""
    if name == "auto":
        words = {"does": AUTO.summary, "travels": AUTO.travels, "paper": AUTO.citation}
        words["parts"] = ", ".join(FACTORIES)
        return {"name": name, **words}, [Table(["", name], [[*pair] for pair in words.items()])]
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}{did_you_mean(name, METHODS)}")
    entry = _method(name)
    size = f"{entry['models_down']:.2f} models down, {entry['models_up']:.2f} up a round"
    size += f"; {entry['models_once']:.2f} once"
    about = Table(
        ["", name],
        [
            ["does", entry["summary"]],
            ["travels", entry["travels"]],
            ["size", size],
            ["work", f"{entry['gradients']:.4g} times the gradients of one local pass"],
            ["family", entry["family"]],
            ["paper", entry["citation"]],
            ["studied in", "; ".join(entry["papers"]) or "–"],
        ],
    )
    hyper = Table(
        ["hyper-parameter", "default", "from", "to", "meaning"],
        [[key, v["default"], v["low"], v["high"], v["note"]] for key, v in entry["hyper"].items()],
    )
    rows = [
        [key, _word(v["default"]), ", ".join(map(_word, v["allowed"]))]
        for key, v in entry["options"].items()
    ]
    options = Table(["option", "default", "allowed"], rows)
    return entry, [table for table in (about, hyper, options) if len(table)]


def _word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def list_data(data_dir: Path | None) -> Answer:
    """List every data set, whether it is on this machine, and the partitions."""
    found = available(data_dir)
    columns = ["data set", "what", "train + test", "classes", "sample", "found"]
    rows = [
        [
            e.name,
            e.summary,
            e.samples,
            e.classes,
            "×".join(map(str, e.shape)),
            e.found or "not here",
        ]
        for e in found
    ]
    notes = {
        "one in full": "sartor data NAME, or sartor data ./FOLDER for files of your own",
        "partitions": "dirichlet:0.1, pathological:2, iid, column:NAME; then perhaps :pfllib; "
        "classes:2, lognormal:3, grouped:0.5",
        "data folder": "--data-dir, else the variable SARTOR_DATA",
    }
    return [asdict(entry) for entry in found], [Table(columns, rows, notes)]


def examine_data(
    experiment: Experiment, page: Path | None = None
) -> tuple[Any, list[Table], list[str]] | None:
    """Examine a table, or a folder of them: an answer, tables, lines for a person; else None."""
    from sartor.cli import examination

    kind = kind_of(experiment)
    lost = experiment.client is None or experiment.label is None
    if kind == "a data set" or (kind == "a table" and lost):
        return None
    path = Path(experiment.data).expanduser()
    label: Any = None if experiment.label is None else label_of(experiment.label)
    client = experiment.client
    if kind == "a table":
        columns = read_table(path)
    elif client is None and path.is_dir() and holds_tables(path):
        columns, client, label = table_of(path, label)
    else:
        return None
    keys = ("task", "drop", "categories", "missing", "decimal")
    given = {key: getattr(experiment, key) for key in keys} | {"client": client, "label": label}
    found = examine(columns, name=path.name, **given)
    made, faults = None, []
    fill = "mean" if experiment.missing == "error" and found.empty else experiment.missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the findings say it
            made = Federation.from_dataframe(
                {**columns, **found.read}, **{**given, "missing": fill}, seed=experiment.seed
            )
    except FederationError as error:
        faults = [*(error.faults or (str(error),))]
    found = found.with_faults(faults)
    answer = {"name": experiment.data, **(made.describe() if made else {})}
    answer |= {"healthy": found.healthy, "examination": found.describe()}
    lines = [made.summary().splitlines()[0]] if made and found.healthy else []
    words = examination.command(found, experiment, is_folder=kind == "a folder")
    first = ""
    if any(one.state == "fault" and not one.flags for one in found.findings):
        first = "fix the faults that no flag settles; then "
    how = f", {first}with the flags that settle the rest" if found.flags() or first else ""
    lines.append(f"To train on it{how}: {words}")
    tables = examination.tables(found)
    if page is not None:
        from sartor.report import write_examination

        answer["page"] = str(write_examination(found, tables, words, page))
        lines.append(f"Page  {page}")
    return answer, tables, lines


def describe_data(experiment: Experiment) -> tuple[Any, str]:
    """Describe how data would be divided among clients, or how to get what is not here."""
    if not is_folder(experiment.data):
        for entry in available(experiment.data_dir):
            if entry.name == experiment.data and entry.found is None:
                return asdict(entry), entry.how
    federation = federation_of(experiment)(experiment.seed)
    answer = {"name": experiment.data, **federation.describe()}
    return answer, federation.summary()
