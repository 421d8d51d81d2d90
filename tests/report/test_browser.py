"""The pages in a real browser: drawn, quiet, narrow, dark, and reachable without a mouse."""

from __future__ import annotations

import json

import pytest

from sartor.report import write_client, write_report
from sartor.report.charts import Line, line_figure
from sartor.report.evidence import Check, Measured, published_table
from sartor.report.sections import Section, render_sections
from sartor.runs import ComparisonFolder
from tests.report.browser import CHROMIUM, Browser
from tests.report.test_advice_page import make_advice
from tests.synthetic_results import make_comparison, make_result

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

BOXES = """[...document.querySelectorAll("svg.figure")]
.filter(svg => svg.checkVisibility())
.map(svg => [svg.closest("figure").id, ...[svg, ...svg.querySelectorAll("path, text, image")]
  .map(part => part.getBoundingClientRect())
  .reduce((s, box, i) => i ? [s[0], s[1], s[2] + (box.width + box.height > 0)]
                           : [box.width, box.height, 0], [])])"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page of every kind: a comparison, a single run, an advice, a page of parts."""
    folder = tmp_path_factory.mktemp("pages")
    line = Line(
        "ours", [1, 2, 4], [0.5, 0.6, 0.7], error=[0.1, 0.1, 0.1], published=[0.5, 0.7, 0.7]
    )
    figure = line_figure("by-clients", "Accuracy", [line], x_label="clients", y_label="accuracy")
    section = Section(
        "Evidence", [figure, published_table([Measured("a", 1, 2, 1)]), [Check("b", True)]]
    )
    (folder / "parts.html").write_text(render_sections("Parts", [section]), encoding="utf-8")
    names = tuple(f"a hospital with a rather long name, ward {i}" for i in range(20))
    ComparisonFolder.create(folder / "run", {}).write_comparison(make_comparison(names=names))
    answers = {"runs": 1, "measures": {"AUROC": 0.8}, "formats": {"AUROC": "score"}}
    answers |= {"confusion": [[9, 1], [2, 8]], "calibration": [[0.1, 0.2, 9], [0.8, 0.7, 11]]}
    data = {names[0]: {"classes": {"no": 9, "yes": 11}, "missing": {"age": 0.25}}}
    data[names[0]]["samples"] = {"train": 10, "val": 0, "test": 10}
    facts = {"format": 1, "data": data, "answers": {"fedapa": {names[0]: answers}}}
    (folder / "run" / "clients.json").write_text(json.dumps(facts), encoding="utf-8")
    return {
        "client": write_client(folder / "run", names[0]),
        "comparison": write_report(make_comparison(seeds=(0, 1), names=names), folder / "c.html"),
        "run": write_report(make_result("fedapa"), folder / "r.html"),
        "advice": write_report(make_advice(), folder / "a.html"),
        "parts": folder / "parts.html",
    }


FIGURES = {
    "client": 2,
    "comparison": 5,
    "run": 4,
    "advice": 2,
    "parts": 1,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    tab = Browser(tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1200])
@pytest.mark.parametrize("name", FIGURES)
def test_a_page_is_drawn_without_messages_and_without_scrolling_sideways(
    browser, pages, name, width, dark
):
    """Every figure has a box with something in it; the console is silent; nothing is loaded."""
    browser.open(pages[name], width=width, dark=dark)
    assert browser.complaints() == []
    boxes = browser.ask(BOXES)
    assert len({key for key, *_ in boxes}) == len(boxes) == FIGURES[name]
    for key, wide, high, parts in boxes:
        assert wide > 250, key
        assert high > (60 if name == "client" else 100), key
        assert parts > 8, key
    assert browser.ask("document.documentElement.scrollWidth") <= width
    ink, paper = browser.ask(
        """["color", "backgroundColor"].map(name => getComputedStyle(document.body)[name]
        .match(/[0-9]+/g).slice(0, 3).map(Number).reduce((a, b) => a + b) / 3)"""
    )
    assert (ink > 200 and paper < 60) if dark else (ink < 60 and paper > 200)


@pytest.mark.parametrize(("name", "texts"), [("comparison", 50), ("client", 10)])
def test_text_in_figures_can_be_read_on_a_phone(browser, pages, name, texts):
    """No text of a figure is smaller than eight pixels at 375."""
    browser.open(pages[name], width=375)
    sizes = browser.ask(
        """[...document.querySelectorAll("svg.figure text")]
        .filter(text => text.checkVisibility())
        .map(text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)
        .map(Math.abs).filter(size => size > 0)"""
    )
    assert len(sizes) > texts
    assert min(sizes) >= 8


def test_the_keyboard_reaches_everything_and_opens_what_is_folded(browser, pages):
    """Tab visits the links and every fold, in the order of the page; Enter opens a fold."""
    browser.open(pages["comparison"], width=1200)
    wanted = browser.ask("document.querySelectorAll('a, summary').length")
    seen, regions = [], 0
    for _ in range(wanted + 60):
        browser.press("Tab")
        tag = browser.ask("document.activeElement.tagName")
        if tag == "BODY":
            break
        regions += browser.ask("document.activeElement.matches('.scroll')")
        if tag not in ("A", "SUMMARY"):
            continue
        outline = browser.ask("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        seen.append(browser.ask("document.activeElement.textContent"))
        if seen[-1] == "Every client, every method":
            assert browser.ask("document.activeElement.parentElement.open") is False
            browser.press("Enter")
            assert browser.ask("document.activeElement.parentElement.open") is True
    assert seen[:2] == ["Summary", "Gains"]
    assert "Every client, every method" in seen
    assert seen[-1] == "Versions and hardware"
    assert len(seen) >= wanted
    assert regions >= 10


def test_on_paper_everything_is_open_and_nothing_is_cut(browser, pages):
    """Print: no navigation, folded tables are shown, regions do not scroll."""
    browser.open(pages["comparison"], width=1000, media="print")
    assert browser.ask("document.querySelector('nav').checkVisibility()") is False
    assert browser.ask(
        """[...document.querySelectorAll("details > :not(summary)")]
        .every(part => part.getBoundingClientRect().height > 0)"""
    )
    kinds = browser.ask(
        """[...new Set([...document.querySelectorAll(".scroll")]
        .map(part => getComputedStyle(part).overflowX))].join()"""
    )
    assert kinds == "visible"


def test_the_browser_would_notice(browser, tmp_path):
    """Console messages, loaded pictures and a page that is too wide are noticed."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<meta name=viewport content='width=device-width'><script>console.log(1)</script>"
        "<img src='http://127.0.0.1:9/x.png'><p style='width: 900px'>wide</p>"
    )
    browser.open(bad, width=375)
    assert len(browser.complaints()) >= 2
    assert browser.ask("document.documentElement.scrollWidth") > 375
