"""Laws of the pages on data and results: their Python code runs as it is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

DOCS = Path(__file__).parents[2] / "docs"


class Tweets:
    """What a Hugging Face data set looks like from outside."""

    features = None
    column_names = ("user", "tweet", "label")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, name: str) -> list[Any]:
        words = {"user": "ab", "tweet": ("a good day", "bad"), "label": (1, 0)}[name]
        return [words[i % 2 if name != "user" else i // 20] for i in range(40)]


def given() -> dict[str, Any]:
    """Return what the pages take for granted: arrays, tables, and files in the working folder."""
    rng = np.random.default_rng(0)
    rows = 120
    hospital = np.array(["bonn", "oslo", "turin"])[np.arange(rows) % 3]
    age, sex = rng.normal(50, 10, rows).round(1), rng.choice(["f", "m"], rows)
    y = (age + 8 * (sex == "f") > 55).astype(int)
    df = {"hospital": hospital, "age": age, "sex": sex, "y": y}
    df |= {"smokes": rng.integers(0, 2, rows), "days": rng.normal(9, 3, rows)}
    x = np.stack([age, sex == "f"], 1).astype(np.float32)
    lines = [f"{a},{b},{c},{d}" for a, b, c, d in zip(hospital, age, sex, y, strict=True)]
    Path("my.csv").write_text("\n".join(["site,age,sex,y", *lines]))
    Path("clinics").mkdir()
    for name in ("a", "b"):
        np.savez(f"clinics/{name}.npz", x=x, outcome=y)
    for number in range(8):
        place = Path("photos", "ab"[number % 2], ("cat", "dog")[number // 4])
        place.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9, 9 + number), 30 * number).save(place / f"{number}.png")
    pairs = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return {
        "x": x,
        "y": y,
        "hospital": hospital,
        "df": df,
        "several": np.stack([y, 1 - y], 1),
        "tokens": rng.integers(1, 9, (rows, 6)),
        "bonn_dataset": pairs,
        "oslo_dataset": pairs,
        "dataset": Tweets(),
    }


@pytest.mark.parametrize("page", ["data.md", "using-the-result.md"])
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every block of Python runs, one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page", **given()}
    if page == "data.md":  # the file of that page has a column more
        lines = Path("my.csv").read_text().splitlines()
        more = ["patient", *map(str, range(len(lines) - 1))]
        Path("my.csv").write_text("\n".join(f"{a},{b}" for a, b in zip(lines, more, strict=True)))
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(found) >= 6
    for number, code in enumerate(found):
        if "Ragged, divide" in code:  # "a pool of your own" is larger
            names |= {"x": torch.randn(3000, 4), "y": torch.arange(3000) % 10}
        exec(compile(code, f"{page}, block {number}", "exec"), names)
        if "Ragged, divide" in code:
            assert names["fed"].num_clients == 30
    assert capsys.readouterr().out


def test_a_table_of_gains_takes_few_lines() -> None:
    """From a CSV file to what every site gains in under ten lines of Python."""
    text = (DOCS / "using-the-result.md").read_text(encoding="utf-8")
    first = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    lines = [line for line in first.splitlines() if line.strip()]
    assert len(lines) < 10
    assert "gain()" in first
