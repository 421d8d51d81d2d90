"""The comparison that `make gpu-laws` makes, tried on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import gpu_laws
from bench.gpu_laws import Outcome, _gap, main


def test_the_engines_agree_and_the_page_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU the device's engine is the vectorised one, here as a program has it by default."""
    monkeypatch.setenv("SARTOR_ACCELERATE", "none")
    record = tmp_path / "record.md"
    words = ["--device", "cpu", "--only", "reference/fedap*/default", "--page", str(record)]
    assert main(words) == 0
    text = record.read_text()
    assert "0 differ" in text
    assert "| fedapa | 1 |" in text
    assert " failed" in capsys.readouterr().out


def test_a_difference_fails_and_is_named(monkeypatch, tmp_path: Path) -> None:
    """A result that is off by more than the tolerance is listed with its place."""
    monkeypatch.setattr(gpu_laws, "compare", lambda one, device: Outcome(one.name, 1e-3, "/loss"))
    record = tmp_path / "record.md"
    words = ["--device", "cpu", "--only", "reference/local/default", "--page", str(record)]
    assert main(words) == 1
    assert "reference/local/default, /loss, 1.0e-03" in record.read_text()


def test_counters_must_agree_exactly() -> None:
    """A byte too many is a difference however many were sent; a rounded loss is not."""
    many = np.array([1e12])
    assert _gap("/ledger/bytes_up", many, many + 1) == np.inf
    assert _gap("/scores/loss", many, many + 1) == 1e-12
    assert _gap("/scores/loss", many, np.array([np.nan])) == np.inf


@pytest.mark.slow
def test_every_method_agrees_without_acceleration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests switch the compiled layers on; a program has them off unless it asks."""
    monkeypatch.setenv("SARTOR_ACCELERATE", "none")
    assert main(["--device", "cpu", "--only", "reference/*/default"]) == 0
