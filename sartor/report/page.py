"""Write a report: a summary, tables and figures on one page without external links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sartor import reproduce, runs
from sartor.adviser.advice import Advice
from sartor.adviser.folder import AdviceFolder
from sartor.adviser.verification import Verification
from sartor.core.errors import ConfigError
from sartor.report.client_facts import read_facts
from sartor.report.client_page import MOST_PAGES, Clients
from sartor.report.gain_section import GAIN_FIGURE, gain_sections
from sartor.report.layout import count, listed
from sartor.report.page_tables import client_table, event_table, ledger_table, network_events
from sartor.report.sections import Exhibit, Fold, Part, Section, render_sections
from sartor.report.words import summarise
from sartor.reproduce.outcome import Outcome
from sartor.reproduce.runner import ABOUT
from sartor.results.comparison import Comparison, as_comparison
from sartor.results.headline import HeadlineMetric
from sartor.results.readings import POINT_WORDS
from sartor.results.result import Result
from sartor.results.tables import Table
from sartor.runs.storage import naming, read_json, write_text

if TYPE_CHECKING:
    from sartor.report.drawing import Figure
    from sartor.report.printing import Format

Source = str | Path | Result | Comparison | Advice | Outcome
"""The folder of a run, a comparison, an advice or a reproduction; or what it contains."""


def write_report(source: Source, path: str | Path | None = None) -> Path:
    """Write the report of a folder (run, comparison, ...), or of what such a folder contains.

    Args:
        source: what to report on.
        path: the HTML file; by default ``report.html`` in the folder.

    Beside the page of a run's or comparison's folder, ``clients/`` gets a page for every client.

    Returns:
        The path of the page: one file that loads nothing and runs no script.

    Raises:
        RunFolderError: the folder cannot be read, or the page cannot be written.
    """
    found = _read(source)
    content, folder = found.content, found.folder
    environment = runs.environment()
    target = Path(path or "report.html")
    clients = None
    if folder is not None:
        target = Path(path or folder / "report.html")
        environment = read_json(folder / "environment.json")
    if isinstance(content, Advice):
        from sartor.report.advice_page import render_advice

        text = render_advice(content, found.verified, config=found.config, environment=environment)
    elif isinstance(content, Outcome):
        from sartor.report.reproduction_page import render_reproduction

        text = render_reproduction(content, environment)
    else:
        clients = None if folder is None else _clients(content, folder)
        text = render(content, environment, clients)
    with naming(target, "create"):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    if clients is not None and len(clients.names) <= MOST_PAGES:
        clients.write(target.parent)
    return target


def write_client(source: str | Path, client: str, folder: str | Path | None = None) -> Path:
    """Write the page of one client of a run or a comparison, and return its path.

    Args:
        source: the folder of the run or the comparison.
        client: its name.
        folder: where to write ``clients/NAME.html``; by default in the folder of the run.

    Raises:
        ConfigError: there is no such client, or the folder is of an advice or a reproduction.
    """
    found = _read(source)
    if not isinstance(found.content, Result | Comparison) or found.folder is None:
        raise ConfigError(
            f"{source} is no folder of a run or a comparison, so it has no pages of clients."
        )
    clients = _clients(found.content, found.folder)
    first = next(iter(clients.comparison.values()))
    first.client_index(client)  # an unknown name is refused, with a hint
    (path,) = clients.write(Path(folder or found.folder), [client])
    return path


def _clients(content: Result | Comparison, folder: Path) -> Clients:
    """Return the pages of the clients of a folder."""
    return Clients(as_comparison(content).expanded(), read_facts(folder), str(folder))


def write_figures(
    source: Source, folder: str | Path | None = None, kind: Format = "pdf"
) -> list[Path]:
    """Write each figure of a report to its own file for a paper, with embedded fonts.

    Args:
        source: what to draw.
        folder: where to write; by default ``figures`` in the folder of the run.
        kind: "pdf" (vectors) or "png".

    Returns:
        The paths of the figures; captions.txt is written next to them.

    Raises:
        RunFolderError: the folder cannot be read, or a file cannot be written.
    """
    from sartor.report.advice_figures import draw_advice
    from sartor.report.figures import draw_all
    from sartor.report.printing import save_all
    from sartor.report.reproduction_figures import figures_of

    found = _read(source)
    content = found.content
    target = Path(folder) if folder is not None else (found.folder or Path()) / "figures"
    if isinstance(content, Advice):
        return save_all(draw_advice(content), target, kind)
    if isinstance(content, Outcome):
        return save_all(figures_of(content), target, kind)
    return save_all(draw_all(as_comparison(content).expanded()), target, kind)


class _Read(NamedTuple):
    """The content of a report, and the folder it was read from."""

    content: Result | Comparison | Advice | Outcome
    folder: Path | None = None
    verified: Verification | None = None
    config: Mapping[str, Any] | None = None


def _read(source: Source) -> _Read:
    if not isinstance(source, str | Path):
        return _Read(source)
    if (Path(source) / ABOUT).is_file():
        return _Read(reproduce.read(source), Path(source))
    folder = runs.open_folder(source)
    if isinstance(folder, AdviceFolder):
        advice, verified = folder.read_advice()
        return _Read(advice, folder.path, verified, folder.config)
    if isinstance(folder, runs.ComparisonFolder):
        return _Read(folder.read_comparison(), folder.path)
    return _Read(runs.RunFolder.open(source).read_result(), folder.path)


def render(
    content: Result | Comparison,
    environment: Mapping[str, Any] | None = None,
    clients: Clients | None = None,
) -> str:
    """Return the page as text; a single result is shown with its baseline if that is known.

    With ``clients`` it leads to their pages.
    """
    comparison = as_comparison(content).expanded()
    first = next(iter(comparison.values()))
    metric = comparison.headline_metric
    looks, figures = _drawn(comparison)
    drawings: Part = figures
    if not isinstance(figures, str):
        drawings = [figure for figure in figures if figure.key != GAIN_FIGURE]
    goals = list(targets(comparison).items())
    table = comparison.table()
    if any(hurt is not None for hurt in table.column("clients hurt")):
        table.notes["clients hurt"] = "below training alone by any amount, chance included"
    methods: list[Part] = [Exhibit(table, "Comparison of methods", looks=looks)]
    if comparison.reference is not None and len(comparison) > 1:
        heading = "Paired differences on the same data"
        methods.append(Exhibit(comparison.paired(), "", heading, "paired", looks))
    if goals:
        costs = _to_reach(comparison, dict(goals[:1]))
        methods.append(Exhibit(costs, "", "What a target costs", "to-reach", looks))
    if goals[1:]:
        others = Exhibit(_to_reach(comparison, dict(goals[1:])), looks=looks)
        methods.append(Fold("Other targets", [others]))
    unit = " in per cent" if metric.is_share else ""
    fair = Exhibit(comparison.fairness(), "Fairness between clients", "", "fairness", looks)
    each: list[Part] = [
        f"{metric.title}{unit} on the test samples of each client. Pre: {POINT_WORDS['pre']}. "
        f"Post: {POINT_WORDS['post']}.",
        client_table(comparison),
    ]
    detail: list[Part] = [
        Fold("Every client, every method", each),
        Fold(f"How evenly {metric.name} is spread, in indices from the literature", [fair]),
    ]
    sections = [
        *gain_sections(comparison, figures, clients),
        Section(
            "Comparison of methods",
            methods,
            _about(metric),
            "methods",
            "Methods",
        ),
        Section("Figures", [drawings]),
        Section("Clients in detail", detail, key="clients", link="Details"),
        Section("Costs", [Exhibit(ledger_table(comparison), "Ledger", looks=looks)], key="ledger"),
    ]
    for name, result in comparison.items():
        if result.config.get("selection") and name != comparison.reference:
            tried, used = result.selection()
            lead = "Judged on held-out samples before training; no test sample took part."
            parts = [Exhibit(tried, ""), Exhibit(used, "")]
            sections.append(Section("What auto chose", parts, lead, "selection", "Choice"))
    if network_events(comparison):
        lead = "Clients that were missing, late or refused; each counts as absent in that round."
        events = [event_table(comparison)]
        sections.append(Section("What happened on the network", events, lead, "events", "Network"))
    sections.append(Section("Settings", _settings(comparison)))
    seeds = len({run.seed for result in comparison.values() for run in result.runs})
    return render_sections(
        _title(comparison),
        sections,
        words=summarise(comparison),
        facts=[
            count(len(first.clients), "client"),
            count(first.ledger.num_rounds, "round"),
            count(seeds, "allocation"),
        ],
        environment=environment,
    )


ABOUT_MEASURES = {
    "accuracy": "Accuracy",
    "exact match": "Exact match is the share of samples with all labels right. It",
    "tokens right": "Tokens right is the share of tokens that are predicted correctly. It",
    "RMSE": "RMSE is the root of the mean squared error, in the units of the label: less is "
    "better. It",
    "loss": "Loss is what the network itself returns: less is better. It",
}
"""Headline metric -> the beginning of the sentence that explains it."""


def _about(metric: HeadlineMetric) -> str:
    """Return how the numbers of the comparison are made."""
    if metric.function is None:
        return (
            f"{ABOUT_MEASURES[metric.name]} is taken at the last evaluation over the test samples "
            "of all clients together; each client is evaluated with its own model."
        )
    less = ": less is better" if metric.sign < 0 else ""
    return (
        f"{metric.title}{less}. It is taken at the last evaluation on the test samples of each "
        "client, with its own model; what stands here is the mean over clients, each alike, of "
        "those whose samples define it."
    )


def _drawn(comparison: Comparison) -> tuple[dict[str, tuple[int, str]], list[Figure] | str]:
    """Return the looks of the methods and the figures; a hint if matplotlib is missing."""
    try:
        from sartor.report.figures import draw_all, looks
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return {}, (
            "Figures need matplotlib: run pip install 'sartor[figures]', then sartor report FOLDER."
        )
    return looks(comparison), draw_all(comparison)


def targets(comparison: Comparison) -> dict[float, str]:
    """Return values worth reaching, and why: the result of training alone, and most of the best.

    For an error, "most" is a little more than the smallest. Targets that a method reached come
    first. There are none if every run diverged.
    """
    metric = comparison.headline_metric
    final = {name: result.mean_of("pooled_measure") for name, result in comparison.items()}
    known = [value for value in final.values() if math.isfinite(value)]
    found = {}
    alone = final.get(comparison.reference or "", math.nan)
    if math.isfinite(alone):
        found[_rounded(alone, metric)] = f"where {comparison.reference} ends"
    for percent in (95, 98, 90) if known else ():
        if metric.sign > 0:
            goal, why = percent / 100 * max(known), f"{percent} % of the best"
        else:
            more = 100 - percent
            goal, why = (1 + more / 100) * min(known), f"{more} % above the least"
        found.setdefault(_rounded(goal, metric), why)

    def missed(goal: float) -> bool:
        return not any(comparison.to_reach(goal).column("rounds"))

    return {goal: found[goal] for goal in sorted(found, key=missed)}


def _rounded(goal: float, metric: HeadlineMetric) -> float:
    """Round a share to a tenth of a per cent, and an error up to four digits."""
    if metric.is_share:
        return round(goal, 3)
    digits = 3 - math.floor(math.log10(goal)) if goal > 0 else 0
    return math.ceil(goal * 10.0**digits) / 10.0**digits


def _to_reach(comparison: Comparison, goals: Mapping[float, str]) -> Table:
    """Return the table of what targets cost, with the reason for each target."""
    table = comparison.to_reach(list(goals))
    text = comparison.headline_metric.text
    table.notes["target"] = ", ".join(f"{text(goal)} ({why})" for goal, why in goals.items())
    return table


def _title(comparison: Comparison) -> str:
    named = [name for name in comparison if name != comparison.reference]
    # A single method stands beside training alone; its name is the title.
    names = listed(named if len(named) == 1 else list(comparison))
    data = comparison.config.get("data") or next(iter(comparison.values())).config.get("data")
    if isinstance(data, Mapping):
        info = data.get("info") or {}
        source = info.get("source", "")
        known = info.get("dataset") or (source if Path(source).suffix else None)
        data = data.get("name") or data.get("dataset") or known
    return f"{names} on {Path(data).name}" if isinstance(data, str) else names


LONG = ("rebuild", "fingerprints")
"""Settings for machines: how every column was prepared under every seed. config.json has them."""


def _settings(comparison: Comparison) -> list[Part]:
    """Return the shared settings, then those of each method, without what only machines read."""
    shared = comparison.config
    parts: list[Part] = [Fold("All methods", [_short(shared)])] if shared else []
    for name, result in comparison.items():
        own = {key: v for key, v in result.config.items() if shared.get(key) != v}
        first = result.runs[0]
        given: dict[str, Any] = {**_short(own), "hyper": first.hyper, "options": first.options}
        if len(result.runs) > 1:
            given["runs"] = list(result.groups())
            given["seeds"] = sorted({run.seed for run in result.runs})
        parts.append(Fold(name, [given]))
    return parts


def _short(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the long ones."""
    kept = {key: value for key, value in settings.items() if key not in LONG}
    data = kept.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("info"), Mapping):
        info = {key: value for key, value in data["info"].items() if key != "preprocessing"}
        kept["data"] = {**data, "info": info}
    return kept
