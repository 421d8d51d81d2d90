"""Laws of the progress: what it shows, and where."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from sartor.training.progress import LiveBar, PlainLines, in_words, reporter


def test_progress_goes_to_stderr_in_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Away from a terminal there are about ten lines a run, the first and the last among them."""
    lines = reporter(plain=True)
    lines.start(100, "fedavg")
    for index in range(100):
        lines.update(index, {"accuracy": 0.5, "bytes": 1e6 * index, "seconds": 1.0, "runs": 1})
    lines.stop()
    captured = capsys.readouterr()
    shown = captured.err.splitlines()
    assert not captured.out
    assert len(shown) == 11
    assert "round 1/100" in shown[0]
    assert "round 100/100  accuracy 50.0%  99.0 MB  0 s left" in shown[-1]


def test_a_resumed_run_is_shown_from_where_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The first line of a resumed run is its first new round."""
    lines = PlainLines()
    lines.start(20, "fedavg")
    lines.update(13, {"accuracy": 0.5})
    assert "round 14/20" in capsys.readouterr().err


def test_the_last_known_accuracy_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """A round without an evaluation keeps the accuracy of the last one."""
    lines = PlainLines()
    lines.start(2, "local")
    lines.update(0, {"accuracy": 0.25, "bytes": 0})
    lines.update(1, {"accuracy": None, "bytes": 0})
    assert capsys.readouterr().err.count("accuracy 25.0%") == 2


@pytest.mark.parametrize("accuracy", [math.nan, [0.5, math.nan], [], None])
def test_an_unknown_accuracy_is_no_number(accuracy: object) -> None:
    """What is not known is not shown as a number, and nothing fails."""
    assert "%" not in in_words({"accuracy": accuracy})


def test_a_live_bar_shows_each_run_once() -> None:
    """On a terminal each run keeps one finished bar."""
    screen = io.StringIO()
    bar = LiveBar(Console(file=screen, width=100, force_terminal=True, color_system=None))
    for name in ("local", "fedavg"):
        bar.start(2, name)
        for index in range(2):
            bar.update(index, {"accuracy": 0.5, "bytes": 1e6})
        bar.stop()
    after = screen.getvalue().split("fedavg", 1)[1]
    assert "local" not in after
    assert "round 2/2" in after
    assert "accuracy 50.0%" in after
