"""The first part of a report: what each client gains over training alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sartor.report.client_page import MOST_PAGES, Clients
from sartor.report.gains import counted, gains_of, subject
from sartor.report.layout import MOST_ROWS
from sartor.report.sections import Exhibit, Fold, Links, Part, Section
from sartor.results.comparison import Comparison
from sartor.results.tables import Table

if TYPE_CHECKING:
    from sartor.report.drawing import Figure

GAIN_FIGURE = "gain-by-client"

FEW = 40
"""More clients are folded away."""

RAW = ("fraction hurt", "clients hurt")

LEAD = (
    "Alone: the client's own model, trained on its own samples. Federated: the model it has after "
    "training together. Low and high are the ends of the 95 % interval of the gain; a client "
    "gains or loses only where the interval leaves zero out, else these data cannot tell."
)


def gain_sections(
    comparison: Comparison, figures: Sequence[Figure] | str, clients: Clients | None
) -> list[Section]:
    """Return the section, if training alone is known, or the links to the pages of clients.

    Args:
        comparison: with every setting of a sweep as an entry of its own.
        figures: those of the report, or why there are none.
        clients: their pages, if there are any.
    """
    every = gains_of(comparison)
    links = {} if clients is None or len(clients.names) > MOST_PAGES else clients.links
    if not every:
        pages: list[Part] = [Links([*links.items()])] if links else []
        return [Section("A page for each client", pages, key="pages", link="Clients")] * bool(pages)
    shown = subject(comparison)
    parts: list[Part] = []
    if not isinstance(figures, str):
        parts += [figure for figure in figures if figure.key == GAIN_FIGURE]
    for name, gains in sorted(every.items(), key=lambda pair: pair[0] != shown):
        table = gains.result.gain(gains.reference)
        exhibit = Exhibit(_shortened(table), f"Gains by {name}", name, links=links)
        if name == shown and len(gains.clients) <= FEW:
            parts.append(exhibit)
        else:
            plain = Exhibit(_shortened(table), f"Gains by {name}", "", links=links)
            parts.append(Fold(f"{name}: {counted(gains.counts)}", [plain]))
    if links:
        parts.append("A client's name leads to its own page: plain, by name, to be printed.")
    return [Section("What each client gains", parts, LEAD, "gains", "Gains")]


def _shortened(table: Table) -> Table:
    """Return the table with the most rows that a page holds, and without counts of raw signs.

    A client below zero may be there by chance; the verdicts count those that are not.
    """
    notes = {key: note for key, note in table.notes.items() if key not in RAW}
    if len(table) > MOST_ROWS:
        notes["shown"] = f"the first {MOST_ROWS} of {len(table)} clients"
    return Table(table.columns, table.rows[:MOST_ROWS], notes, table.formats, table.title)
