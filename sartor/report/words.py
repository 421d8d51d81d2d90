"""Summarise a comparison in words: what was found, for whom, at what cost, and how certain."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from sartor.report.gains import (
    Gains,
    difference,
    gain_text,
    gains_of,
    interval,
    signed,
    some,
    subject,
)
from sartor.report.layout import listed
from sartor.results import metrics
from sartor.results.comparison import Comparison
from sartor.results.ending import longer
from sartor.results.headline import HeadlineMetric
from sartor.results.result import Result

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

ALONE = "training alone"
OVER = ", the mean over clients"
MANY = 20
"""From so many clients on, one is expected to get a wrong verdict by chance."""


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
    result: Result

    @property
    def runs(self) -> list[int]:
        return list(range(len(self.result.runs)))

    @property
    def value(self) -> float:
        """The headline metric, mean over runs."""
        return self.result.mean_of("pooled_measure")

    @property
    def text(self) -> str:
        return self.result.headline_metric.text(self.value)


def summarise(comparison: Comparison) -> Words:
    """Return the summary of a comparison in words."""
    comparison = comparison.expanded()
    rows = [_Row(name, result) for name, result in comparison.items()]
    words = Words()
    sign = comparison.headline_metric.sign
    alive = sorted((r for r in rows if math.isfinite(r.value)), key=lambda r: -sign * r.value)
    if not alive:
        words.headline = "No run reached a result: all of them diverged."
        words.caveats = _diverged(rows)
        return words
    best = alive[0]
    chosen = subject(comparison)
    shown = next((row for row in alive if row.name == chosen), best)
    gains = gains_of(comparison).get(shown.name)
    _say_best(words, alive, comparison.reference)
    if gains is not None:
        _say_gain(words, shown, gains)
    if "alone" in shown.result.choices:
        _say_choice(words, shown)
    _say_cost(words, shown)
    words.caveats = _caveats(rows, best)
    if gains is None and comparison.reference is None:
        words.caveats.append(
            "Training alone is missing from this report, so it cannot show which clients gain by "
            "federating: compare with local."
        )
    elif gains is not None and len(gains.clients) >= MANY:
        expected = 0.05 * len(gains.clients)
        words.caveats.append(
            f"With {len(gains.clients)} clients, about {expected:.0f} would be said to gain or to "
            "lose by chance alone, if there were no difference at all."
        )
    return words


def _reaches(metric: HeadlineMetric) -> tuple[str, str]:
    """Return verb and phrase with which a sentence states the value of a method."""
    article = "an" if metric.name[0] in "AEIOFR" else "a"
    mean = f"{article} {metric.name} of {{}}{OVER}"
    return REACHES.get(metric.name, ("has", mean))


def _say_best(words: Words, alive: list[_Row], alone: str | None) -> None:
    """Name the best method, or those of which none is surely the best."""
    best = alive[0]
    metric = best.result.headline_metric
    verb, phrase = _reaches(metric)
    repeats = f" (mean of {len(best.runs)} runs)" if len(best.runs) > 1 else ""
    reported = f"{phrase.format(best.text)}{repeats}"
    over = [difference(best.result, row.result)[1] for row in alive[1:]]
    tied = [row for row, one in zip(alive[1:], over, strict=True) if one.verdict != "gains"]
    unknown = any(not math.isfinite(one.low) for one in over)
    less = "" if metric.sign > 0 else "; less is better"
    remark = f"{best.name}, {metric.pooled}{less}"
    most = f"{best.name} {_most(metric)} {len(alive)} methods: {reported}"
    if len(alive) == 1:
        words.headline = f"{best.name} {verb} {reported}."
    elif unknown:  # of an error or a score; a single division does not say how certain it is
        words.headline = (
            f"In this one division of the data, {most}. Only several divisions can say whether "
            "that is more than chance."
        )
        words.findings.append(f"Then come {_with_values(alive[1:], alone)}.")
        remark += "; one division"
    elif tied:
        words.headline = _tie(best, tied, alone, len(alive))
        remark += f"; not surely better than {_listed(tied, alone)}"
        ends = interval(metric, over[0].low, over[0].high)
        if ends and alone not in (best.name, alive[1].name):  # that is a finding of its own
            words.findings.append(
                f"{best.name} {verb} {reported}. The next, {alive[1].name}, has {alive[1].text}: "
                f"the mean difference, {gain_text(metric, over[0])} a client, has a 95 % "
                f"interval of {ends}."
            )
        worse = [row for row in alive[1:] if row not in tied]
        if worse:
            words.findings.append(f"Surely worse than {best.name}: {_with_values(worse, alone)}.")
    elif best.name == alone:
        words.headline = f"Training alone wins here: {best.name} {verb} {reported}."
        words.findings.append(
            "Every federated method is surely worse on these data and settings: federating would "
            "cost traffic and lose on average."
        )
    else:
        words.headline = f"{most}."
        words.findings.append(
            f"{alive[1].name} follows at {alive[1].text}; these runs tell the two apart: the mean "
            f"gain of a client is {gain_text(metric, over[0])} (95 % interval "
            f"{interval(metric, over[0].low, over[0].high)})."
        )
    behind = next(
        (
            row
            for row, one in zip(alive[1:], over, strict=True)
            if row.name == alone and one.verdict == "gains"
        ),
        None,
    )
    if behind is not None:
        less_than = "surely less" if metric.sign > 0 else "surely more"
        words.headline += f" Training alone {verb} {behind.text}, {less_than}."
    words.tiles.append((metric.title, best.text, remark))


def _most(metric: HeadlineMetric) -> str:
    """Return what the best of several methods is, before their number."""
    if metric.sign < 0:
        return "has the smallest error of"
    return "is the most accurate of" if metric.name == "accuracy" else "is the best of"


def _tie(best: _Row, tied: list[_Row], alone: str | None, number: int) -> str:
    """Return a sentence on methods of which none is surely the best."""
    metric = best.result.headline_metric
    joint = [best, *tied]
    if len(joint) > 2:
        joint_values = sorted(row.value for row in joint)
        ends = [metric.text(value) for value in (joint_values[0], joint_values[-1])]
    else:
        ends = [row.text for row in joint]
    joined = f"{ends[0]} {'to' if len(joint) > 2 else 'and'} {ends[1]}"
    spread = ends[0] if ends[0] == ends[1] else joined
    who = _listed(joint, alone)
    who = f"{who[0].upper()}{who[1:]}" if who.startswith(ALONE) else who
    of = f", of {number} methods" if len(joint) < number else ""
    verb, phrase = _reaches(metric)
    both = {"gets": "get", "has": "have"}[verb]
    over = ["clients"] * (OVER in phrase) + [f"{len(best.runs)} runs"] * (len(best.runs) > 1)
    means = f" (means over {' and '.join(over)})" if over else ""
    values_of = phrase.removesuffix(OVER).format(spread)
    return f"{who} cannot be told apart{of}: they {both} {values_of}{means}."


def _listed(rows: list[_Row], alone: str | None) -> str:
    """Return the names of methods, training alone in words."""
    return listed([ALONE if row.name == alone else row.name for row in rows])


def _with_values(rows: list[_Row], alone: str | None) -> str:
    return listed([f"{ALONE if r.name == alone else r.name} ({r.text})" for r in rows])


def _say_gain(words: Words, row: _Row, gains: Gains) -> None:
    """Say what the clients gain by a method over training alone, and which of them do."""
    metric, whole, counts = gains.metric, gains.whole, gains.counts
    known = interval(metric, whole.low, whole.high)
    ends = f" (95 % interval {known})" if known else ""
    what = f", what its {metric.name} falls by," if metric.sign < 0 else ""
    words.findings.append(
        f"Training alone {_reaches(metric)[0]} {metric.text(whole.alone)} as the mean over "
        f"clients, {row.name} {metric.text(whole.federated)}: the mean gain of a client{what} is "
        f"{gain_text(metric, whole)}{ends}."
    )
    parts = [
        f"{some(gains.named(verdict))} {verb if counts[verdict] != 1 else f'{verb}s'}"
        for verdict, verb in (("gains", "gain"), ("loses", "lose"))
        if counts[verdict]
    ]
    unknown = counts["cannot tell"]
    if unknown == len(gains.clients):
        sentence = "these data cannot tell of any client whether it gains or loses."
    elif unknown:
        others = "1 other" if unknown == 1 else f"{unknown} others"
        sentence = f"{' and '.join(parts)}; of {others} these data cannot tell."
    else:
        sentence = f"{' and '.join(parts)}."
    words.findings.append(f"With {row.name}, {sentence}")
    remark = f"{row.name}: {known or 'the interval is not known from one division'}"
    unit = "points" if metric.is_share else f"lower {metric.name}" if metric.sign < 0 else ""
    label = f"Mean gain over training alone{f', {unit}' * bool(unit)}"
    words.tiles.append((label, signed(metric, whole.gain, whole.low, whole.high), remark))
    values = " · ".join(str(counts[verdict]) for verdict in counts)
    words.tiles.append(("Clients", values, "gain · lose · cannot tell"))


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
        f"{best.name} sends {traffic}, and takes {gradients:,.0f} gradient evaluations and "
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
    learning = longer((row.name, row.result, row.runs) for row in rows)
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
                f"{row.name} diverged in {len(lost)} of {len(row.runs)} runs, first in round "
                f"{lost[0].get('round', '?')} at {lost[0].get('client', '?')}; a smaller local_lr "
                "is the usual fix."
            )
    return found
