"""Advice as tables and sentences, for the command line and for the page.

| symbol | here | meaning |
|---|---|---|
| R² | ``R2`` | mean squared distance of the clients' best models from their mean |
| L, μ, ρ | ``L``, ``mu``, ``rho`` | smoothness, strong convexity, size of a sample's gradient |
| n, N, m, p | the same | samples a client and in all, clients, parameters |
"""

from __future__ import annotations

import math
from typing import Any

from sartor.adviser.advice import Advice
from sartor.results.tables import Table

_MEANINGS = {
    "p": "parameters of the convex model",
    "L": "smoothness: the largest curvature of any client's loss",
    "mu": "strong convexity: the smallest curvature of any client's loss",
    "rho": "root mean squared gradient of one sample, largest client",
    "tau2": "variance of the clients' best models, per coordinate, by restricted likelihood",
}
_SIGNS = {"mu": "μ", "rho": "ρ", "tau2": "τ²"}

RULES = {
    "v1 (ρ = 2)": "Theorem 1 of Yu et al., first version, with the ρ of its figures",
    "v1": "the same with the estimated ρ",
    "v2": "Theorem 1, later version: a bound",
    "shrinkage": "smallest mean squared error for equal curvatures",
    "expected error": "smallest expected error on the curve",
}
"""What each rule for λ is."""


def radius(advice: Advice) -> tuple[float, float, float]:
    """Return R̂ and its two standard errors: for these clients, and for clients like these.

    R̂ = √max(R̂², 0) and, by the delta method, s.e.(R̂) = s.e.(R̂²)/(2R̂); NaN where R̂ is 0.
    """
    found = math.sqrt(max(advice.constants["R2"], 0.0))
    errors = [advice.constants[f"R2_{name}"] for name in ("standard_error", "jackknife")]
    here, like = (e / (2.0 * found) if found else math.nan for e in errors)
    if advice.constants["m"] < 3:  # leaving one of two out leaves nothing to compare
        like = math.nan
    return found, here, like


def wins_below(advice: Advice) -> float:
    """Return the R below which one model for all has the smaller squared error of parameters."""
    return math.sqrt(max(advice.constants["R2"] - advice.constants["crossover"], 0.0))


def constants_table(advice: Advice) -> Table:
    """Return what was counted and estimated, with its meaning, a row each."""
    found = advice.constants
    samples = "samples" if advice.basis == "evidence" else "training samples"
    sizes = [client.samples for client in advice.clients]
    between = f"from {min(sizes):,} to {max(sizes):,}" if min(sizes) < max(sizes) else "all alike"
    notes: dict[str, Any] = {}
    rows: list[list[Any]] = [
        ["m", f"{found['m']:,.0f}", "clients"],
        ["N", f"{found['N']:,.0f}", f"{samples} in all"],
        ["n", f"{found['n']:,.1f}".removesuffix(".0"), f"{samples} a client, {between}"],
    ]
    rows += [
        [_SIGNS.get(key, key), f"{found[key]:.4g}", _MEANINGS[key]]
        for key in _MEANINGS
        if key in found
    ]
    if "evidence_alone" in found:
        ways = {"alone": "every client alone", "one": "one model", "learned": "a learned prior"}
        best = max(found[f"evidence_{way}"] for way in ways)
        rows += [
            ["log p", f"{found[f'evidence_{way}'] - best:+.1f}", f"log evidence of {words}"]
            for way, words in ways.items()
        ]
        notes["log p"] = "in nats, against the largest; Laplace's approximation"
    if "R2" in found:
        value, here, like = radius(advice)
        r2 = found["R2"]
        rows += [
            [
                "R²",
                f"{r2:.4g} ± {found['R2_standard_error']:.2g}",
                "mean squared distance of the clients' best models from their mean",
            ],
            ["R", f"{value:.4g} ± {here:.2g}" if value else "0", "its root"],
        ]
        if found["m"] > 2:
            rows += [
                ["", f"{r2:.4g} ± {found['R2_jackknife']:.2g}", "R² for clients like these"],
                ["", f"{value:.4g} ± {like:.2g}" if value else "0", "R for clients like these"],
            ]
        rows += [
            ["", f"{wins_below(advice):.4g}", "the crossover: below it one model for all wins"],
        ]
        notes["±"] = "a standard error: of the noise of these clients' samples"
        if found["m"] > 2:
            notes["±"] += "; for clients like these, of which clients take part (one left out)"
    return Table(["symbol", "value", "meaning"], rows, notes, title="Counted and estimated")


def rules_table(advice: Advice) -> Table:
    """Return λ by every rule, and the one chosen."""
    rows: list[list[Any]] = [[name, pull, RULES[name]] for name, pull in advice.rules.items()]
    rows.append(["chosen", advice.prox_strength, _why(advice)])
    return Table(["rule", "λ", "what it is"], rows, formats={"λ": "strength"}, title="λ by rule")


def _why(advice: Advice) -> str:
    if advice.basis == "trial":
        return "smallest validation loss of the values tried"
    best = advice.rules["expected error"]
    if advice.prox_strength == best:
        return "by expected error"
    if any("budget" in doubt for doubt in advice.doubts):
        return "smallest expected error within the budget"
    if advice.strategy in ("local", "global"):
        end = "everybody alone" if advice.strategy == "local" else "one model for all"
        return f"{end}: simpler, and nearly as good or better"
    return "the tried λ of smallest expected error"


def costs_table(advice: Advice) -> Table:
    """Return steps, and the predicted cost beside the guaranteed one."""
    plan = advice.plan
    theory = advice.basis == "theory"
    columns = ["quantity", "predicted", "guaranteed" if theory else "of the trial"]
    if advice.basis == "evidence" and plan is not None:
        exact = [
            ["rounds", f"{plan.rounds:,}"],
            ["sent, both ways", size(plan.bytes_total)],
            ["gradient evaluations", f"{plan.gradients:,}"],
        ]
        note = {"no step size": "every round solves; there is no rate to choose"}
        return Table(["quantity", "value"], exact, notes=note, title="Cost")
    if plan is None:
        return Table(columns, [], title="Steps and cost")
    more = plan.guaranteed_rounds / max(plan.rounds, 1)
    steps = "full-gradient steps a round K" if theory else "local steps or epochs a round"
    rows: list[list[Any]] = [
        [steps, f"{plan.num_local_steps:,}", None],
        ["local step size η", f"{plan.local_lr:.4g}", None],
    ]
    if plan.strategy == "personalised" and theory:
        rows.append(["server step size γ", f"{plan.server_lr:.4g}", None])
    alone = plan.strategy == "local" and theory
    rows += [
        ["rounds", f"{plan.rounds:,}", f"{plan.guaranteed_rounds:,}"],
        ["sent, both ways", size(plan.bytes_total), size(plan.bytes_total * more)],
        ["gradient evaluations", f"{plan.gradients:,}", f"{plan.gradients * more:,.0f}"],
        *(
            [f"sent once, for the {name}", size(count), None]
            for name, count in advice.asked.items()
        ),
    ]
    notes = {}
    if theory:
        notes["until"] = (
            f"the squared distance to the solution is {plan.accuracy:.2g}"
            + (" (every client by itself)" if alone else "")
            + "; a gradient evaluation is one sample in one backward pass"
        )
    else:
        notes["predicted"] = "until the validation loss is within 1% of its smallest"
    return Table(columns, rows, notes=notes, title="Steps and cost")


def size(count: float) -> str:
    """Return bytes in a unit that suits them.

    >>> size(0), size(2880), size(5_460_000)
    ('0', '2.88 kB', '5.46 MB')
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:,.3g} {unit}"
    return f"{count:.0f} bytes" if count else "0"


def client_table(advice: Advice, most: int | None = None) -> Table:
    """Return the table of clients; of many, those that gain least and most.

    Args:
        advice: of all clients.
        most: rows at most; all if None.
    """
    table = advice.table()
    if most is None or len(table) <= most:
        return table
    order = sorted(range(len(table)), key=lambda i: _gain(advice, i))
    half = most // 2
    table.rows = [table.rows[i] for i in (*order[: most - half], *order[-half:])]
    total = len(advice.clients)
    table.notes["shown"] = (
        f"the {most - half} clients that gain least and the {half} that gain most, of {total:,}; "
        "advice.json has them all"
    )
    return table


def _gain(advice: Advice, position: int) -> float:
    gain = advice.clients[position].gain
    return gain if math.isfinite(gain) else -math.inf
