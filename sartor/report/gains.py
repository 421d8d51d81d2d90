"""What every client of a comparison gains over training alone: the numbers of the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sartor.report.layout import listed
from sartor.results.comparison import Comparison
from sartor.results.gains import VERDICTS, ClientGain, client_gains, divisions, overlap
from sartor.results.headline import HeadlineMetric
from sartor.results.result import Result
from sartor.results.tables import format_cell

MOST_NAMES = 6
"""The most clients that a sentence names."""


@dataclass(frozen=True)
class Gains:
    """What the clients gain by one method, as means over its runs.

    Attributes:
        name: of the method, or of its setting.
        result: with what the clients have together.
        reference: with what they have alone.
        clients: one entry each, in the order of the federation.
        whole: of the mean over clients.
    """

    name: str
    result: Result
    reference: Result
    clients: list[ClientGain]
    whole: ClientGain

    @property
    def metric(self) -> HeadlineMetric:
        """What the clients are compared by."""
        return self.result.headline_metric

    @property
    def counts(self) -> dict[str, int]:
        """Verdict -> number of clients."""
        found = [client.verdict for client in self.clients]
        return {verdict: found.count(verdict) for verdict in VERDICTS}

    @property
    def divisions(self) -> int:
        """The different divisions of the data that the runs have."""
        return divisions(self.result.config, [run.seed for run in self.result.runs])

    @property
    def overlap(self) -> float:
        """What repeated divisions share; see ``sartor.results.gains``."""
        return overlap(self.result.config)

    def named(self, verdict: str) -> list[str]:
        """Return the names of the clients with a verdict."""
        return [client.client for client in self.clients if client.verdict == verdict]


def gains_of(comparison: Comparison) -> dict[str, Gains]:
    """Return the gains by every method that can be compared with training alone."""
    shared = comparison[comparison.reference] if comparison.reference else None
    found = {}
    for name, result in comparison.items():
        reference = shared or result.known_baseline
        lost = not math.isfinite(result.mean_of("pooled_measure"))
        if name == comparison.reference or reference is None or lost:
            continue
        each, whole = difference(result, reference)
        found[name] = Gains(name, result, reference, each, whole)
    return found


def difference(result: Result, other: Result) -> tuple[list[ClientGain], ClientGain]:
    """Return what every client gains by a method over another, and what their mean does."""
    return client_gains(result, other, result.partners(other), range(len(result.runs)))


def subject(comparison: Comparison) -> str | None:
    """Return the method that is best on average, training alone left out, or None."""
    sign = comparison.headline_metric.sign
    values = {
        name: sign * result.mean_of("pooled_measure")
        for name, result in comparison.items()
        if name != comparison.reference
    }
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    return max(known, key=lambda name: known[name]) if known else None


def counted(counts: Mapping[str, int]) -> str:
    """Return the verdicts as a few words.

    >>> counted({"gains": 1, "loses": 2, "cannot tell": 0})
    '1 gains, 2 lose, 0 cannot tell'
    """
    gain, lose, open_ = (counts[verdict] for verdict in VERDICTS)
    verbs = (f"gain{'s' * (gain == 1)}", f"lose{'s' * (lose == 1)}")
    return f"{gain} {verbs[0]}, {lose} {verbs[1]}, {open_} cannot tell"


def signed(metric: HeadlineMetric, gain: float, *beside: float) -> str:
    """Return a gain with its sign: a number of points, or in the unit of the measure.

    It gets as many decimals as the largest of those that stand ``beside`` it needs.
    """
    return format_cell(
        float(gain), metric.gain_kind, _decimals(metric.gain_kind, (gain, *beside))
    ).replace("-", "−")


def with_unit(metric: HeadlineMetric, gain: float, *beside: float) -> str:
    """Return a gain with its sign and, of a share, its unit."""
    return f"{signed(metric, gain, *beside)}{' points' * metric.is_share}"


def gain_text(metric: HeadlineMetric, one: ClientGain) -> str:
    """Return the gain of a client, or a mean, with its unit and the decimals of its interval."""
    return with_unit(metric, one.gain, one.low, one.high)


def interval(metric: HeadlineMetric, low: float, high: float) -> str:
    """Return an interval in words, or nothing if it is not known."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    kind = "end" if metric.is_share else metric.gain_kind
    decimals = _decimals(kind, (low, high))
    ends = [format_cell(end, kind, decimals).replace("-", "−") for end in (low, high)]
    return f"{ends[0]} to {ends[1]}"


def _decimals(kind: str, values: Sequence[float]) -> int | None:
    """Return the decimals with which the largest gain has three figures; None for other kinds."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if kind != "gain" or not largest:
        return None
    return max(0, 2 - math.floor(math.log10(largest)))


def some(names: Sequence[str]) -> str:
    """Return the names of a few clients, or how many there are.

    >>> some(["oslo"]), some(["a", "b"]), some(list("abcdefgh"))
    ('oslo', 'a and b', '8 clients')
    """
    if len(names) > MOST_NAMES:
        return f"{len(names)} clients"
    return listed(names)
