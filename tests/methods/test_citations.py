"""Every method's file says, at the line, which equation or step of its algorithm happens there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from sartor.methods import METHODS

CITES = re.compile(r"#.*(\bEq\. \(\d+\)|\bAlg\.|\bline \d+)")
FILES = sorted({Path(inspect.getfile(entry.factory)) for entry in METHODS.values()})
HELPERS = {"auto", "__init__", "catalogue", "making", "options"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_equation_at_its_line(path: Path) -> None:
    """A comment beside the code cites Eq. (n), a line, or a step of the algorithm in words."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if CITES.search(line)]


def test_every_file_is_that_of_a_method() -> None:
    """A new file in the folder is listed, and so is held to the law above."""
    folder = FILES[0].parent
    assert {path.stem for path in folder.glob("*.py")} - HELPERS == {path.stem for path in FILES}


def test_fedprox_shows_its_term() -> None:
    """The objective of FedProx is the loss plus (λ/2)‖w − w_g‖², in one line with its equation."""
    text = next(path for path in FILES if path.stem == "fedprox").read_text(encoding="utf-8")
    wanted = r"return task\.loss\(w, .*\) \+ half_square\(lam, w, w_g\)  # Eq\. \(8\)"
    assert re.search(wanted, text)
