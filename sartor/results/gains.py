"""What every client gains over training alone, with an interval and a verdict.

| runs | interval of a client's mean gain |
|---|---|
| K divisions of the samples | mean ± t · √((1/K + n_test/n_train) s²) |
| one division, of answers that are right or wrong | mean ± 1.96 · √(a(1 − a)/n + f(1 − f)/n) |
| one division, any other measure | not known: repeat over several divisions |

K divisions of the same samples share most of them, so their mean is less certain than that of K
independent ones: the term n_test/n_train stands for that (Nadeau and Bengio, 2003). It is 0 where
every run draws its own allocation. s is at least what one test sample more or less makes of a
share. For one division, a and f are the accuracies alone and federated on n test samples; that the
two are measured on the same samples is not used, so this interval is too wide rather than too
narrow.

A client *gains* if its interval lies above zero, *loses* if it lies below; else these data *cannot
tell*. Of clients without any effect, 5 % get a wrong verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sartor.results import metrics
from sartor.results.headline import ACCURACY, HeadlineMetric
from sartor.results.metrics import Array
from sartor.results.readings import Readings
from sartor.results.tables import Table, format_cell

VERDICTS = ("gains", "loses", "cannot tell")
MEAN = "all clients"
"""The row of the mean over clients."""


class ClientGain(NamedTuple):
    """What one client gains, as means over runs."""

    client: str
    samples: float  # test samples of a run
    alone: float
    federated: float
    gain: float  # positive is better
    low: float  # 95 % interval; NaN if it is not known
    high: float
    largest_class: float  # share of the most frequent class in its training data; NaN if none

    @property
    def verdict(self) -> str:
        """Return "gains", "loses" or "cannot tell"."""
        return verdict(self.low, self.high)

    def in_samples(self) -> str:
        """Return the gain as test samples: "+1.2 of 74"."""
        more = self.gain * self.samples
        return f"{more:+.1f} of {self.samples:.0f}" if math.isfinite(more) else ""


def verdict(low: float, high: float) -> str:
    """Return the verdict of an interval.

    >>> verdict(0.01, 0.05), verdict(-0.05, -0.01), verdict(-0.01, 0.05), verdict(np.nan, np.nan)
    ('gains', 'loses', 'cannot tell', 'cannot tell')
    """
    return "gains" if low > 0 else "loses" if high < 0 else "cannot tell"


def overlap(config: Mapping[str, Any]) -> float:
    """Return n_test/n_train where runs divide the same samples, and 0 where each draws its own."""
    data = config.get("data") or {}
    sizes = data.get("samples") or {}
    if "partition" in (data.get("info") or {}) or not sizes.get("train"):
        return 0.0
    return float(sizes["test"] / (sizes["train"] + sizes.get("val", 0)))


def divisions(config: Mapping[str, Any], seeds: Sequence[int]) -> int:
    """Return how many different divisions of the data the runs of these seeds have."""
    prints = config.get("fingerprints") or {}
    return len({prints.get(str(seed), seed) for seed in seeds})


def client_gains(
    result: Readings, reference: Readings, partner: Sequence[int], runs: Sequence[int]
) -> tuple[list[ClientGain], ClientGain]:
    """Return the gain of every client over some runs, and of their mean.

    Run k is compared with run ``partner[k]`` of ``reference``: the same clients, each alone.
    """
    runs = [k for k in runs if not result.diverged[k] and not reference.diverged[partner[k]]]
    runs = runs or [0]
    metric = result.headline_metric
    federated = np.stack([result.client_measure(run=k) for k in runs])
    alone = np.stack([reference.client_measure(run=partner[k]) for k in runs])
    count = np.stack([np.asarray(result._scores().count[k], dtype=float) for k in runs])
    several = divisions(result.config, [result.runs[k].seed for k in runs]) > 1
    share = overlap(result.config)
    least = largest_class(result, runs)
    each = [
        _gain(name, metric, alone[:, i], federated[:, i], count[:, i], several, share, least[i])
        for i, name in enumerate(result.clients)
    ]
    before, after = metrics.macro(alone), metrics.macro(federated)
    largest = float(np.nansum(count.mean(0) * least) / np.nansum(count.mean(0)))
    whole = _gain(MEAN, metric, before, after, count.sum(1), several, share, largest)
    return each, whole


def _gain(
    name: str,
    metric: HeadlineMetric,
    alone: Array,
    federated: Array,
    count: Array,
    several: bool,
    share: float,
    largest: float,
) -> ClientGain:
    """Return the gain of a client (or a mean) from its values in every run."""
    found = metric.gain(federated, alone)
    known = metrics.finite(found)
    samples = float(count.mean())
    mean = float(known.mean()) if known.size else math.nan
    half = math.nan
    if several and known.size > 1:
        spread = float(known.var(ddof=1))
        if metric.has_samples and samples:
            spread = max(spread, samples**-2 / 12)
        wide = metrics.t_quantile(0.975, known.size - 1)
        half = wide * math.sqrt((1 / known.size + share) * spread)
    elif not several and metric.has_samples and samples and known.size:
        a, f = (float(np.nanmean(side)) for side in (alone, federated))
        half = 1.96 * math.sqrt((a * (1 - a) + f * (1 - f)) / samples)
    before, after = (metrics.spread(side).mean for side in (alone, federated))
    return ClientGain(name, samples, before, after, mean, mean - half, mean + half, largest)


def largest_class(result: Readings, runs: Sequence[int]) -> Array:
    """Return (clients,) the share of the most frequent class in the training data."""
    counts = result.label_counts
    if counts is None or result.held(runs[0]) is None:
        return np.full(len(result.clients), np.nan)
    some = np.asarray(counts, dtype=float)[list(runs)].sum(0)
    return metrics.client_accuracy(some.max(-1), some.sum(-1))


def gain_table(
    result: Readings,
    reference: Readings,
    partner: Sequence[int],
    groups: Mapping[str, Sequence[int]],
) -> Table:
    """Return a row for every client (of every group of repeats); see ``Result.gain``."""
    metric = result.headline_metric
    shows_class = metric is ACCURACY and result.label_counts is not None
    rows: list[list[Any]] = []
    every: list[ClientGain] = []
    wholes: list[ClientGain] = []
    chose = any(result.ended_with(k) for runs in groups.values() for k in runs)
    for label, runs in groups.items():
        found, whole = client_gains(result, reference, partner, runs)
        wholes.append(whole)
        every += found
        ended = [result.ended_with(k) for k in runs]
        for i, one in enumerate(found):
            row: list[Any] = [label] * (len(groups) > 1)
            row += [one.client, _whole(one.samples), *[one.largest_class] * shows_class]
            row += [one.alone, one.federated, one.gain, one.low, one.high]
            row += [one.in_samples()] * metric.has_samples + [one.verdict]
            rows.append(row + [_ended([e[i] for e in ended if e])] * chose)
    columns = ["setting"] * (len(groups) > 1) + ["client", "test samples"]
    columns += ["largest class"] * shows_class + ["alone", "federated", "gain", "low", "high"]
    columns += ["in samples"] * metric.has_samples + ["verdict"] + ["ended with"] * chose
    return Table(
        columns,
        rows,
        notes=_notes(result, metric, every, wholes, groups),
        formats={
            **dict.fromkeys(("alone", "federated"), metric.kind),
            "gain": metric.gain_kind,
            **dict.fromkeys(("low", "high"), "end" if metric.is_share else metric.gain_kind),
            **dict.fromkeys(("mean gain", "minimum gain"), metric.gain_kind),
            **dict.fromkeys(("largest class", "fraction hurt"), "percent"),
        },
        title=f"{result.method}: gain over training alone",
    )


def _notes(
    result: Readings,
    metric: HeadlineMetric,
    every: list[ClientGain],
    wholes: list[ClientGain],
    groups: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    gains = metrics.finite([one.gain for one in every])
    hurt = int((gains < 0).sum())
    mean = wholes[0].gain if len(wholes) == 1 else metrics.spread(gains).mean
    notes: dict[str, Any] = {"mean gain": mean}
    if len(wholes) == 1 and math.isfinite(wholes[0].low):
        ends = [format_cell(v, metric.gain_kind) for v in (wholes[0].low, wholes[0].high)]
        notes["interval of the mean gain"] = f"{ends[0]} to {ends[1]} ({wholes[0].verdict})"
    notes["minimum gain"] = float(gains.min()) if gains.size else math.nan
    notes["fraction hurt"] = hurt / gains.size if gains.size else math.nan
    notes["clients hurt"] = hurt
    words = [one.verdict for one in every]
    notes["verdicts"] = ", ".join(f"{words.count(v)} {v}" for v in VERDICTS)
    runs = next(iter(groups.values()))
    number = divisions(result.config, [result.runs[k].seed for k in runs])
    notes["low, high"] = (
        f"95 % interval over {number} divisions of the data"
        if number > 1
        else "95 % interval of one division, wide; repeat over several with seeds"
        if metric.has_samples
        else "not known from one division of the data; repeat over several with seeds"
    )
    if metric.sign < 0:
        notes["measure"] = f"{metric.name}; the gain is what it falls by"
    chosen = [k for runs in groups.values() for k in runs]
    if (reported := result.ended_with_words(*chosen)) is not None:
        notes["ended with"] = reported
    return notes


def _whole(number: float) -> float | int:
    return round(number) if math.isfinite(number) else number


def _ended(words: list[str]) -> str | None:
    """Return what a client ended with in every run: "alone", or "alone 3, global 7"."""
    if len(set(words)) <= 1:
        return next(iter(words), None)
    counts = {word: words.count(word) for word in dict.fromkeys(sorted(words))}
    return ", ".join(f"{word} {number}" for word, number in counts.items())
