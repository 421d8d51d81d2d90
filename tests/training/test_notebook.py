"""What a notebook shows: results, and progress in place."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import sartor
from sartor.training.progress import NotebookBar, PlainLines, reporter
from tests.report.test_advice_page import make_advice
from tests.toys import Net, federation

SETTINGS: dict[str, Any] = {"model": Net(), "device": "cpu", "rounds": 1}


def _plain(page: str) -> None:
    """Check that a page is whole and leaves all colours to the notebook."""
    assert not re.search(r"color|background|<script|<style", page)
    for tag in ("table", "tr", "td", "th", "p"):
        assert len(re.findall(f"<{tag}[ >]", page)) == page.count(f"</{tag}>")


def test_results_and_comparisons_show_themselves() -> None:
    """One run shows its clients, at most forty; a sweep shows its runs."""
    one = sartor.fit("fedavg", federation(), **SETTINGS)._repr_html_()
    _plain(one)
    assert one.count("<tr>") == 1 + 5
    many = sartor.fit("local", federation(sizes=(2,) * 50), **SETTINGS)._repr_html_()
    assert many.count("<tr>") == 1 + 40
    assert "clients not shown: 10" in many
    swept = sartor.fit("fedavg", federation(), sweep={"local_lr": [0.1, 0.2, 0.3]}, **SETTINGS)
    _plain(swept._repr_html_())
    assert swept._repr_html_().count("<tr>") == 1 + 3
    assert '<td style="text-align:right">0.3</td>' in swept._repr_html_()
    both = sartor.compare(["ditto"], federation(), baselines=False, **SETTINGS)
    _plain(both._repr_html_())


def test_advice_shows_itself() -> None:
    """Its sentences, then its clients."""
    page = make_advice(names=("a", "<b>", "c", "d"))._repr_html_()
    _plain(page)
    assert page.count("<tr>") == 1 + 4
    assert "Expected mean" in page
    assert "&lt;b&gt;" in page


class Shown:
    """A display that can be updated."""

    def __init__(self, first: str) -> None:
        self.pages = [first]

    def update(self, page: str) -> None:
        self.pages.append(page)


def _in_kernel(monkeypatch: pytest.MonkeyPatch, shell: Any) -> list[Shown]:
    made: list[Shown] = []

    def display(page: str, display_id: bool) -> Shown:
        made.append(Shown(page))
        return made[-1]

    ipython, inner = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython).update(get_ipython=lambda: shell, display=inner)
    vars(inner).update(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return made


def test_progress_is_one_line_that_is_updated_in_place(monkeypatch) -> None:
    """``progress=True`` in a kernel; the line tells round, accuracy and bytes."""
    made = _in_kernel(monkeypatch, SimpleNamespace(kernel=object()))
    sartor.fit("fedavg", federation(), progress=True, **{**SETTINGS, "rounds": 3})
    (line,) = made
    assert [re.findall(r"round (\d)/3", page) for page in line.pages] == [[c] for c in "0123"]
    assert "value='3' max='3'" in line.pages[-1]
    assert "accuracy" in line.pages[-1]
    _plain(line.pages[-1])


def test_elsewhere_it_is_what_it_was(monkeypatch) -> None:
    """A terminal of IPython is no notebook, and lines can be asked for."""
    _in_kernel(monkeypatch, SimpleNamespace(kernel=object()))
    assert isinstance(reporter(plain=False), NotebookBar)
    assert isinstance(reporter(plain=True), PlainLines)
    _in_kernel(monkeypatch, SimpleNamespace())
    assert not isinstance(reporter(plain=False), NotebookBar)
