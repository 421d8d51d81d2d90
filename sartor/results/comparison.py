"""Several methods on one federation, side by side: a table, paired differences, clients hurt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sartor.core.errors import ConfigError, did_you_mean
from sartor.results import metrics
from sartor.results.client_tables import fairness_of, fairness_table
from sartor.results.costs import pareto_front, to_reach
from sartor.results.ending import longer, rounds_words
from sartor.results.gains import largest_class, overlap
from sartor.results.headline import ACCURACY, SHARES, HeadlineMetric
from sartor.results.metrics import Array
from sartor.results.result import Result
from sartor.results.tables import Table, format_cell, jsonable


def paired_gains(
    result: Result, runs: list[int], base: Result, partners: list[int], confidence: float = 0.95
) -> metrics.Paired:
    """Return paired gains over another method: per run or, with a single one, per client."""
    sides = ((result, runs), (base, partners))
    if len(runs) > 1:
        mine, theirs = (np.asarray([one.pooled_measure(r) for r in rs]) for one, rs in sides)
    else:
        mine, theirs = (one.client_measure(run=rs[0]) for one, rs in sides)
    sign = result.headline_metric.sign
    share = overlap(result.config) if len(runs) > 1 else 0.0
    return metrics.paired(sign * mine, sign * theirs, confidence, share)


class Comparison(Mapping[str, Result]):
    """Several methods on the same federation, the same seeds and the same settings.

    Args:
        results: name -> :class:`Result`.
        reference: the method that the others are measured against, or None.
        config: the shared settings.
    """

    def __init__(
        self,
        results: Mapping[str, Result],
        *,
        reference: str | None = "local",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.results = dict(results)
        self.reference = reference if reference in self.results else None
        self.config = dict(config or {})

    def __getitem__(self, name: str) -> Result:
        """Return the result of a method."""
        if name not in self.results:
            raise KeyError(f"{name!r} was not compared{did_you_mean(name, self.results)}")
        return self.results[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the methods."""
        return iter(self.results)

    def __len__(self) -> int:
        """Return the number of methods."""
        return len(self.results)

    def groups(self) -> Iterator[tuple[str, str, Result, list[int]]]:
        """Yield the repeats of every setting of every method: label, method, result, runs."""
        for name, result in self.items():
            for label, runs in result.groups().items():
                yield label.replace(result.method, name, 1), name, result, runs

    def expanded(self) -> Comparison:
        """Return a comparison in which every setting of a sweep is an entry of its own."""
        found = {}
        for label, name, result, runs in self.groups():
            single = len(runs) == len(result.runs)
            found[name if single else label] = result if single else result.select(runs)
        return Comparison(found, reference=self.reference, config=self.config)

    @property
    def headline_metric(self) -> HeadlineMetric:
        """What the methods are compared by; see ``sartor.results.headline``."""
        return next((result.headline_metric for result in self.values()), ACCURACY)

    def hurt(self, name: str) -> Array | None:
        """Return (runs,) how many clients are below the reference, or None without one."""
        if self.reference is None or name == self.reference:
            return None
        result, reference = self[name], self[self.reference]
        partner = result.partners(reference)
        counts = []
        for run in range(len(result.runs)):
            sign = result.headline_metric.sign
            alone = sign * reference.client_measure(run=partner[run])
            gains = metrics.gain(sign * result.client_measure(run=run), alone)
            counts.append(float(gains.hurt) if gains.clients else math.nan)
        return np.asarray(counts)

    def table(self) -> Table:
        """Return one row per method: accuracy (or error), worst client, clients hurt and costs.

        Repeats give mean ± sample standard deviation; with fewer than five, the notes list the
        values one by one.
        """
        rows: list[list[Any]] = []
        notes: dict[str, Any] = {}
        measure, kind = self.headline_metric.name, self.headline_metric.kind
        columns = {"method": "", measure: kind, "worst client": kind, "clients hurt": "count"}
        columns |= {"MB": "megabytes", "gradient evaluations": "count", "seconds": "seconds"}
        hurt = {name: self.hurt(name) for name in self}
        for label, name, result, indices in self.groups():

            def cell(values: Any, indices: list[int] = indices) -> Any:
                if values is None:
                    return None
                chosen = np.atleast_1d(np.asarray(values, dtype=np.float64))[indices]
                return metrics.spread(chosen) if len(chosen) > 1 else float(chosen[0])

            accuracy = cell(result._each(result.pooled_measure))
            measured = (accuracy, cell(result.worst_client), cell(hurt[name]))
            costs = (result.megabytes, result.gradient_evaluations, result.seconds)
            rows.append([label, *measured, *map(cell, costs)])
            if isinstance(accuracy, metrics.Spread) and len(indices) < metrics.FEW:
                values = ", ".join(format_cell(v, kind) for v in accuracy.values)
                notes[f"{label}, {measure} of each run"] = values
            reported = result.ended_with_words(*indices)
            if reported is not None:
                notes[f"{label} ended with"] = reported
            early = [entry for i in indices if (entry := result.stopped[i]) is not None]
            if early:
                first = min(early, key=lambda entry: entry["round"])
                notes[f"{label} stopped early"] = (
                    f"{len(early)} of {len(indices)} runs, first after round "
                    f"{first['round']}: {first['why']}"
                )
            lost = [entry for i in indices if (entry := result.diverged[i]) is not None]
            if lost:
                first = lost[0]
                notes[f"{label} diverged"] = (
                    f"{len(lost)} of {len(indices)} runs, first in round "
                    f"{first.get('round', '?')} at client {first.get('client', '?')}"
                )
        chosen = {words for r in self.values() if (words := rounds_words(r.config)) is not None}
        if chosen:
            notes["rounds"] = "; ".join(sorted(chosen))
        named = ((label, result, indices) for label, _, result, indices in self.groups())
        if (learning := longer(named)) is not None:
            notes["still learning at the end"] = learning
        if self.config.get("equal") == "gradients":
            lengths = ", ".join(f"{name} {r.ledger.num_rounds}" for name, r in self.items())
            notes["equal gradient evaluations"] = f"those of the dearest; rounds: {lengths}"
        below = max((r.summary()["clients_below_floor"] for r in self.values()), default=0)
        if below:
            notes["worst client"] = (
                f"among clients with at least {metrics.FLOOR} test samples; {below} left out"
            )
        if (share := self._largest_class()) is not None:
            notes["largest class"] = (
                f"{format_cell(share, 'percent')} % for answering with each client's most frequent "
                "class"
            )
        return Table(list(columns), rows, notes=notes, formats=columns)

    def _largest_class(self) -> float | None:
        """Return the accuracy of answering with the class that is most frequent at each client."""
        first = next(iter(self.values()), None)
        if first is None or self.headline_metric is not ACCURACY or first.held(0) is None:
            return None
        runs = range(len(first.runs))
        share, count = largest_class(first, list(runs)), first._scores().count[0]
        return float(np.nansum(share * count) / np.nansum(count * np.isfinite(share)))

    def paired(self, reference: str | None = None, confidence: float = 0.95) -> Table:
        """Return the difference of every method to the reference, with its interval.

        Positive is better than the reference: an error is subtracted from the reference's.
        With several runs a pair is one allocation (equal seeds); with a single run a pair is one
        client, and the interval says nothing about other allocations.

        Args:
            reference: name of the method to subtract; by default that of the comparison.
            confidence: of the two-sided t-interval.
        """
        against = reference if reference is not None else self.reference
        if against is None or against not in self.results:
            hint = did_you_mean(against or "local", self.results)
            raise ConfigError(f"{against or 'local'!r} was not compared{hint}")
        base, metric = self[against], self.headline_metric
        rows: list[list[Any]] = []
        for label, name, result, indices in self.groups():
            if name == against:
                continue
            partner = result.partners(base)
            pair = paired_gains(result, indices, base, [partner[i] for i in indices], confidence)
            rows.append([label, *pair, "allocations" if len(indices) > 1 else "clients"])
        what = f"method minus {against}"
        if metric.sign < 0:
            what = f"{against} minus method, what the {metric.name} falls by"
        notes = {"difference": f"{what}; {confidence:.0%} t-interval of the mean"}
        if any(row[-1] == "clients" for row in rows):
            notes["caution"] = (
                "one allocation alone: pairs are clients, each alike, and the interval does not "
                "say how another allocation would turn out"
            )
        signed = dict.fromkeys(("difference", "low", "high"), metric.gain_kind)
        return Table(
            ["method", "difference", "std", "low", "high", "pairs", "unit"],
            rows,
            notes=notes,
            formats={**signed, "std": metric.kind},
            title=f"Paired differences to {against}",
        )

    def fairness(self) -> Table:
        """Return how evenly every method treats the clients; means over repeats."""
        rows: list[list[Any]] = []
        excluded = 0
        for label, _, result, indices in self.groups():
            found = [fairness_of(result, index) for index in indices]
            excluded = max([excluded, *(one.excluded for one in found)])
            columns = zip(*(one[:-2] for one in found), strict=True)
            rows.append([label, *(metrics.spread(column).mean for column in columns)])
        title = "Fairness between clients"
        return fairness_table("method", rows, excluded, title, self.headline_metric)

    def to_reach(
        self, target: float | Sequence[float], *, measure: str | None = None, window: int = 3
    ) -> Table:
        """Return what every method had spent when it reached a target.

        A target is reached when the mean of ``window`` evaluations in a row reaches it. Costs are
        those of the runs that did, mean ± standard deviation.

        Args:
            target: pooled test accuracies (shares), errors, or mean test losses; one or several.
            measure: "accuracy" (at least), "RMSE" or "loss" (at most); that of the task by default.
            window: evaluations in a row.
        """
        reported = measure or self.headline_metric.name
        own = self.headline_metric
        kind = own.kind if reported == own.name else "percent" if reported in SHARES else ""
        columns = {"method": "", "target": kind}
        columns |= {"reached by": "", "rounds": "count", "MB": "megabytes"}
        columns |= {"gradient evaluations": "count"}
        rows: list[list[Any]] = []
        for goal in np.atleast_1d(np.asarray(target, dtype=np.float64)).tolist():
            for label, _, result, indices in self.groups():
                every = [
                    to_reach(result, goal, measure=measure, run=index, window=window)
                    for index in indices
                ]
                found = [one for one in every if one is not None]
                costs: list[Any] = [
                    metrics.spread(column) if len(found) > 1 else float(column[0])
                    for column in zip(*found, strict=True)
                ] or [None] * 3
                reached = f"{len(found)} of {len(indices)} runs"
                rows.append([label, goal, reached, *costs])
        return Table(
            list(columns),
            rows,
            notes={
                "reached": f"mean of {window} evaluations in a row; costs until then, one-off "
                "traffic and work included; – is not reached"
            },
            formats=columns,
            title=f"What a target {reported} costs",
        )

    def pareto(self, cost: str = "megabytes") -> list[str]:
        """Return the methods that no other beats at both cost and accuracy, cheapest first.

        In a regression it is the error that counts.

        Args:
            cost: "megabytes", "gradient_evaluations" or "seconds".
        """
        known = ("megabytes", "gradient_evaluations", "seconds")
        if cost not in known:
            raise ConfigError(f"there is no cost {cost!r}{did_you_mean(cost, known)}")
        names, costs, values = [], [], []
        for label, _, result, indices in self.groups():
            names.append(label)
            costs.append(result.mean_of(cost, indices))
            values.append(self.headline_metric.sign * result.mean_of("pooled_measure", indices))
        return [names[index] for index in pareto_front(costs, values)]

    def summaries(self) -> list[dict[str, Any]]:
        """Return the summary of every run of every method, each with "clients_hurt"."""
        found = []
        for name, result in self.items():
            hurt = self.hurt(name)
            for run, summary in enumerate(result.summaries()):
                count = None if hurt is None else jsonable(hurt[run])
                found.append({**summary, "name": name, "clients_hurt": count})
        return found

    def summary(self) -> dict[str, Any]:
        """Return everything as one JSON-able dict: reference, methods, paired differences."""
        has_pairs = self.reference is not None and len(self) > 1
        return {
            "reference": self.reference,
            "methods": self.summaries(),
            "paired": self.paired().records() if has_pairs else [],
        }

    def __repr__(self) -> str:
        """Return the table."""
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def as_comparison(content: Result | Comparison) -> Comparison:
    """Return a comparison; a single result is compared with its baseline, if that is known."""
    if isinstance(content, Comparison):
        return content
    baseline = content.known_baseline
    if baseline is not None and baseline.method != content.method:
        results = {baseline.method: baseline, content.method: content}
        return Comparison(results, reference=baseline.method, config=content.config)
    return Comparison({content.method: content}, reference=None, config=content.config)
