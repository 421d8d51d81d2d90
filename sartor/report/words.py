"""Summarise a comparison in words: what was found, for whom, at what cost, and how certain."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sartor.results import metrics
from sartor.results.comparison import Comparison, paired_gains
from sartor.results.ending import longer
from sartor.results.headline import HeadlineMetric
from sartor.results.result import Result
from sartor.results.tables import format_cell

REACHES = {
    "accuracy": ("gets", "{} of all test samples right"),
    "exact match": ("gets", "all labels right for {} of all test samples"),
    "tokens right": ("gets", "{} of all test tokens right"),
    "RMSE": ("has", "a root mean squared error of {} over all test samples"),
    "loss": ("has", "a mean loss of {} over all test samples"),
}
"""Headline metric -> how a sentence states the value of a method."""

POINTS = {"pre": "after aggregation", "post": "after local training"}
"""When a method is evaluated, in short."""


@dataclass
class Words:
    """A summary in words."""

    headline: str = ""  # one sentence
    findings: list[str] = field(default_factory=list)  # short paragraphs
    caveats: list[str] = field(default_factory=list)  # to keep in mind before acting on them
    # (label, value, remark) of the few numbers to see first
    tiles: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Row:
    """One method (one setting of a sweep) and its runs."""

    name: str
    label: str
    result: Result
    runs: list[int]

    @property
    def value(self) -> float:
        """The headline metric, mean over runs."""
        return self.result.mean_of("pooled_measure", self.runs)

    @property
    def text(self) -> str:
        return self.result.headline_metric.text(self.value)


def summarise(comparison: Comparison) -> Words:
    """Return the summary of a comparison in words."""
    rows = [_Row(name, label, result, runs) for label, name, result, runs in comparison.groups()]
    words = Words()
    sign = comparison.headline_metric.sign
    alive = sorted((r for r in rows if math.isfinite(r.value)), key=lambda r: -sign * r.value)
    if not alive:
        words.headline = "No run reached a result: all of them diverged."
        words.caveats = _diverged(rows)
        return words
    best = alive[0]
    reference = next((row for row in rows if row.name == comparison.reference), None)
    _say_best(words, best, alive, reference)
    subject = best if best.name != comparison.reference else None
    if subject is not None and reference is not None:
        _say_gain(words, comparison, subject, reference)
    if "alone" in best.result.choices:
        _say_choice(words, best)
    _say_cost(words, best)
    words.caveats = _caveats(rows, best)
    if reference is None:
        words.caveats.append(
            "Training alone is missing from this report, so it cannot show which clients gain by "
            "federating: compare with local."
        )
    return words


def _reaches(metric: HeadlineMetric) -> tuple[str, str]:
    """Return verb and phrase with which a sentence states the value of a method."""
    article = "an" if metric.name[0] in "AEIOFR" else "a"
    mean = f"{article} {metric.name} of {{}}, the mean over clients"
    return REACHES.get(metric.name, ("has", mean))


def _say_best(words: Words, best: _Row, alive: list[_Row], reference: _Row | None) -> None:
    headline_metric = best.result.headline_metric
    verb, phrase = _reaches(headline_metric)
    repeats = f" (mean of {len(best.runs)} runs)" if len(best.runs) > 1 else ""
    reported = f"{phrase.format(best.text)}{repeats}"
    most, no_more = ("is the most accurate of", "is more accurate")
    if headline_metric.sign > 0 and headline_metric.function is not None:
        most, no_more = ("is the best of", "is better")
    elif headline_metric.sign < 0:
        most, no_more = ("has the smallest error of", "has a smaller error")
    if len(alive) == 1:
        words.headline = f"{best.label} {verb} {reported}."
    elif reference is not None and best.name == reference.name:
        words.headline = f"Training alone wins here: {best.label} {verb} {reported}."
        words.findings.append(
            f"No federated method {no_more} on these data and settings: federating would cost "
            "traffic and gain nothing on average."
        )
    else:
        words.headline = f"{best.label} {most} {len(alive)} methods: {reported}."
    less = "" if headline_metric.sign > 0 else "; less is better"
    words.tiles.append(
        (headline_metric.title, best.text, f"{best.label}, {headline_metric.pooled}{less}")
    )
    if reference is not None and best.name == reference.name and len(alive) > 1:
        words.tiles.append(("Best federated", alive[1].text, alive[1].label))
    if len(alive) > 1:
        second = alive[1]
        pair = _pair(best, second)
        verdict = "these runs do not tell the two apart"
        if math.isfinite(pair.low) and pair.low > 0:
            verdict = f"these runs tell the two apart: {_mean(best, pair)}"
        words.findings.append(f"{second.label} follows at {second.text}; {verdict}.")


def _say_gain(words: Words, comparison: Comparison, best: _Row, reference: _Row) -> None:
    headline_metric = comparison.headline_metric
    difference = headline_metric.gain(best.value, reference.value)
    pair = _pair(best, reference)
    worth = f"is worth {_gap(best, difference)}"
    if headline_metric.sign < 0:
        worth = f"lowers the {headline_metric.name} by {_signed(best, difference).lstrip('+')}"
    verb = _reaches(headline_metric)[0]
    words.findings.append(
        f"Training alone {verb} {reference.text}, so federating {worth}: {_mean(best, pair)}."
    )
    what = "reduction of the" if headline_metric.sign < 0 else "more"
    what = "points of" if headline_metric.is_share else what
    remark = f"{what} {headline_metric.name}"
    words.tiles.append(("Against training alone", _signed(best, difference), remark))
    hurt = comparison.hurt(best.name)
    counts = metrics.spread(hurt[best.runs] if hurt is not None else [math.nan])
    total = len(best.result.clients)
    if not math.isfinite(counts.mean):
        return
    gains = _gains(best, reference.result)
    if counts.mean == 0:
        words.findings.append("No client is worse off than alone.")
        words.tiles.append(("Clients hurt", f"0 of {total}", "worse off than alone"))
        return
    run, client = np.unravel_index(int(np.nanargmin(gains)), gains.shape)
    shown = _few(counts.mean)
    number = shown if len(best.runs) == 1 else f"on average {shown}"
    verb = "is" if number == "1" else "are"
    words.findings.append(
        f"{number[0].upper()}{number[1:]} of {total} clients {verb} worse off than alone; the "
        f"largest loss is {_gap(best, float(gains[run, client]))}, at "
        f"{best.result.clients[client]}."
    )
    words.tiles.append(("Clients hurt", f"{shown} of {total}", "worse off than alone"))


def _say_choice(words: Words, best: _Row) -> None:
    """Add what the clients ended with, where each kept the best of several models."""
    reported = best.result.ended_with_words(*best.runs)
    if reported is None:
        return
    words.findings.append(
        "Every client kept the model that does best on its held-out samples, by more than their "
        f"noise: {reported}. The table of clients shows which."
    )
    found = [ended for run in best.runs if (ended := best.result.ended_with(run))]
    joined = sum(len(ended) - ended.count("alone") for ended in found) / len(found)
    total = len(best.result.clients)
    words.tiles.append(("Joined", f"{_few(joined)} of {total}", "clients, better off than alone"))


def _few(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _say_cost(words: Words, best: _Row) -> None:
    result = best.result
    names = ("megabytes", "gradient_evaluations", "seconds")
    megabytes, gradients, seconds = (result.mean_of(name, best.runs) for name in names)
    clients, rounds = len(result.clients), result.ledger.num_rounds
    traffic = f"nothing in {rounds} rounds"
    if megabytes:
        each = f"{megabytes / clients:,.2f} MB per client, both ways"
        traffic = f"{megabytes:,.1f} MB in {rounds} rounds ({each})"
    words.findings.append(
        f"{best.label} sends {traffic}, and takes {gradients:,.0f} gradient evaluations and "
        f"{seconds:,.1f} s here."
    )
    words.tiles.append(("Traffic", f"{megabytes:,.1f} MB", f"{rounds} rounds, both ways"))


def _caveats(rows: list[_Row], best: _Row) -> list[str]:
    found = []
    seeds = len({best.result.runs[run].seed for run in best.runs})
    if seeds == 1:
        found.append(
            "One allocation of the data only. The spread between allocations is often larger "
            "than the difference between methods: repeat with several seeds before deciding."
        )
    elif seeds < metrics.FEW:
        found.append(
            f"{seeds} allocations only, so the intervals are wide; every value is listed below "
            "the table."
        )
    count = best.result.scores[best.result.headline, "test"].count[best.runs[0]]
    samples = int(np.asarray(count).sum())
    name = best.result.headline_metric.name
    if samples and name in ("accuracy", "exact match"):  # tokens of one text are not independent
        error = 1.96 * math.sqrt(best.value * (1 - best.value) / samples)
        if error > 0.005:
            found.append(
                f"A run has {samples:,} test samples, so its {name} is itself uncertain by about "
                f"±{100 * error:.1f} points."
            )
    found += _mixed_points(rows)
    below = best.result.summary(best.runs[0])["clients_below_floor"]
    if below:
        found.append(
            f"{below} of {len(best.result.clients)} clients have fewer than {metrics.FLOOR} test "
            "samples and do not count as worst client."
        )
    found += _unequal_work(rows, best)
    learning = longer((row.label, row.result, row.runs) for row in rows)
    if learning is not None:
        found.append(f"Still learning at the end: {learning}.")
    settings = max(Counter(row.result.method for row in rows).values())
    if settings > 1:
        found.append(
            f"{settings} settings of one method were compared on test data, so the result of the "
            "best is flattered by the choice."
        )
    return found + _diverged(rows)


def _unequal_work(rows: list[_Row], best: _Row) -> list[str]:
    """Warn if the best method computed much more than another."""

    def work(row: _Row) -> float:
        return row.result.mean_of("gradient_evaluations", row.runs)

    least = min(rows, key=work)
    if not work(least) or work(best) < 2 * work(least):
        return []
    return [
        f"{best.name} takes {work(best) / work(least):,.1f} times the gradient evaluations of "
        f"{least.name}: part of its lead may come from more computation."
    ]


def _mixed_points(rows: list[_Row]) -> list[str]:
    """Warn if methods are evaluated at different points of a round."""
    at = {point: sorted({r.name for r in rows if r.result.headline == point}) for point in POINTS}
    few, many = sorted(POINTS, key=lambda point: len(at[point]))
    if not at[few]:
        return []
    verb = "is" if len(at[few]) == 1 else "are"
    return [
        f"{', '.join(at[few])} {verb} evaluated {POINTS[few]} ({few}), the others {POINTS[many]} "
        f"({many}), each as it is meant to be used; figures and client table show both."
    ]


def _diverged(rows: list[_Row]) -> list[str]:
    found = []
    for row in rows:
        lost = [entry for run in row.runs if (entry := row.result.diverged[run]) is not None]
        if lost:
            found.append(
                f"{row.label} diverged in {len(lost)} of {len(row.runs)} runs, first in round "
                f"{lost[0].get('round', '?')} at {lost[0].get('client', '?')}; a smaller local_lr "
                "is the usual fix."
            )
    return found


def _pair(row: _Row, other: _Row) -> metrics.Paired:
    """Return paired gains over another method: per allocation or, with a single one, per client."""
    partner = row.result.partners(other.result)
    theirs = other.runs
    if len(row.runs) > 1:
        matched = {other.result.runs[run].seed: run for run in other.runs}
        theirs = [matched.get(row.result.runs[run].seed, partner[run]) for run in row.runs]
    return paired_gains(row.result, row.runs, other.result, theirs)


def _mean(row: _Row, pair: metrics.Paired) -> str:
    """Return a clause with the mean paired gain, its interval, and what it averages over."""
    several = len(row.runs) > 1
    unit = f"{pair.number} allocations" if several else f"the {pair.number} clients"
    interval = (
        f" (95 % interval {_signed(row, pair.low)} to {_signed(row, pair.high)})"
        if math.isfinite(pair.low)
        else ""
    )
    return f"the mean gain over {unit} is {_signed(row, pair.mean)}{interval}"


def _gains(row: _Row, reference: Result) -> metrics.Array:
    result, partner = row.result, row.result.partners(reference)
    pairs = [
        (result.client_measure(run=r), reference.client_measure(run=partner[r])) for r in row.runs
    ]
    return np.stack([result.headline_metric.gain(*pair) for pair in pairs])


def _signed(row: _Row, gain: float) -> str:
    """Return a gain with its sign: in points, or in the unit of the measure."""
    return format_cell(float(gain), row.result.headline_metric.gain_kind).replace("-", "−")


def _gap(row: _Row, gain: float) -> str:
    return f"{_signed(row, gain)}{' points' * row.result.headline_metric.is_share}"
