"""Write the page of the measurements: one file in the style of the library's reports."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import figures, load, results
from bench.floors import Work
from bench.rates import Rates
from bench.results import NAMES, Record
from bench.workloads import Workload
from sartor.report.layout import count
from sartor.report.sections import Fold, Part, Section, render_sections
from sartor.report.words import Words
from sartor.results.tables import Table

FLOOR = (
    "The floor is the least time of a round on this machine: the floating-point operations of its "
    "products at the rate of a large matrix product, or the bytes of parameters and batches at the "
    "rate of a large copy, whichever takes longer. Activations, poolings and gradients in memory "
    "are not counted, so a real program stays well below 100 %. If the parameters stay in a cache, "
    "a program can be faster than the floor by memory."
)


def write_page(records: Sequence[Record], path: Path) -> Path:
    """Write the page of the latest record of each kind, with the history of all."""
    results.make_folder(path.parent)
    path.write_text(render(records), encoding="utf-8")
    return path


def render(records: Sequence[Record]) -> str:
    """Return the page as text.

    Args:
        records: oldest first, as ``results.read`` gives them; one at least.
    """
    latest = sorted(records, key=lambda record: record["date"])  # of the run, not of the commit
    newest = {record["kind"]: record for record in latest}
    rounds = newest.get("rounds")
    top = rounds or latest[-1]
    sections: list[Section] = []
    if rounds:
        figure = figures.ratio_figure(rounds)
        sections += [Section("Ratios", [figure])] if figure else []
        sections += [_workload(found, rounds) for found in rounds["workloads"]]
    if "device" in newest:
        sections.append(_device(newest["device"]))
    if "methods" in newest:
        sections.append(_methods(newest["methods"]))
    if "scaling" in newest:
        sections.append(_scaling(newest["scaling"]))
    past = results.history(records)
    if len(records) > 1 and past:
        drawn = figures.history_figure(past)
        lead = "Ratios are to the plain loop of the same run; a plus marks a commit with changes."
        parts: list[Part] = [drawn] if drawn else []
        sections.append(Section("History", [*parts, results.history_table(past)], lead))
    if top.get("rates"):
        sections.append(Section("What the floor is", [FLOOR, _rates(top)]))
    if top.get("settings"):
        sections.append(Section("Settings", [Fold("How it was run", [top["settings"]])]))
    return render_sections(
        "Seconds a round",
        sections,
        words=_words(rounds) if rounds else None,
        facts=_facts(top),
        environment=_environment(top),
    )


def _facts(record: Record) -> list[str]:
    about = record["environment"]
    threads = record.get("settings", {}).get("threads") or about.get("threads")
    found = [str(about.get("device") or record["device"])]
    found += [count(threads, "thread")] if threads else []
    found += [f"torch {about['torch']}"] if about.get("torch") else []
    found.append(f"commit {results.commit_name(record)}")
    return found + [record["date"][:16].replace("T", " ") + " UTC"] * bool(record["date"])


def _environment(record: Record) -> dict[str, Any]:
    threads = record.get("settings", {}).get("threads")
    about = {**record["environment"], **({"threads": threads} if threads else {})}
    return {"commit": record["commit"], "measured": record["date"], **about}


def _words(record: Record) -> Words:
    """Return the ratios in words, and the caveats."""
    rows = [(found, results.ratio(found, "sartor")) for found in record["workloads"]]
    known = [(found, value) for found, value in rows if value is not None]
    words = Words(headline="Seconds a round of federated averaging; no ratio to a plain loop.")
    if known:
        values = sorted(value for _, value in known)
        ends = dict.fromkeys(f"{value:.1f}" for value in (values[0], values[-1]))
        names = ", ".join(found["workload"]["name"] for found, _ in known)
        words.headline = (
            f"Sartor is {' to '.join(ends)} times as fast as a plain PyTorch loop ({names})."
        )
    for found, value in known:
        mine, plain = (found["contenders"][name]["seconds"] for name in ("sartor", "plain"))
        remark = f"{mine:.3g} s a round, plain loop {plain:.3g} s"
        words.tiles.append((found["workload"]["name"], f"{value:.1f}×", remark))
    reached = [
        f"{found['workload']['name']} {100 * part:.2g} %"
        for found in record["workloads"]
        if "sartor" in found["contenders"]
        and (part := results.share(found, found["contenders"]["sartor"]["seconds"], record))
    ]
    if reached:
        words.findings.append(f"Share of the floor that Sartor reaches: {', '.join(reached)}.")
    words.caveats = _caveats(record)
    return words


def _caveats(record: Record) -> list[str]:
    found = []
    noisy = max((results.busy(workload) for workload in record["workloads"]), default=0.0)
    if noisy > load.QUIET:
        found.append(
            f"Other processes kept up to {noisy:.1f} processors busy: repeat it on an idle machine "
            "before you quote a number."
        )
    if (others := record.get("rates", {}).get("others", 0.0)) > load.QUIET:
        found.append(
            f"Other processes kept {others:.1f} processors busy while the rates were measured, so "
            "the rates are too low, and the shares of the floor too high."
        )
    if record.get("settings", {}).get("quick"):
        found.append("This is the quick form: a tenth of the samples, and few rounds.")
    if record["commit"]["changed"]:
        found.append("The files differed from the commit that is named.")
    if sources := sorted({w["source"] for w in record["workloads"] if "synth" in w["source"]}):
        found.append(f"Data: {', '.join(sources)}; accuracy only shows that the work was the same.")
    for workload in record["workloads"]:
        for name, reason in workload.get("left_out", {}).items():
            found.append(f"{workload['workload']['name']}: {NAMES[name]} was left out: {reason}.")
    return found


def _workload(found: dict[str, Any], record: Record) -> Section:
    """Return the table of a workload."""
    gpu = record["device"] == "cuda"
    floor = None
    if "work" in found and record.get("rates"):
        floor = Work(**found["work"]).floor(Rates(**record["rates"]))
    rows = []
    for name, row in found["contenders"].items():
        rows.append(
            [
                NAMES[name],
                _short(row["seconds"]),
                f"{row['fastest']:.3g} to {row['slowest']:.3g}",
                results.ratio(found, name),
                row["steps_per_second"],
                floor and _short(floor["seconds"]),
                results.share(found, row["seconds"], record),
                row["memory_mb"],
                *([row["gpu_memory_mb"]] if gpu else []),
                statistics.mean(row["accuracy"]),
            ]
        )
    columns = ["contender", "s a round", "range", "× plain loop", "client-steps/s", "floor, s"]
    columns += ["of floor", "peak MB", *(["GPU MB"] if gpu else []), "accuracy"]
    formats = {"of floor": "percent", "accuracy": "percent", "× plain loop": "seconds"}
    counts = dict.fromkeys(("client-steps/s", "peak MB", "GPU MB"), "count")
    notes = {"data": found["source"]}
    if floor:
        work = found["work"]
        notes["floor"] = (
            f"{work['flops'] / 1e9:,.3g} GFLOP take {floor['arithmetic']:.3g} s, "
            f"{work['bytes'] / 1e9:,.3g} GB take {floor['memory']:.3g} s"
        )
    for name, row in found["contenders"].items():
        if row["parts"]:
            parts = ", ".join(f"{part} {value:.3g} s" for part, value in row["parts"].items())
            notes[f"{NAMES[name]}, a round by part"] = parts
    if (noisy := results.busy(found)) > load.QUIET:
        notes["busy machine"] = f"other processes kept up to {noisy:.1f} processors busy"
    lead = (
        f"Network {Workload(**found['workload']).describe()}; {found['least']} to {found['most']} "
        f"training samples a client, {found['steps']:.0f} client-steps a round."
    )
    table = Table(columns, rows, notes, {**formats, **counts})
    return Section(results.label(found, record["device"]), [table], lead)


def _rates(record: Record) -> dict[str, str]:
    rates = record["rates"]
    return {
        "rates": f"of {rates['device']}, in the same run"
        if rates["device"]
        else "given as arguments",
        "large product of float32 matrices": f"{rates['flops'] / 1e9:,.0f} GFLOP/s",
        "large copy, read and written": f"{rates['bytes'] / 1e9:,.1f} GB/s",
    }


def _device(record: Record) -> Section:
    columns = list(dict.fromkeys(key for row in record["rows"] for key in row))
    columns.sort(key=lambda column: column not in ("what", "network in"))
    rows = [[_short(row.get(column)) for column in columns] for row in record["rows"]]
    formats = {"share of the floor": "percent", "client-steps a second": "count"}
    table = Table(columns, rows, _busy(record), formats)
    return Section("Device", [table], " · ".join(_facts(record)) + ".")


def _methods(record: Record) -> Section:
    rows = record["rows"]
    if not rows:
        return Section("Methods", ["No method was measured."])
    body = [[_short(value) for value in row.values()] for row in rows]
    table = Table(list(rows[0]), body, _busy(record), {"times FedAvg": "seconds"})
    lead = f"{record['title']}; local work and server, without evaluation."
    return Section("Methods", [figures.method_figure(rows), table], lead)


def _busy(record: Record) -> dict[str, str]:
    """Return a note if the machine was busy."""
    others = record.get("others", 0.0)
    said = f"other processes kept {others:.1f} processors busy on average; repeat when idle"
    return {"busy machine": said} if others > load.QUIET else {}


def _short(value: Any) -> Any:
    """Return a number with three digits, and anything else as it is."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _scaling(record: Record) -> Section:
    rows = record["rows"]
    head = ["what grows", "to", "ms a round", "fastest", "slowest"]
    body = [
        [record["meaning"][r["what"]], f"{r['value']:,}"]
        + [_short(1e3 * r[key]) for key in ("seconds", "fastest", "slowest")]
        for r in rows
    ]
    drawn = figures.scaling_figures(rows, record["meaning"])
    return Section(
        "Growth", [*drawn, Table(head, body, _busy(record))], "One thing grows at a time."
    )
