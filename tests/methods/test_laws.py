"""Every method, in every variant, against every law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sartor.methods import METHODS
from tests.laws import CASES, FOR_VARIANTS, LAWS, Case, check_method


def pairs() -> list[Any]:
    """Return every case with every law, so that laws find the runs of the case before them.

    Some laws of variants are slow tests.
    """
    return [
        pytest.param(
            law,
            case,
            id=f"{law}-{case}",
            marks=[] if case.is_default or law in FOR_VARIANTS else pytest.mark.slow,
        )
        for case in CASES
        for law in LAWS
    ]


@pytest.mark.parametrize(("law", "case"), pairs())
def test_law(law: str, case: Case, tmp_path: Path) -> None:
    check_method(case, tmp_path, (law,))


def test_all_methods_are_covered() -> None:
    """A method that is listed is a method that is checked."""
    assert {case.method for case in CASES} == set(METHODS)
    assert set(FOR_VARIANTS) <= set(LAWS)
