"""The pages on training and search: their Python blocks run, one after the other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.filterwarnings("ignore:The network has BatchNorm")
@pytest.mark.parametrize("page", ["training.md", "tuning.md"])
def test_the_blocks_of_a_page_run(page: str, tmp_path, monkeypatch, capsys) -> None:
    """Those that need a package that is not here are compiled only."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python ?(\w*)\n(.*?)```", text, re.DOTALL)
    assert blocks
    names: dict[str, Any] = {"__name__": page}
    for package, block in blocks:
        code = compile(block, page, "exec")
        if not package or importlib.util.find_spec(package) is not None:
            exec(code, names)
    if page == "training.md":
        assert not names["reader"].training
        assert names["own"].accuracy > 0.8
        assert names["short"].stopped[0]["why"] == "Enough asked to stop in on_evaluation"
        assert "fedavg on 8 clients, 10 rounds" in capsys.readouterr().out
