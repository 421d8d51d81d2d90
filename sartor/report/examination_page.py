"""Render the examination of a table: two maps of where clients differ, findings, all tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sartor.data.examination import Examination, Finding
from sartor.data.shifts import RANK, Shift
from sartor.report.drawing import Figure
from sartor.report.heat import heat
from sartor.report.layout import count, listed
from sartor.report.sections import Code, Part, Section, render_sections
from sartor.report.words import Words
from sartor.results.tables import Table

MOST_ROWS, MOST_CLIENTS = 40, 60
"""The most columns and clients of a map."""


def render_examination(found: Examination, tables: Sequence[Table], command: str) -> str:
    """Return the page as text.

    Args:
        found: what was found.
        tables: the tables that a terminal shows.
        command: what trains on the table.
    """
    states = [finding.state for finding in found.findings]
    moved = len({shift.column for shift in found.shifts if shift.is_flagged})
    headline = "Training refuses this table until its faults are fixed."
    if found.healthy:
        headline = "Training would take this table as it is."
    words = Words(
        headline=headline,
        tiles=[
            ("Faults", str(states.count("fault")), "training refuses them"),
            ("Suspicions", str(states.count("suspect")), "training would take them"),
            ("Shifted columns", str(moved), "between clients, beyond chance"),
        ],
    )
    first, *others = tables
    figures: list[Part] = [one for one in (_shift_map(found), _empty_map(found)) if one]
    findings = [_sentence(finding) for finding in found.findings] or ["Nothing to fix was found."]
    sections = [Section("Findings", findings), Section("Clients", [first])]
    sections += [Section("Where clients differ", figures)] if figures else []
    tabled: list[Part] = list(others[:-1])  # the last has the findings
    sections += [Section("Shift and empty cells", tabled, key="columns")] if tabled else []
    sections.append(Section("Train on it", [Code(command)], key="train"))
    facts = [count(found.rows, "row"), count(len(found.clients), "client")]
    return render_sections(f"Examination of {found.source}", sections, words=words, facts=facts)


def _sentence(finding: Finding) -> str:
    columns = f", {listed(list(finding.columns[:6]))}" if finding.columns else ""
    more = " and more" if len(finding.columns) > 6 else ""
    name = f"{finding.state.capitalize()}: {finding.kind}{columns}{more}."
    return f"{name} Found: {finding.found}. What to do: {finding.fix}."


def _shift_map(found: Examination) -> Figure | None:
    clients = [client.name for client in found.clients][:MOST_CLIENTS]
    flagged = [shift for shift in found.shifts if shift.is_flagged]
    columns = list(dict.fromkeys(shift.column for shift in flagged))[:MOST_ROWS]
    if not columns:
        return None
    place = {name: i for i, name in enumerate(columns)}
    across = {name: i for i, name in enumerate(clients)}
    apart = np.zeros((len(columns), len(clients)))
    for shift in flagged:
        if shift.column in place and shift.client in across:
            apart[place[shift.column], across[shift.client]] = _overlap(shift)
    return Figure(
        "shift-map",
        "How far each client lies from the others",
        "Row: a column of the table, those that shift most first; column: a client. Full colour: "
        "its values and those elsewhere have nothing in common. White: small, or no more than "
        "chance would do.",
        f"Heat map of the shift of {len(columns)} columns at {len(clients)} clients; the largest "
        f"is {apart.max():.2f} of 1.",
        heat([apart], columns, clients, x="client"),
    )


def _overlap(shift: Shift) -> float:
    """Return a distance as a total variation: that of two normal densities at a rank distance."""
    if shift.measure == RANK:
        return math.erf(abs(shift.distance) / 2 / math.sqrt(2))
    return shift.distance


def _empty_map(found: Examination) -> Figure | None:
    if not found.empty:
        return None
    clients = [client.name for client in found.clients][:MOST_CLIENTS]
    order = sorted(found.empty, key=lambda name: -max(found.empty[name].values()))[:MOST_ROWS]
    share = np.array([[found.empty[name][client] for client in clients] for name in order])
    return Figure(
        "empty-map",
        "Where cells are empty",
        "Row: a column of the table; column: a client. Full colour: no value at all.",
        f"Heat map of the empty cells of {len(order)} columns at {len(clients)} clients.",
        heat([share], order, clients, x="client"),
    )
