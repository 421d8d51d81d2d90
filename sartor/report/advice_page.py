"""Render an advice: the answer in words, the curve over λ, the clients, the costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sartor.adviser import words as adviser_words
from sartor.adviser.advice import Advice
from sartor.adviser.verification import Verification
from sartor.report.advice_figures import draw_advice, spell
from sartor.report.layout import MOST_ROWS, count
from sartor.report.sections import Code, Exhibit, Fold, Section, render_sections
from sartor.report.words import Words

_PULL = "λ_i is the pull that would suit the client best."
EXPECTED = {
    "evidence": "“Expected” is the loss of samples left out, when the advice was made.",
    "theory": "“Expected” is the loss above the best possible, so compare its differences between "
    "rows with those of the test loss.",
    "trial": "“Expected” is the validation loss of the trial.",
}
OF_CLIENTS = {
    "evidence": "Loss of samples that were left out,",
    "theory": "Expected loss in excess of the best possible",
    "trial": "Validation loss",
}
MORE_OF_CLIENTS = {
    "evidence": "a gain smaller than its 95 % interval may be chance.",
    "theory": _PULL,
    "trial": _PULL,
}
"""What the errors of an advice are, by its basis."""


def render_advice(
    advice: Advice,
    verification: Verification | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> str:
    """Return the page as text; ``config["carry_out"]`` is the command that follows the advice."""
    samples = "samples" if advice.basis == "evidence" else "training samples"
    settings = dict(config or {})
    carry_out = settings.pop("carry_out", "")
    data = settings.get("data")
    expected = EXPECTED[advice.basis]
    estimates = [Exhibit(adviser_words.constants_table(advice), "Constants")]
    if advice.rules:
        rules = adviser_words.rules_table(advice)
        estimates.append(Exhibit(rules, "Rules for λ", "λ by rule", "rules"))
    sections = [
        Section("Figures", [draw_advice(advice)]),
        Section(
            "Clients",
            [_client_table(advice)],
            f"{OF_CLIENTS[advice.basis]} of each client: alone, with one model for all, and as "
            "advised. The gain is what the recommendation saves compared with training alone; "
            f"{MORE_OF_CLIENTS[advice.basis]}",
        ),
        Section("What it costs", [adviser_words.costs_table(advice)], key="costs", link="Costs"),
    ]
    if verification is not None:
        lead = (
            "The recommendation and its rivals on several divisions of all samples, each evaluated "
            f"on the samples held out. {expected} A positive number under “above advised” means "
            "that the recommendation does better."
        )
        title, measured = "Advised and measured", [verification.table()]
        sections.append(Section(title, measured, lead, "verification", "Verification"))
    if carry_out:
        sections.append(Section("Follow the advice", [Code(carry_out)], key="carry-out"))
    sections += [
        Section("Counted and estimated", estimates, key="constants", link="Estimates"),
        Section("Settings", [Fold("Settings of the command", [settings])]),
    ]
    return render_sections(
        f"Advice on {Path(data).name}" if isinstance(data, str) else "Advice",
        sections,
        words=summarise_advice(advice, verification),
        facts=[
            count(len(advice.clients), "client"),
            f"{advice.constants['N']:,.0f} {samples}",
            advice.model,
        ],
        environment=environment,
    )


def summarise_advice(advice: Advice, verification: Verification | None) -> Words:
    """Return the answer in words, the few numbers to see first, and the caveats."""
    headline, *lines = advice.summary().splitlines()
    lines += [] if verification is None else verification.summary().splitlines()
    found = Words(headline=headline, tiles=_tiles(advice))
    for line in lines:
        note = line.removeprefix("Note: ")
        if line.startswith(("Note: ", "Way out: ")):
            found.caveats.append(note[:1].upper() + note[1:])
        else:
            found.findings.append(line)
    return found


def _tiles(advice: Advice) -> list[tuple[str, str, str]]:
    kind, here = advice.kind, advice.error_at(advice.prox_strength)
    ends = f"alone {advice.errors[0]:.3g}, one model {advice.errors[-1]:.3g}"
    hurt = f"{len(advice.hurt)} of {len(advice.clients)}"
    sure = [client.outcome for client in advice.clients]
    tiles = [
        ("Pull λ", spell(advice.prox_strength), advice.method)
        if advice.basis != "evidence"
        else ("Answer", advice.verdict, advice.method),
        (f"Mean {kind}", f"{here:.3g}", ends),
        ("One model hurts", hurt, "clients, against training alone")
        if advice.basis != "evidence"
        else ("Surely gain", f"{sure.count('gains')} of {len(sure)}", "clients, by their samples"),
    ]
    plan = advice.plan
    if plan is not None:
        bound = {"theory": "guaranteed", "trial": "tried"}.get(advice.basis)
        under = f"{plan.guaranteed_rounds:,} {bound}" if bound else "no rate to choose"
        tiles += [
            ("Rounds", f"{plan.rounds:,}", under),
            ("Traffic", adviser_words.size(plan.bytes_total), "both ways, all clients"),
        ]
    return tiles


def _client_table(advice: Advice) -> Exhibit:
    """Return the table of clients with a bar for the gain of each."""
    table = adviser_words.client_table(advice, MOST_ROWS)
    gains = [0.0 if not math.isfinite(g) else g for g in table.column("gain")]
    low, high = min(0.0, *gains), max(0.0, *gains)
    span = (high - low) or 1.0
    bars = [
        (100 * (min(g, 0.0) - low) / span, 100 * abs(g) / span, "bad" if g < 0 else "good")
        for g in gains
    ]
    return Exhibit(table, bars=bars)
