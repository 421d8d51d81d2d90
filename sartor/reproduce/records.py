"""What is kept of a run, and the numbers that tables, figures and rules take from it.

A record is plain JSON: curves by evaluation point, the last accuracies of the clients, costs, and
what probes saw. A measure is a few words that name one number of it:

| words | number |
|---|---|
| best, last, last10 | pooled accuracy over the rounds: maximum, last, mean of the last ten |
| macro, worst | mean and minimum over clients, last evaluation |
| at 10 | pooled accuracy at round 10 |
| loss | pooled loss, last evaluation |
| ... pre, post, global | at that point; else the row's, else the method's own |
| ... everyone | on the test samples of all clients |
| kib | KiB up and down per participant and round |
| gradients | gradient evaluations per participant and round |
| seconds | of a round, shared equally by the runs that trained together |
| probe NAME | the last value of a probe; `at ROUND` for another |
| probe NAME tail SHARE | the mean of the last values, 0.3 for 30 % of them |
| rounds_to NAME FACTOR | first round at which a probe is at most FACTOR times its last value |
| rounds_below NAME SHARE | first round at which a probe is at most SHARE times its first value |
| contraction NAME | the largest ratio of a probe to its value one look before, while above 1e-12 |
| | times its first value |
| fall 10 | the largest fall of pooled accuracy between two looks after round 10 |
| value NAME | a number of an exact solution |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sartor.core.errors import ConfigError, did_you_mean
from sartor.results.tables import jsonable
from sartor.training.onboarding import result_of
from sartor.training.simulation import Simulation

Record = dict[str, Any]
POINTS = ("pre", "post", "global")
KINDS = (
    *("best", "last", "last10", "macro", "worst", "at", "loss"),
    *("kib", "gradients", "seconds", "probe", "rounds_to", "rounds_below", "contraction"),
    *("fall", "value"),
)
CONTRACTED = 1e-12  # of its first value: below it a probe's ratios are rounding
MOST_CLIENTS = 200  # whose numbers are kept one by one


def records_of(
    simulation: Simulation, seen: Mapping[str, Sequence[tuple[int, np.ndarray]]]
) -> list[Record]:
    """Return the record of every run of a finished simulation."""
    result = result_of(simulation, {})
    ledger = result.ledger
    few = len(result.clients) <= MOST_CLIENTS
    median = float(np.median(ledger.seconds["round"][1:] or ledger.seconds["round"]))
    records = []
    for run in range(len(result.runs)):
        points, clients = {}, {}
        for (point, split), scores in result.scores.items():
            rounds, accuracy = result.curve(point, split, run)
            pooled = scores.loss[run].sum(-1) / max(scores.count[run].sum(), 1)
            name = f"{point}/{split}"
            points[name] = {"rounds": rounds, "accuracy": accuracy, "loss": pooled}
            last = scores.accuracy(run)[-1]
            points[name] |= {"macro": np.nanmean(last), "worst": np.nanmin(last)}
            if few:
                clients[name] = last
        taken = max(int(ledger.participants[run].sum()), 1)
        moved = ledger.bytes_up[run].sum() + ledger.bytes_down[run].sum()
        counts = result.label_counts
        records.append(
            jsonable(
                {
                    "method": result.method,
                    "headline": result.headline,
                    "points": points,
                    "clients": clients,
                    "labels": counts[run] if few and counts is not None else None,
                    "kib": moved / taken / 1024,
                    "gradients": ledger.gradient_evaluations[run].sum() / taken,
                    "setup_kib": ledger.setup_bytes[run] / 1024,
                    "setup_gradients": ledger.setup_gradients[run],
                    "seconds": median / len(result.runs),
                    "seconds_all": ledger.total_seconds / len(result.runs),
                    "rounds": ledger.num_rounds,
                    "probes": {
                        name: {"rounds": [t for t, _ in rows], "values": [v[run] for _, v in rows]}
                        for name, rows in seen.items()
                    },
                    "diverged": result.diverged[run],
                }
            )
        )
    return records


def measure(record: Record, words: str, point: str | None = None) -> float:
    """Return the number that a measure names; NaN where the run has none.

    ``point`` is the row's own, where the words name none.
    """
    given = words.split()
    kind = given[0]
    if kind in ("kib", "gradients", "seconds"):
        return _number(record.get(kind))
    if kind == "value":
        return _number(record.get("values", {}).get(given[1]))
    if kind in ("probe", "rounds_to", "rounds_below", "contraction"):
        return _of_probe(record, given)
    curve = None if record.get("diverged") else _curve(record, given, point)
    if curve is None:
        return math.nan
    if kind in ("macro", "worst"):
        return _number(curve[kind])
    if kind == "loss":
        return _number(curve["loss"][-1])
    values = np.asarray([_number(v) for v in curve["accuracy"]])
    if kind == "best":
        return float(np.nanmax(values))
    if kind == "last10":
        return float(np.nanmean(values[-10:]))
    if kind == "at":
        places = np.flatnonzero(np.asarray(curve["rounds"]) <= int(given[1]))
        return float(values[places[-1]]) if len(places) else math.nan
    if kind == "fall":
        late = values[np.asarray(curve["rounds"]) >= int(given[1])]
        return float(np.max(late[:-1] - late[1:])) if len(late) > 1 else math.nan
    if kind != "last":
        raise ConfigError(f"unknown measure {words!r}{did_you_mean(kind, KINDS)}")
    return float(values[-1])


def series(record: Record, words: str, point: str | None = None) -> tuple[list[int], list[float]]:
    """Return rounds and values of a curve: "accuracy", "loss" (with a point), or "probe NAME"."""
    given = words.split()
    if given[0] == "probe":
        seen = record["probes"].get(given[1], {"rounds": [], "values": []})
        return list(seen["rounds"]), [_number(v) for v in seen["values"]]
    curve = _curve(record, given, point)
    if curve is None:
        return [], []
    # "pre" entry t follows t rounds; "post" entry t follows the local work of round t, so t + 1.
    shift = _point(record, given, point) == "post"
    return [t + shift for t in curve["rounds"]], [_number(v) for v in curve[given[0]]]


def _point(record: Record, given: Sequence[str], point: str | None) -> str:
    named = [word for word in given if word in POINTS]
    return named[0] if named else point or record["headline"]


def _curve(record: Record, given: Sequence[str], point: str | None) -> dict[str, Any] | None:
    split = "val" if "everyone" in given else "test"
    return record["points"].get(f"{_point(record, given, point)}/{split}")


def _of_probe(record: Record, given: Sequence[str]) -> float:
    seen = record["probes"].get(given[1])
    if not seen or not seen["values"]:
        return math.nan
    rounds, values = seen["rounds"], [_number(v) for v in seen["values"]]
    if given[0] in ("rounds_to", "rounds_below", "contraction") and not math.isfinite(values[-1]):
        return math.nan
    if given[0] == "rounds_to":
        limit = float(given[2]) * values[-1]
        return float(next(t for t, v in zip(rounds, values, strict=True) if not v > limit))
    if given[0] == "rounds_below":
        limit = float(given[2]) * values[0]
        reached = (t for t, v in zip(rounds, values, strict=True) if v <= limit)
        return float(next(reached, math.nan))
    if given[0] == "contraction":
        enough = CONTRACTED * values[0]
        pairs = [(a, b) for a, b in itertools.pairwise(values) if b > enough]
        return max((b / a for a, b in pairs), default=math.nan)
    if "tail" in given:
        share = float(given[given.index("tail") + 1])
        return float(np.mean(values[-max(1, round(share * len(values))) :]))
    if "at" in given:
        return values[rounds.index(int(given[given.index("at") + 1]))]
    return values[-1]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
