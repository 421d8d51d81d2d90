"""Laws of the README: what it shows works as it is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import sartor
from sartor.methods import METHODS

README = Path(__file__).parents[2] / "README.md"


def blocks() -> list[str]:
    """Return the Python code of the README, block by block."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The ten lines of Python run, and their comments are true."""
    names = run(blocks()[0].replace("rounds=20", "rounds=2"))
    assert names["sweep"].accuracy.shape == (3,)
    assert isinstance(names["model"], sartor.models.LeNet5 | sartor.models.DNN | sartor.models.MCLR)
    assert len(names["result"].gain().rows) == 20
    assert capsys.readouterr().out
    code = [line for line in blocks()[0].splitlines() if line.strip()]
    assert len(code) <= 10


def test_the_example_method_is_complete() -> None:
    """The method of the README, under 40 lines, trains; its heads stay private and differ."""
    code = blocks()[1]
    assert len(code.splitlines()) < 40
    federation = sartor.Federation.from_dataset("digits", partition="dirichlet:0.5", clients=4)
    model = sartor.models.dnn(federation, hidden=8)
    result = sartor.fit(run(code)["fedper"], federation, model=model, rounds=2)
    one, two = (result.model(client).state_dict() for client in (0, 1))
    assert (one["fc1.weight"] == two["fc1.weight"]).all()
    assert (one["fc.weight"] != two["fc.weight"]).any()
    body = sum(p.numel() for p in model.fc1.parameters())
    assert result.bytes_up == 2 * 4 * 4 * body  # rounds, clients, bytes of a float32


def test_the_table_names_every_method() -> None:
    """The page of methods has a row for each method, the README its name, and neither any other."""
    page = README.with_name("docs") / "methods.md"
    rows = re.findall(r"^\| `([\w-]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(METHODS)
    text = README.read_text(encoding="utf-8")
    families = text.split("## Methods")[1].split("\nAny of them")[0]
    assert sorted(re.findall(r"`([\w-]+)`", families)) == sorted(METHODS)


def test_the_way_of_a_round_goes_by_files_that_exist() -> None:
    """Every path of the map is a file or a folder, and every folder of the package is named."""
    text = README.read_text(encoding="utf-8").split("## One round, file by file")[1]
    text = text.split("\n## ")[0]
    package = Path(sartor.__file__).parent
    files = re.findall(r"[\w/]+\.py\b", text.replace("NAME", "fedavg"))
    folders = set(re.findall(r"\b([a-z]+)/(?!\w)", text)) - {"sartor"}
    homes = (package, package / "engines")  # the engines are named together
    assert len(files) > 15
    assert [name for name in files if not any((home / name).is_file() for home in homes)] == []
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert rooms - folders - {Path(name).parts[0] for name in files} == set()
    assert folders - rooms == set()
