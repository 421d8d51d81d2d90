"""The page of an advice: the answer in words, the curve over λ, the clients, the costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sartor.adviser import words as adviser_words
from sartor.adviser.advice import Advice
from sartor.adviser.verification import Verification
from sartor.report.advice_figures import draw_advice, spell
from sartor.report.layout import MOST_ROWS, count, fill, pictures, settings_lines, shown
from sartor.report.words import Words


def render_advice(
    advice: Advice,
    verification: Verification | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> str:
    """Return the page as text.

    Args:
        advice: what ``advise`` found.
        verification: predicted beside measured, if it was verified.
        config: the settings of the command; ``carry_out`` is how to carry the advice out.
        environment: versions and hardware of the machine.
    """
    settings = dict(config or {})
    carry_out = settings.pop("carry_out", "")
    data = settings.get("data")
    return fill(
        "advice.html",
        environment,
        title=f"Advice on {Path(data).name}" if isinstance(data, str) else "Advice",
        facts=[
            count(len(advice.clients), "client"),
            f"{advice.constants['N']:,.0f} training samples",
            advice.model,
        ],
        words=summarise_advice(advice, verification),
        figures=pictures(draw_advice(advice)),
        clients=_client_table(advice),
        costs=shown(adviser_words.costs_table(advice), {}),
        rules=shown(adviser_words.rules_table(advice), {}) if advice.rules else None,
        constants=shown(adviser_words.constants_table(advice), {}),
        verified=None if verification is None else shown(verification.table(), {}),
        carry_out=carry_out,
        theory=advice.basis == "theory",
        settings=settings_lines(settings),
    )


def summarise_advice(advice: Advice, verification: Verification | None) -> Words:
    """Return the answer in words, the few numbers to see first, and the cautions."""
    headline, *reported = advice.summary().splitlines()
    cautions = ("Note: ", "Way out: ")
    found = Words(headline=headline)
    found.findings = [line for line in reported if not line.startswith(cautions)]
    found.caveats = [
        _capital(line.removeprefix("Note: ")) for line in reported if line[:4] == "Note"
    ]
    found.caveats += [line for line in reported if line.startswith("Way out: ")]
    if verification is not None:
        lines = verification.summary().splitlines()
        found.findings += [line for line in lines if not line.startswith("Note: ")]
        found.caveats += [_capital(line[6:]) for line in lines if line.startswith("Note: ")]
    found.tiles = _tiles(advice)
    return found


def _tiles(advice: Advice) -> list[tuple[str, str, str]]:
    kind = "excess loss" if advice.basis == "theory" else "validation loss"
    here = advice.error_at(advice.prox_strength)
    tiles = [
        ("Pull λ", spell(advice.prox_strength), advice.method),
        (
            f"Mean {kind}",
            f"{here:.3g}",
            f"alone {advice.errors[0]:.3g}, one model {advice.errors[-1]:.3g}",
        ),
        (
            "One model hurts",
            f"{len(advice.hurt)} of {len(advice.clients)}",
            "clients, against training alone",
        ),
    ]
    plan = advice.plan
    if plan is not None:
        bound = "guaranteed" if advice.basis == "theory" else "tried"
        tiles += [
            ("Rounds", f"{plan.rounds:,}", f"{plan.guaranteed_rounds:,} {bound}"),
            ("Traffic", adviser_words.size(plan.bytes_total), "both ways, all clients"),
        ]
    return tiles


def _client_table(advice: Advice) -> dict[str, Any]:
    """Return the table of clients, and for each row the bar of its gain: left end and width, %."""
    table = adviser_words.client_table(advice, MOST_ROWS)
    gains = [0.0 if not math.isfinite(g) else g for g in table.column("gain")]
    low, high = min(0.0, *gains), max(0.0, *gains)
    span = (high - low) or 1.0
    bars = [
        (100 * (min(g, 0.0) - low) / span, 100 * abs(g) / span, "bad" if g < 0 else "good")
        for g in gains
    ]
    return {**shown(table, {}), "bars": bars}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
