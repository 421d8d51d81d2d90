"""Render a reproduction: verdicts, published and measured numbers, figures, deviations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sartor.report.evidence import Check, Measured, published_table, tally
from sartor.report.layout import signed
from sartor.report.reproduction_figures import figures_of
from sartor.report.sections import Fold, Section, render_sections
from sartor.report.words import Words
from sartor.reproduce.outcome import Outcome
from sartor.reproduce.plan import load, names

CHANGES = ("model", "clients", "samples", "rounds", "epochs", "steps", "batch", "lr", "seeds")
"""Settings that a short form may change, in the order in which the page lists them."""


def render_reproduction(outcome: Outcome, environment: Mapping[str, Any] | None = None) -> str:
    """Return the page as text: one file that loads nothing and runs no script."""
    plan = outcome.plan
    checks = [Check(v.claim, v.holds, signed(v.found)) for v in outcome.verdicts()]
    seeds = {len(cell) for cell in outcome.records.values()} or {0}
    repeats = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"{max(seeds)}"
    form = "short form" if plan.quick else "full form"
    words = Words(
        headline=f"{plan.item}, {form}: {tally(checks)}.",
        findings=[" ".join(plan.about.split()), *_agreement(outcome)],
        caveats=_caveats(outcome),
        tiles=[
            ("claims that hold", f"{sum(c.passed is True for c in checks)} of {len(checks)}", ""),
            ("allocations or repeats", repeats, "per cell"),
            ("training", _duration(outcome.seconds), "sum over all passes"),
        ],
    )
    tables: list[Any] = []
    for number, spec in enumerate(plan.tables):
        tables.append(outcome.table(number))
        if rows := _measured(outcome, number):
            kind = "percent" if spec.get("scale", "percent") == "percent" else ""
            own = spec.get("beside")
            source = plan.paper if own is None else f"not from the paper, but from the {own} run"
            tables.append(published_table(rows, what="row, column", kind=kind, source=source))
    sections = [
        Section("Claims", [checks], "What the results must show, checked on our means."),
        Section("Figures", figures_of(outcome)),
        Section("Tables", tables, "“Ours” is the mean over allocations ± its standard error."),
        Section(
            "Differences",
            outcome.paired(),
            "Row minus reference on the same allocations, with 95 % intervals of the mean.",
        ),
        Section("What differs from the paper", list(plan.differs)),
        Section("Settings", [Fold("Settings of this run", [_settings(outcome)])]),
    ]
    return render_sections(
        plan.title,
        [section for section in sections if any(section.parts)],
        words=words,
        facts=[plan.paper, plan.item, form],
        environment=environment,
    )


def _measured(outcome: Outcome, number: int) -> list[Measured]:
    percent = outcome.plan.tables[number].get("scale", "percent") == "percent"
    factor = 0.01 if percent else 1.0
    one = len(outcome.plan.columns) == 1
    return [
        Measured(
            entry["row"] if one else f"{entry['row']}, {entry['column']}",
            *(factor * entry[name] for name in ("published", "ours", "error")),
        )
        for entry in outcome.against_published(number)
    ]


def _agreement(outcome: Outcome) -> list[str]:
    judged = [
        entry["within"]
        for number, spec in enumerate(outcome.plan.tables)
        for entry in outcome.against_published(number)
        if entry["within"] is not None and "beside" not in spec
    ]
    if not judged or outcome.plan.quick:
        return []
    return [
        f"{sum(judged)} of {len(judged)} numbers published in the paper lie within two standard "
        "errors of ours."
    ]


def _caveats(outcome: Outcome) -> list[str]:
    found = [f"{name} was not run: {reason}" for name, reason in outcome.skipped.items()]
    if outcome.plan.quick:
        found.append(
            "This is the short form, with fewer rounds, samples and repeats than in the paper. Do "
            "not compare its numbers with the published ones, only their pattern."
            + _shortened(outcome)
        )
    return found


def _shortened(outcome: Outcome) -> str:
    """List what the short form changed in its first cell, with the full form in brackets."""
    short = outcome.plan
    if short.name not in names():
        return ""
    full = load(short.name)
    row, column = short.rows[0], short.columns[0]
    mine = short.settings_of(row, column)
    theirs = full.settings_of(full.row(row.name), full.column(column.name))
    reported = [
        f"{key.replace('_', ' ')} {mine[key]} ({'all' if theirs[key] is None else theirs[key]})"
        for key in CHANGES
        if mine[key] != theirs[key]
    ]
    kept = [
        f"{len(ours)} of {len(all_of)} {what}"
        for ours, all_of, what in (
            (short.rows, full.rows, "rows"),
            (short.columns, full.columns, "columns"),
        )
        if len(ours) < len(all_of)
    ]
    changes = ", ".join(reported + kept)
    return f" Changed here, with the full form in brackets: {changes}." if changes else ""


def _settings(outcome: Outcome) -> dict[str, Any]:
    plan = outcome.plan
    shown = {k: v for k, v in plan.settings.items() if v is not None}
    for row in plan.rows:
        shown[f"row {row.name}"] = {"method": row.method, **row.set, **row.settings}
    for column in plan.columns:
        shown[f"column {column.name}"] = column.settings or "as above"
    return shown


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
