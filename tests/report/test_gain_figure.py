"""The figure of gains: a row a client, by name, with its interval, coloured by verdict."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from sartor.report.drawing import BAD, GOOD, SERIES
from sartor.report.gain_figure import MOST_ROWS, gain_by_client
from sartor.report.gains import counted
from sartor.report.words import summarise
from sartor.results.comparison import Comparison
from sartor.results.gains import VERDICTS
from tests.synthetic_results import make_comparison, make_result

SEEDS = (0, 1, 2, 3)
COLOURS = dict(zip(VERDICTS, (GOOD, BAD, SERIES[0]), strict=True))


def pair(clients: int) -> Comparison:
    return Comparison(
        {m: make_result(m, clients=clients, seeds=SEEDS) for m in ("local", "fedapa")}
    )


def test_a_row_for_every_client_with_name_gain_interval_and_colour():
    """Bars, lines and words are those of the table, sorted; four clients are four rows."""
    comparison = pair(4)
    figure = gain_by_client(comparison)
    table = comparison["fedapa"].gain(comparison["local"])
    rows = sorted(
        (dict(zip(table.columns, row, strict=True)) for row in table.rows), key=lambda r: r["gain"]
    )
    axes = figure.canvas.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [r["client"] for r in rows]
    bars, lines = axes.collections
    ends = [float(np.asarray(path.vertices)[2, 0]) for path in bars.get_paths()]
    assert ends == pytest.approx([100 * r["gain"] for r in rows])
    for row, line in zip(rows, lines.get_segments(), strict=True):
        assert line[:, 0] == pytest.approx([100 * row["low"], 100 * row["high"]])
    assert [to_hex(c) for c in bars.get_facecolor()] == [COLOURS[r["verdict"]] for r in rows]
    for row in rows:
        assert f"{row['client']} " in figure.alt
        assert f"({row['verdict']})" in figure.alt


def test_methods_share_the_order_of_the_clients():
    """One panel a method, names on the left, the same client in the same row everywhere."""
    comparison = make_comparison(clients=5, seeds=SEEDS)
    figure = gain_by_client(comparison)
    panels = [axes for axes in figure.canvas.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == ["fedavg", "fedprox", "fedapa"]
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert sorted(names) == sorted(comparison["local"].clients)
    for axes in panels:
        table = comparison[axes.get_title(loc="left")].gain(comparison["local"])
        gains = dict(zip(table.column("client"), table.column("gain"), strict=True))
        ends = [float(np.asarray(p.vertices)[2, 0]) for p in axes.collections[0].get_paths()]
        assert ends == pytest.approx([100 * gains[name] for name in names])
    assert figure.wide


def test_many_clients_are_a_summary():
    """No row a client: sorted points, and counts of verdicts."""
    comparison = pair(MOST_ROWS + 1)
    figure = gain_by_client(comparison)
    (axes,) = figure.canvas.axes
    assert float(figure.canvas.get_figheight()) < 4
    verdicts = comparison["fedapa"].gain(comparison["local"]).column("verdict")
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    assert axes.get_xlabel() == f"clients: {counted(counts)}"
    points = np.asarray(axes.collections[-1].get_offsets())
    assert len(points) == MOST_ROWS + 1
    assert (np.diff(points[:, 1]) <= 0).all()


def test_no_winner_is_named_where_the_interval_includes_zero():
    """Headline and tile name the tied methods; surely worse ones are listed as such."""
    comparison = make_comparison(seeds=SEEDS)
    twin = make_result("fedapa", seeds=SEEDS)
    words = summarise(Comparison({**comparison.results, "twin": twin}))
    assert words.headline.startswith("fedapa and twin cannot be told apart, of 5 methods")
    assert "not surely better than twin" in words.tiles[0][2]
    assert any(text.startswith("Surely worse than fedapa: ") for text in words.findings)
    same = Comparison({"local": twin, "a": twin})
    assert summarise(same).headline.startswith("Training alone and a cannot be told apart: they")


def test_verdicts_by_chance_are_cautioned_where_clients_are_many():
    """With 60 clients about three verdicts are wrong if nothing differs; with 4 it is not said."""
    assert any("about 3 would be said" in text for text in summarise(pair(60)).caveats)
    assert not any("by chance alone" in text for text in summarise(pair(4)).caveats)
