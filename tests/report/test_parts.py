from __future__ import annotations

import itertools
import math

import pytest

from sartor.core.errors import ConfigError
from sartor.report.charts import Line, line_figure
from sartor.report.drawing import colour_and_mark
from sartor.report.evidence import Check, Measured, published_table, tally
from sartor.report.reproduction_figures import figures_of
from sartor.report.reproduction_page import render_reproduction
from sartor.report.sections import Fold, Section, render_sections
from sartor.report.words import Words
from sartor.reproduce.outcome import Outcome
from sartor.reproduce.plan import load
from tests.report.test_report import Page


def make_figure(**changes):
    lines = [
        Line("ours", [1, 2, 4], [0.5, 0.6, 0.7], error=[0.02, 0.01, 0.03], published=[0.5, 0.7, 9]),
        Line("bound", [1, 2, 4], [0.4, 0.5, math.nan], dashed=True),
    ]
    settings = {"x_label": "clients", "y_label": "accuracy", "x_scale": "log", "x_ticks": [1, 2, 4]}
    return line_figure("by-clients", "Accuracy", lines, **{**settings, **changes})


def test_a_line_figure_holds_the_numbers_it_was_given():
    """Curve, bars of one standard error, and hollow markers are where the data are."""
    (axes,) = make_figure().canvas.axes
    (container,) = axes.containers
    _, _, (bars,) = container
    assert axes.lines[0].get_ydata().tolist() == [0.5, 0.6, 0.7]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [
        pytest.approx([0.48, 0.52]),
        pytest.approx([0.59, 0.61]),
        pytest.approx([0.67, 0.73]),
    ]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [0.5, 0.7, 9.0] in [line.get_ydata().tolist() for line in hollow]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "ours",
        "bound",
        "published",
    ]
    assert axes.get_xscale() == "log"


def test_a_line_figure_says_what_it_shows_and_leaves_out_what_is_not_there():
    """The description has the ends of the curves; the caption explains bars and hollow markers."""
    figure = make_figure()
    assert "ours goes from 0.5 at 1 to 0.7 at 4; bound goes from 0.4 at 1 to 0.5 at 2" in figure.alt
    assert figure.caption.endswith("Hollow markers are the published values.")
    plain = line_figure("a", "A", [Line("b", [1], [2])], x_label="x", y_label="y")
    assert plain.caption == ""


def test_curves_that_differ_in_the_last_digits_alone_look_level():
    """No axis that counts billionths above 1, whose words would lie on the legend."""

    def height(values):
        line = Line("a", [1, 2, 3], values)
        (axes,) = line_figure("a", "A", [line], x_label="x", y_label="y").canvas.axes
        low, high = axes.get_ylim()
        return high - low

    assert height([1.0, 1 - 1e-9, 1 - 3e-9]) == pytest.approx(0.1)
    assert height([1.0, 0.98, 0.99]) < 0.05
    assert height([0.0, 1e-9, 2e-9]) < 1e-8


@pytest.mark.parametrize(
    ("line", "scale", "word"),
    [
        (Line("a", [1, 2], [1.0]), "linear", "y has 1 values for 2"),
        (Line("a", [1, 2], [1, 2], error=[1]), "linear", "error has 1 values for 2"),
        (Line("a", [0, 2], [1, 2]), "log", "x is on a logarithmic axis"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_refused(line, scale, word):
    """Lengths that differ and logarithms of 0 are named with their curve."""
    with pytest.raises(ConfigError, match=f"a: {word}"):
        line_figure("k", "t", [line], x_label="x", y_label="y", x_scale=scale)


def test_no_two_of_42_curves_look_alike():
    """Six colours with seven markers: a pair is used once, and colour 1 is the reference's."""
    pairs = [colour_and_mark(position) for position in range(42)]
    assert len(set(pairs)) == 42
    assert 1 not in {number for number, _ in pairs}
    assert colour_and_mark(3, reference=True)[0] == 1


def test_curves_of_one_colour_differ_in_their_stroke():
    """Among 24 curves no two share colour and stroke; a theory keeps its own dashes."""
    lines = [Line(str(k), [0, 1], [k, k + 1.0]) for k in range(24)]
    figure = line_figure("k", "t", lines, x_label="x", y_label="y")
    drawn = figure.canvas.axes[0].get_lines()
    looks = {(line.get_color(), str(line._dash_pattern)) for line in drawn}
    assert len(drawn) == len(looks) == 24
    reference = [Line("r", [0, 1], [0, 1], reference=True), *lines[:6]]
    solid = line_figure("k", "t", reference, x_label="x", y_label="y").canvas.axes[0].get_lines()
    assert {line.get_linestyle() for line in solid} == {"-"}


def test_rounds_are_whole_numbers_on_the_axis():
    """Twenty rounds are not counted in steps of two and a half; other places keep their ticks."""

    def ticks(x):
        figure = line_figure("k", "t", [Line("a", x, [1.0, 2.0])], x_label="x", y_label="y")
        return figure.canvas.axes[0].get_xticks()

    assert all(float(tick).is_integer() for tick in ticks([0, 20]))
    assert not all(float(tick).is_integer() for tick in ticks([0.0, 1.5]))


def test_the_page_of_a_short_form_lists_what_it_shortened():
    """Seeds, rounds and the model of the first cell, with the full form's in brackets."""
    page = render_reproduction(Outcome(load("fedapa-table1-fmnist", quick=True)))
    assert "model dnn (lenet5)" in page
    assert "samples 2000 (all)" in page
    assert "2 of 4 columns" in page
    assert "with the full form in brackets" not in render_reproduction(
        Outcome(load("fedapa-table1-fmnist"))
    )


def test_every_place_of_a_short_logarithmic_axis_is_written_out():
    """Four sizes are four numbers below the axis, not powers of ten."""
    plan = load("prox-slopes", quick=True)
    outcome = Outcome(plan)
    for column, row in itertools.product(plan.columns, plan.rows):
        record = {"values": {"local_error": 1.0 / column.x}, "probes": {}, "points": {}}
        outcome.add(row.name, column.name, 0, {**record, "headline": "pre"})
    drawn = figures_of(outcome)[0].canvas.axes[0].get_xticklabels()
    assert [label.get_text() for label in drawn] == ["400", "800", "1600", "3200"]


def test_published_beside_ours_by_hand():
    """Two standard errors decide: 0.10 within 2 x 0.05, 0.11 not; one run alone is not judged."""
    rows = [
        Measured("met", 0.80, 0.90, 0.05),
        Measured("missed", 0.80, 0.91, 0.05),
        Measured("met by both errors", 0.80, 0.90, 0.03, published_error=0.04),
        Measured("once", 0.80, 0.90),
    ]
    table = published_table(rows, kind="percent", source="Table 1")
    assert table.column("within two s.e.") == ["yes", "no", "yes", "–"]
    assert table.column("difference")[1] == pytest.approx(0.11)
    assert table.text_rows()[1][1:5] == ["80.0", "91.0", "5.0", "+11.0"]
    assert table.notes["within two s.e."] == "2 of the 3 that can be judged"
    assert table.notes["not judged"].startswith("1 measured once")


def test_a_page_of_parts_holds_each_of_them_as_text():
    """Words, a table, a figure, settings and claims; what is in them cannot become markup."""
    checks = [Check("a <b>", True, "0.1 < 0.2"), Check("c", False), Check("d", None)]
    page = Page(
        render_sections(
            "Reproduction",
            [
                Section("Figure 4", [make_figure(), published_table([Measured("x", 1, 2, 1)])]),
                Section("Claims", [checks, "A word & another."], lead="What was said."),
                Section("Claims", [Fold("Settings", [{"rounds": 3}])]),
            ],
            words=Words(headline="It holds."),
            facts=["2 figures"],
        )
    )
    assert page.faults == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert {"summary", "figure-4", "by-clients", "claims", "environment"} <= set(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert not {"script", "b"} & set(page.tags)
    assert "1 of 2 claims hold; 1 was not tested" in page.text
    for said in ("PASS a <b> 0.1 < 0.2", "FAIL c", "NOT RUN d", "A word & another.", "It holds."):
        assert said in page.text
    assert tally([]) == "0 of 0 claims hold"
