"""The advice in a measure that people use, such as the AUROC, on samples left out.

The answer itself goes by losses and the evidence: a log loss rewards probabilities that are right,
where a measure of ranks or answers alone does not see how sure they are. What it means in the
measure of one's choice stands beside it, for every client, with an interval.

Predictions of a sample are those of the models that did not see it, averaged over the repeats. The
interval is a paired bootstrap: a client's samples are drawn anew, and both ways are measured on the
same draw. Samples are put in an order of their own first, so that the draws do not depend on that
of the rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sartor.adviser.features import View
from sartor.adviser.sharing import WAYS, Sharing, ranks
from sartor.results import metrics
from sartor.results.gains import MEAN, verdict
from sartor.results.headline import HeadlineMetric
from sartor.results.measures import probabilities, rmse
from sartor.results.metrics import Array
from sartor.results.tables import Table
from sartor.theory.linear_models import basis

DRAWS, FEW_DRAWS = 400, 100
"""Of the bootstrap, for few and for many clients."""

MANY = 40
"""Clients."""

COLUMNS = ("client", "alone", "one model", "advised", "gain", "low", "high")


def measure(seen: View, found: Sharing, way: str, metric: HeadlineMetric) -> dict[str, Any]:
    """Return what every client reaches by the measure, and the mean over clients.

    Args:
        seen: all samples.
        found: their predictions, left out.
        way: of sharing, that is advised.
        metric: see ``sartor.results.headline``.

    Returns:
        JSON-able: the name of the measure, how it is shown, and a row for every client.
    """
    names, mask = seen.federation.names, found.clients.mask
    order = ranks(seen.federation, mask, 0).argsort(1).numpy()
    number = DRAWS if len(names) <= MANY else FEW_DRAWS
    rng = np.random.default_rng(0)
    rows: list[list[Any]] = []
    drawn = np.full((len(names), number), np.nan)
    for i, name in enumerate(names):
        own = np.array([row for row in order[i] if found.mask[i, row]])
        y, answers = _answers(found, i, own)
        values = [_value(metric, y, p) for p in answers]
        alone, advised = answers[0], answers[WAYS.index(way)]
        for k in range(number if way != WAYS[0] and len(own) > 1 else 0):
            some = rng.integers(0, len(own), len(own))
            pair = (_value(metric, y[some], p[some]) for p in (advised, alone))
            drawn[i, k] = metric.gain(*pair)
        shown = [values[0], values[1], values[WAYS.index(way)]]
        gain = metric.gain(shown[2], shown[0])
        rows.append([name, *shown, gain, *_ends(drawn[i])])
    table = np.asarray([row[1:5] for row in rows], dtype=np.float64)
    means = [metrics.spread(column).mean for column in table.T]
    known = drawn[np.isfinite(drawn).mean(1) > 0.5]
    rows.append([MEAN, *means, *_ends(metrics.macro(known.T))])
    shown_as = {"kind": metric.kind, "gain_kind": metric.gain_kind}
    return {"measure": metric.name, "sign": metric.sign, **shown_as, "clients": rows}


def table_of(measured: dict[str, Any]) -> Table:
    """Return the table of what :func:`measure` found."""
    plain = [[math.nan if v is None else v for v in row] for row in measured["clients"]]
    rows = [[*row, verdict(*row[5:])] for row in plain]
    less = "; less is better" if measured["sign"] < 0 else ""
    end = "end" if measured["gain_kind"] == "points" else measured["gain_kind"]
    return Table(
        [*COLUMNS, "verdict"],
        rows,
        notes={"low, high": "95 % interval of the gain of the advice over training alone"},
        formats={
            **dict.fromkeys(COLUMNS[1:4], measured["kind"]),
            "gain": measured["gain_kind"],
            **dict.fromkeys(("low", "high"), end),
        },
        title=f"{measured['measure']} of samples left out{less}",
    )


def against(measured: dict[str, Any]) -> str | None:
    """Return a doubt if the measure speaks against the advice beyond its interval."""
    _, alone, _, advised, _, low, high = measured["clients"][-1]
    if verdict(low, high) != "loses":
        return None
    return (
        f"by {measured['measure']} the advice is worse than training alone in the mean over "
        f"clients ({advised:.3g} and {alone:.3g}): losses and that measure disagree here."
    )


def _answers(found: Sharing, i: int, own: Array) -> tuple[Array, list[Array]]:
    """Return labels and the predictions of every way, for some samples of a client."""
    clients, scores = found.clients, found.scores[:, i, own]
    y = clients.y[i].numpy()[own]
    if clients.family == "linear":  # errors do not see where 0 is
        unit = math.sqrt(found.scale)
        return y * unit, [one[:, 0] * unit for one in scores]
    if clients.family == "logistic":
        logits = [np.concatenate([np.zeros_like(one), one], 1) for one in scores]
    else:
        logits = [one @ basis(clients.num_classes).T.numpy() for one in scores]
    return y.astype(int), [probabilities("classification", one) for one in logits]


def _value(metric: HeadlineMetric, y: Array, p: Array) -> float:
    """Return the measure, of metrics that follow from sums too."""
    if metric.function is not None:
        return metric.function(y, p, None)
    if metric.is_share:
        return float((p.argmax(-1) == y).mean())
    if metric.in_units:
        return rmse(y, p)
    return float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-300)).mean())


def _ends(draws: Array) -> tuple[float, float]:
    """Return the 95 % interval of draws; NaN where most of them are undefined."""
    known = metrics.finite(draws)
    if known.size < 0.5 * max(draws.size, 1) or known.size < 2:
        return math.nan, math.nan
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)
