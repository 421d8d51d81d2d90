"""Put a report together: words, tables and figures in one page without outside links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from sartor import runs
from sartor.adviser.advice import Advice
from sartor.comparison import Comparison
from sartor.report.advice_page import render_advice
from sartor.report.figures import draw_all, series
from sartor.report.layout import MOST_ROWS, count, fill, settings_lines, shown
from sartor.report.words import summarise
from sartor.result import POINT_WORDS, Result
from sartor.runs.storage import naming, read_json, write_text
from sartor.scores import COUNTERS, PHASES
from sartor.table import Table


def write_report(
    source: str | Path | Result | Comparison | Advice, path: str | Path | None = None
) -> Path:
    """Write the report of a folder (run, comparison, advice), or of what such a folder holds.

    Args:
        source: what to report on.
        path: the HTML file; by default ``report.html`` in the folder.

    Returns:
        The path of the page: one file, no network, no scripts.

    Raises:
        RunFolderError: the folder cannot be read, or the page cannot be written.
    """
    environment = runs.environment()
    if isinstance(source, str | Path):
        folder = runs.open_folder(source)
        path = path or folder.report_path
        environment = read_json(folder.path / "environment.json")
        if isinstance(folder, runs.AdviceFolder):
            advice, verified = folder.read_advice()
            text = render_advice(advice, verified, config=folder.config, environment=environment)
        elif isinstance(folder, runs.RunFolder):
            text = render(folder.read_result(), environment)
        else:
            text = render(folder.read_comparison(), environment)
    elif isinstance(source, Advice):
        text = render_advice(source, environment=environment)
    else:
        text = render(source, environment)
    target = Path(path or "report.html")
    with naming(target, "create"):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    return target


def render(content: Result | Comparison, environment: Mapping[str, Any] | None = None) -> str:
    """Return the page as text.

    Args:
        content: a result, with its baseline beside it if that is known; or a comparison.
        environment: versions and hardware of the machine that trained.
    """
    comparison = as_comparison(content).expanded()
    words = summarise(comparison)
    first = next(iter(comparison.values()))
    many = comparison.reference is not None and len(comparison) > 1
    numbers = series(comparison)
    seeds = len({run.seed for result in comparison.values() for run in result.runs})
    return fill(
        "page.html",
        environment,
        title=_title(comparison),
        facts=[
            count(len(first.clients), "client"),
            count(first.ledger.num_rounds, "round"),
            count(seeds, "allocation"),
        ],
        words=words,
        main=shown(comparison.table(), numbers),
        paired=shown(comparison.paired(), numbers) if many else None,
        figures=[(figure, Markup(figure.svg)) for figure in draw_all(comparison)],  # escaped there
        clients=shown(client_table(comparison), {}),
        ledger=shown(ledger_table(comparison), numbers),
        events=shown(event_table(comparison), {}) if _events(comparison) else None,
        points=POINT_WORDS,
        settings=_settings(comparison),
    )


def as_comparison(content: Result | Comparison) -> Comparison:
    """Return a comparison; a single result stands beside its baseline, if that is known."""
    if isinstance(content, Comparison):
        return content
    baseline = content.known_baseline
    if baseline is not None and baseline.method != content.method:
        results = {baseline.method: baseline, content.method: content}
        return Comparison(results, reference=baseline.method, config=content.config)
    return Comparison({content.method: content}, reference=None, config=content.config)


def client_table(comparison: Comparison) -> Table:
    """Return one row per client (and run): its data, and its accuracy under every method."""
    first = next(iter(comparison.values()))
    several = len(first.runs) > 1 and all(
        [run.seed for run in result.runs] == [run.seed for run in first.runs]
        for result in comparison.values()
    )
    chosen = range(len(first.runs)) if several else range(1)
    columns = ["run"] * several + ["client", "train samples", "classes", "test samples"]
    points = [
        (f"{name} {point}", result, point)
        for name, result in comparison.items()
        for point in POINT_WORDS
        if (point, "test") in result.scores
    ]
    chose = {name: r for name, r in comparison.items() if any(map(r.ended_with, chosen))}
    rows: list[list[Any]] = []
    for run in chosen:
        ended = [result.ended_with(run) for result in chose.values()]
        accuracy = [result.client_accuracy(point, run) for _, result, point in points]
        count = first.scores[first.headline, "test"].count[run]
        for client, name in enumerate(first.clients):
            labels = None if first.label_counts is None else first.label_counts[run][client]
            data = (None, None) if labels is None else (int(labels.sum()), int((labels > 0).sum()))
            values = [float(column[client]) for column in accuracy]
            words = [column[client] if column else None for column in ended]
            rows.append([*([run] * several), name, *data, int(count[client]), *values, *words])
    notes = {}
    if len(rows) > MOST_ROWS:
        notes["shown"] = f"the first {MOST_ROWS} of {len(rows)} rows; metrics.csv has them all"
    if not several and len(first.runs) > 1:
        notes["shown"] = "run 0; metrics.csv has the others"
    names = [label for label, _, _ in points]
    percent = dict.fromkeys(names, "percent")
    ends = [f"{name} ended with" for name in chose]
    return Table([*columns, *names, *ends], rows[:MOST_ROWS], notes=notes, formats=percent)


def ledger_table(comparison: Comparison) -> Table:
    """Return the counted costs of every method: totals of run 0, and medians of the times."""
    rows = []
    phases = [p for p in PHASES if any(p in r.ledger.seconds for r in comparison.values())]
    for name, result in comparison.items():
        ledger = result.ledger
        total = {counter: float(ledger.total(counter)[0]) for counter in COUNTERS}
        trips = total["participants"] or 1
        times = [
            1000 * float(np.median(ledger.seconds[p])) if ledger.seconds.get(p) else None
            for p in phases
        ]
        rows.append(
            [
                name,
                total["participants"] / max(ledger.num_rounds, 1),
                total["bytes_down"] / 1e6,
                total["bytes_up"] / 1e6,
                float(ledger.setup_bytes[0]) / 1e6,
                (total["bytes_down"] + total["bytes_up"]) / trips / 1024,
                total["gradient_evaluations"] + float(ledger.setup_gradients[0]),
                float(ledger.setup_gradients[0]),
                total["forward_evaluations"],
                *times,
            ]
        )
    columns = {
        "method": "",
        "clients a round": "count",
        "MB down": "megabytes",
        "MB up": "megabytes",
        "MB once": "megabytes",
        "KiB a client and round": "megabytes",
        "gradient evaluations": "count",
        "of them once": "count",
        "forward only": "count",
        **{f"ms {phase}": "count" for phase in phases},
    }
    notes = {
        "counted": "totals of run 0; a gradient evaluation is one sample in one backward pass",
        "timed": "median over rounds of the wall time of all runs together; evaluation apart",
    }
    return Table(list(columns), rows, notes=notes, formats=columns)


def event_table(comparison: Comparison) -> Table:
    """Return what went wrong in a federation over a network: who, when and why."""
    events = _events(comparison)
    rows = [[int(e["round"]) + 1, str(e["client"]), str(e["why"])] for e in events[:MOST_ROWS]]
    notes = {}
    if len(events) > MOST_ROWS:
        notes["shown"] = f"the first {MOST_ROWS} of {len(events)}"
    return Table(["round", "client", "what happened"], rows, notes=notes, formats={})


def _events(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the events of all runs that were trained over a network."""
    found = [result.config.get("network", {}) for result in comparison.values()]
    return [event for network in found for event in network.get("events", [])]


# --- parts --------------------------------------------------------------------------------------


def _title(comparison: Comparison) -> str:
    names = list(comparison)
    data = comparison.config.get("data") or next(iter(comparison.values())).config.get("data")
    if isinstance(data, Mapping):
        data = data.get("name") or data.get("dataset")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed} on {data}" if isinstance(data, str) else listed


def _settings(comparison: Comparison) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (heading, lines): the shared settings, then what each method was given."""
    parts = [("All methods", settings_lines(comparison.config))] if comparison.config else []
    for name, result in comparison.items():
        own = {key: v for key, v in result.config.items() if comparison.config.get(key) != v}
        first = result.runs[0]
        given: dict[str, Any] = {**own, "hyper": first.hyper, "options": first.options}
        if len(result.runs) > 1:
            given["runs"] = list(result.groups())
            given["seeds"] = sorted({run.seed for run in result.runs})
        parts.append((name, settings_lines(given)))
    return parts
