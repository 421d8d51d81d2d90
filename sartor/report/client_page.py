"""Render a page for one client, in plain language: what it gains, gives, and can do next."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sartor.report import client_words as words
from sartor.report.gains import Gains, counted, gains_of, interval, signed, subject, with_unit
from sartor.report.layout import count
from sartor.report.sections import Answers, Code, Exhibit, Links, Part, Section, render_sections
from sartor.report.sketch import calibration_sketch, interval_sketch
from sartor.report.words import Words
from sartor.results.comparison import Comparison
from sartor.results.gains import ClientGain
from sartor.results.metrics import spread
from sartor.results.result import Result
from sartor.results.tables import Table
from sartor.runs import slug
from sartor.runs.storage import make_folder, write_text

FOLDER = "clients"
"""Where the pages are, beside the report."""

MOST_PAGES = 500
"""Of more clients, only those pages are written that are asked for."""

COLOURS = {"gains": "good", "loses": "bad", "cannot tell": "series-1"}


@dataclass(frozen=True)
class Clients:
    """The pages of the clients of a comparison.

    Attributes:
        comparison: with every setting of a sweep as an entry of its own.
        facts: what was counted and measured while the data were at hand; may be empty.
        place: the folder of the run, for commands to copy.
    """

    comparison: Comparison
    facts: Mapping[str, Any] = field(default_factory=dict)
    place: str = "FOLDER"

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the clients."""
        return next(iter(self.comparison.values())).clients

    @functools.cached_property
    def gains(self) -> dict[str, Gains]:
        """What the clients gain by every method."""
        return gains_of(self.comparison)

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """Client -> name of its file: safe everywhere, and different if only in capitals too."""
        return file_names(self.names)

    @functools.cached_property
    def links(self) -> dict[str, str]:
        """Client -> address of its page, seen from the report."""
        return {name: f"{FOLDER}/{file}" for name, file in self.files.items()}

    @functools.cached_property
    def subject(self) -> str:
        """The method that the pages are about: the best on average, training alone left out."""
        chosen = subject(self.comparison)
        return chosen if chosen is not None else next(iter(self.comparison))

    def write(self, folder: Path, chosen: Sequence[str] | None = None) -> list[Path]:
        """Write the pages of some clients, by default of all, and return their paths."""
        target = make_folder(folder / FOLDER)
        paths = []
        for name in self.names if chosen is None else chosen:
            path = target / self.files[name]
            write_text(path, self.render(name))
            paths.append(path)
        return paths

    def render(self, name: str) -> str:
        """Return the page of a client."""
        result = self.comparison[self.subject]
        gains = self.gains.get(self.subject)
        index = result.client_index(name)
        one = gains.clients[index] if gains is not None else None
        sections = []
        if gains is not None and one is not None:
            sections.append(Section("Alone or together", self._compared(index, gains, one)))
        sections.append(Section("What to do next", self._next(name, gains, one), link="Next"))
        leaves = [*words.travels(result), ("How much?", words.traffic(result))]
        leaves.append(("What stays with you?", words.STAYS))
        if _sends(result):
            leaves += [("What else does the server see?", words.SEEN)]
            leaves += [("What is not protected?", words.HARMLESS)]
        if "network" not in result.config:
            leaves.append(("Did this happen in this run?", words.SIMULATED))
        title = "What you give, and what leaves your house"
        sections.append(Section(title, [Answers(leaves)], link="What you give"))
        sections.append(Section("Your data", self._data(index, result)))
        if answers := self._answers(name, index, result):
            sections.append(Section("How the model answers", answers, link="Answers"))
        sections.append(
            Section(
                "For specialists",
                [Links([("The technical report: methods, figures, costs", "../report.html")])],
            )
        )
        summary = self._alone_unknown(name, result)
        if gains is not None and one is not None:
            summary = _summary(name, gains, one)
        return render_sections(
            name,
            sections,
            words=summary,
            facts=[
                f"one of {count(len(self.names), 'client')}",
                self.subject,
                count(result.ledger.num_rounds, "round"),
                count(gains.divisions if gains else len(result.runs), "division") + " of the data",
            ],
            brand="Sartor: page of a client",
            plain=True,
        )

    def _alone_unknown(self, name: str, result: Result) -> Words:
        """Return the summary where training alone is not known."""
        index, metric = result.client_index(name), result.headline_metric
        values = [result.client_measure(run=run)[index] for run in range(len(result.runs))]
        text = metric.text(spread(values).mean)
        return Words(
            headline=f"{name} reaches {metric.name} {text} with {self.subject}; what it reaches "
            "alone was not measured."
        )

    # --- sections -------------------------------------------------------------------------------

    def _compared(self, index: int, gains: Gains, one: ClientGain) -> list[Part]:
        metric = gains.metric
        parts: list[Part] = [
            words.interval_sentence(gains, one),
            words.samples_sentence(gains, one),
            words.class_sentence(metric, one),
            words.ended_sentence(one.client, gains.result),
        ]
        if math.isfinite(one.low):
            ends = (one.low, one.gain, one.high)
            texts = [with_unit(metric, end, *ends) for end in ends]
            parts.append(
                interval_sketch(
                    "difference",
                    f"Difference in {metric.name}",
                    *ends,
                    texts=(texts[0], texts[1], texts[2]),
                    sides=("better alone", "better together"),
                    colour=COLOURS[one.verdict],
                    caption="The dot is the difference that was measured, the line its 95 % "
                    "interval.",
                    alt=f"The difference is {texts[1]}, between {texts[0]} and {texts[2]}.",
                )
            )
        if len(self.gains) > 1:
            parts.append(Exhibit(self._methods(index), "", "Every method that was compared"))
        parts.append(f"All {len(self.names)} clients: {counted(gains.counts)}.")
        return [part for part in parts if part]

    def _methods(self, index: int) -> Table:
        first = next(iter(self.gains.values()))
        metric = first.metric
        alone = first.clients[index].alone
        rows: list[list[Any]] = [["alone", alone, None, None, None, ""]]
        for name, gains in self.gains.items():
            one = gains.clients[index]
            rows.append([name, one.federated, one.gain, one.low, one.high, one.verdict])
        ends = "end" if metric.is_share else metric.gain_kind
        formats = {metric.name: metric.kind, "gain": metric.gain_kind, "low": ends, "high": ends}
        notes = {}
        if len(self.gains) > 1:
            notes["this page"] = f"is about {self.subject}, the best for all clients on average"
        columns = ["method", metric.name, "gain", "low", "high", "verdict"]
        return Table(columns, rows, notes=notes, formats=formats)

    def _data(self, index: int, result: Result) -> list[Part]:
        name = self.names[index]
        known = self.facts.get("data", {}).get(name, {})
        parts: list[Part] = []
        tests = float(result.scores[result.headline, "test"].count[0][index])
        held = result.held(0)
        samples = known.get("samples")
        if samples:
            sizes = [f"{samples['train']:,} to train"]
            sizes += [f"{samples['val']:,} to choose by"] * bool(samples["val"])
            sizes += [f"{samples['test']:,} to test"]
            parts.append(f"{sum(samples.values()):,} samples: {', '.join(sizes)}.")
        elif held:
            parts.append(f"{held[index][0]:,} samples to train and {tests:,.0f} to test.")
        else:
            parts.append(f"{tests:,.0f} samples to test.")
        classes = known.get("classes") or _train_classes(result, index)
        if classes and len(classes) > 1:
            label = (result.config.get("data") or {}).get("info", {}).get("label")
            heading = f"Classes of “{label}”" if isinstance(label, str) else "Classes"
            parts.append(_class_table(classes, self._all_classes(result), heading))
        missing = {k: v for k, v in known.get("missing", {}).items() if v > 0}
        if missing:
            order = sorted(missing, key=lambda column: -missing[column])
            every = self._missing()
            rows = [[column, missing[column], every[column]] for column in order]
            formats = dict.fromkeys(("your samples", "all clients"), "percent")
            table = Table(["column", "your samples", "all clients"], rows, formats=formats)
            parts.append(Exhibit(table, "", "Missing values"))
        elif "missing" in known:
            parts.append("No value is missing in the columns that are checked for it.")
        return parts

    def _missing(self) -> dict[str, float]:
        """Return the share of missing values of every column, over all samples."""
        every = self.facts["data"].values()
        sizes = [sum(one["samples"].values()) for one in every]
        columns = dict.fromkeys(column for one in every for column in one.get("missing", {}))
        sums = {
            column: sum(n * one.get("missing", {}).get(column, 0.0)
                        for n, one in zip(sizes, every, strict=True))
            for column in columns
        }  # fmt: skip
        return {column: total / (sum(sizes) or 1) for column, total in sums.items()}

    def _all_classes(self, result: Result) -> dict[str, float]:
        every = [entry.get("classes", {}) for entry in self.facts.get("data", {}).values()]
        if not every:
            every = [_train_classes(result, k) for k in range(len(self.names))]
        names = dict.fromkeys(key for one in every for key in one)
        total = sum(sum(one.values()) for one in every) or 1
        return {key: sum(one.get(key, 0) for one in every) / total for key in names}

    def _answers(self, name: str, index: int, result: Result) -> list[Part]:
        every = self.facts.get("answers", {})
        mine = every.get(self.subject, {}).get(name)
        if not mine:
            return []
        alone = every.get(self.comparison.reference or "", {}).get(name)
        parts: list[Part] = [_measures(mine, alone, self.subject)]
        classes = list(self.facts.get("data", {}).get(name, {}).get("classes", {}))
        if mine.get("confusion") and classes:
            parts.append(_confusion(mine, classes))
        if mine.get("calibration") and len(classes) == 2:
            caption = (
                f"How probable the model says “{classes[1]}” is, against how often it was true. On "
                "the dashed line the two agree; a larger dot stands for more samples. Test samples "
                "of all runs."
            )
            title = "Can its probabilities be believed?"
            parts.append(calibration_sketch("calibration", title, mine["calibration"], caption))
        return parts

    def _next(self, name: str, gains: Gains | None, one: ClientGain | None) -> list[Part]:
        result = self.comparison[self.subject]
        place = self.place
        if self.comparison.reference is not None and len(self.comparison) > 1 and self._nested:
            place = f"{place}/{slug(result.method)}"
        run = shlex.join([place, "--client", name])
        use = Code(
            f"sartor predict {run} --data new.csv    # answers for rows like those of training\n"
            f"sartor export {run} --to model         # ONNX, to use without Sartor, with a card"
        )
        if gains is None or one is None:
            return [
                "This run does not say what training alone reaches. Compare with it before you "
                "decide: sartor compare.",
                use,
            ]
        if one.verdict == "gains":
            return ["Take part, and use the model that was trained together:", use]
        if one.verdict == "loses":
            chose = bool(result.choices)
            return [
                f"Stay alone, or try another method than {self.subject}."
                + ("" if chose else " With --do-no-harm the run lets every client keep the model "
                   "that is best on its own held-out samples, its own one included.")
            ]  # fmt: skip
        return [
            words.what_would_decide(gains, one),
            "As long as nothing is decided, training alone is the choice that sends nothing. To "
            "try the model that was trained together:",
            use,
        ]

    @property
    def _nested(self) -> bool:
        """Whether every method has a folder of its own inside that of the comparison."""
        return (Path(self.place) / "comparison.json").is_file()


# --- parts --------------------------------------------------------------------------------------


def file_names(names: Sequence[str]) -> dict[str, str]:
    """Return client -> name of a file that is safe on every system and used once.

    >>> file_names(["oslo", "Oslo", "../a/b"])
    {'oslo': 'oslo.html', 'Oslo': 'Oslo-2.html', '../a/b': 'a_b.html'}
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        stem, number = slug(name), 1
        file = stem
        while file.lower() in taken:
            number += 1
            file = f"{stem}-{number}"
        taken.add(file.lower())
        found[name] = f"{file}.html"
    return found


def _sends(result: Result) -> bool:
    return bool(result.mean_of("megabytes"))


def _summary(name: str, gains: Gains, one: ClientGain) -> Words:
    metric = gains.metric
    ends = interval(metric, one.low, one.high)
    unit = ", points" if metric.is_share else ""
    less = ", less is better" if metric.sign < 0 else ""
    tiles = [
        ("Alone", metric.text(one.alone), f"{metric.name}{less}"),
        ("Together", metric.text(one.federated), f"{metric.name}, {gains.name}"),
        (
            f"Gain{unit}",
            signed(metric, one.gain, one.low, one.high),
            f"95 % interval {ends}" if ends else "interval not known from one division",
        ),
    ]
    if metric.has_samples and math.isfinite(one.gain):
        number = round(one.gain * one.samples, 1)
        more = f"{number:+.1f}".replace("-", "−") if number else "0"
        tiles.append(("In samples", more, f"of {one.samples:.0f} test samples"))
    else:
        tiles.append(("Test samples", f"{one.samples:.0f}", "held out from training"))
    return Words(headline=words.verdict_sentence(name, gains, one), tiles=tiles)


def _train_classes(result: Result, index: int) -> dict[str, float]:
    if result.label_counts is None or result.held(0) is None:
        return {}
    names = (result.config.get("rebuild") or {}).get("class_names")
    counts = result.label_counts[0][index]
    labels = map(str, names or range(len(counts)))
    return {label: int(number) for label, number in zip(labels, counts, strict=False)}


def _class_table(classes: Mapping[str, float], every: Mapping[str, float], heading: str) -> Exhibit:
    total = sum(classes.values()) or 1
    rows = [[k, n, n / total, every.get(k, math.nan)] for k, n in classes.items()]
    columns = ["class", "samples", "your share", "all clients"]
    formats = dict.fromkeys(("your share", "all clients"), "percent")
    return Exhibit(Table(columns, rows, formats=formats), "", heading)


def _measures(mine: Mapping[str, Any], alone: Mapping[str, Any] | None, method: str) -> Exhibit:
    """Return every measure of a client, alone and together, as the texts that a reader sees."""
    rows = []
    for name, value in mine["measures"].items():
        kind = mine["formats"].get(name) or "error"
        other = None if alone is None else alone["measures"].get(name)
        cells = Table(["x", name], [["", other], ["", value]], formats={name: kind}).text_rows()
        unit = " %" if kind == "percent" else ""
        texts = [cell if cell == "–" else f"{cell}{unit}" for _, cell in cells]
        rows.append([name, *texts[alone is None :], words.MEANINGS.get(name, "")])
    runs = mine["runs"]
    notes = {"means": f"over {runs} runs"} if runs > 1 else {}
    columns = ["measure", *["alone"] * (alone is not None), "together", "what it is"]
    return Exhibit(Table(columns, rows, notes=notes), "", "All measures", "measures")


def _confusion(mine: Mapping[str, Any], classes: Sequence[str]) -> Exhibit:
    rows = [
        [f"truly {label}", *row] for label, row in zip(classes, mine["confusion"], strict=False)
    ]
    columns = ["samples", *(f"answered {label}" for label in classes)]
    notes = {"counted": "test samples of a run"}
    if mine["runs"] > 1:
        notes["counted"] = f"test samples of a run, mean over {mine['runs']} runs"
    formats = dict.fromkeys(columns[1:], "count")
    return Exhibit(Table(columns, rows, notes=notes, formats=formats), "", "Right and wrong")
