"""Every method, in every variant, against every law."""

from __future__ import annotations

from pathlib import Path

import pytest

from sartor.methods import METHODS
from tests.laws import CASES, LAWS, Case, check_method


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, case: Case, tmp_path: Path) -> None:
    check_method(case, tmp_path, (law,))


def test_all_methods_are_covered() -> None:
    """A method that is listed is a method that is checked."""
    assert {case.method for case in CASES} == set(METHODS)
