"""What ``auto`` chose and why, as tables: the candidates, and what every client uses.

Both are read from ``result.config["selection"]``, which ``sartor/training/auto.py`` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sartor.core.errors import ConfigError
from sartor.results.readings import Readings
from sartor.results.tables import Table, format_cell

RULES = {
    "evidence": "evidence, than which nothing is surely better",
    "one": "one for all",
    "each": "each client's best",
    "stack inf": "stack, one for all",
}


def selection_of(result: Readings, run: int) -> Mapping[str, Any]:
    """Return what the trials of a run found, as it is written in a run folder."""
    found: Mapping[str, Any] | None = result.config.get("selection")
    if found is None:
        raise ConfigError(
            f"This result of {result.method!r} was not chosen by trials; only that of 'auto' is."
        )
    (index,) = result._indices(run)
    seeds: Mapping[str, Mapping[str, Any]] = found["seeds"]
    return seeds[str(result.runs[index].seed)]


def candidates_table(result: Readings, run: int) -> Table:
    """Return a row for every candidate: its rate and rounds, held-out loss, and mean weight."""
    found = selection_of(result, run)
    alone = found["candidates"]["local"]["loss"]
    rows = []
    for name, one in found["candidates"].items():
        gain = None if name == "local" else alone - one["loss"]
        error = None if name == "local" else one["error"]
        weight = sum(one["weights"]) / len(one["weights"])
        rows.append([name, one["rate"], one["rounds"], one["loss"], gain, error, weight])
    notes: dict[str, Any] = {"taken": words_of(found["rule"])}
    for name, loss in found["rules"].items():
        notes[f"held-out loss, {words_of(name)}"] = format_cell(loss)
    limit = result.config["selection"]["limit"]
    late = [name for name, one in found["candidates"].items() if one["rounds"] == limit]
    if late:
        notes["best after all rounds"] = f"{', '.join(late)}; more rounds may help"
    cost = found["cost"]
    notes["the trials took"] = (
        f"{cost['gradients']:,.0f} gradients, {cost['bytes'] / 1e6:,.1f} MB, "
        f"{cost['seconds']:.0f} s"
    )
    notes |= {f"no {name}": why for name, why in found["left out"].items()}
    return Table(
        ["candidate", "rate", "rounds", "held-out loss", "gain over local", "±", "weight"],
        rows,
        notes=notes,
        formats={"weight": "percent"},
        title="what auto tried",
    )


def weights_table(result: Readings, run: int) -> Table:
    """Return a row for every client: its held-out losses, and the weights of what it uses."""
    found = selection_of(result, run)
    used = {k: one["weights"] for k, one in found["candidates"].items() if any(one["weights"])}
    rows = []
    for i, (name, one) in enumerate(found["clients"].items()):
        row = [name, one["samples"], one["alone"], one["chosen"], one["error"]]
        rows.append([*row, *(weights[i] for weights in used.values())])
    stays = [name for name, one in found["clients"].items() if one["stays alone"]]
    return Table(
        ["client", "held-out samples", "loss alone", "loss chosen", "±", *used],
        rows,
        notes={"stay alone": ", ".join(stays) or "none"},
        formats=dict.fromkeys(used, "percent"),
        title="what every client uses",
    )


def words_of(rule: str) -> str:
    """Return a rule of choice in words.

    >>> words_of("stack 10")
    'stack, own weights (10)'
    """
    return RULES.get(rule, f"stack, own weights ({rule.removeprefix('stack ')})")
