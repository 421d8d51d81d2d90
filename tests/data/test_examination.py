"""Laws of the examination: every fault that is put into a clean table is found, and nothing else.

Distances and chances are checked against SciPy, counts of equal rows against pandas.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sartor.cli import main
from sartor.core.errors import FederationError
from sartor.data.examination import Examination, examine
from sartor.data.shifts import RANK, VARIATION, chance_of_counts, levels_of, shifts, units
from sartor.data.suspicions import copies, suspected_code

datasets = pytest.importorskip("sklearn.datasets")
stats = pytest.importorskip("scipy.stats")
CLIENTS = np.array(["bonn", "lyon", "oslo", "turin"])


def clean(seed: int = 7, name: str = "breast_cancer", columns: int = 8) -> dict[str, Any]:
    """A real table, its rows drawn to four clients."""
    data, rng = getattr(datasets, f"load_{name}")(), np.random.default_rng(seed)
    home = CLIENTS[rng.integers(0, 4, len(data.target))]
    names = [str(one).replace(" ", "_") for one in data.feature_names[:columns]]
    values = dict(zip(names, data.data[:, :columns].T, strict=True))
    return {"clinic": home, **values, "y": data.target}


def look(table: dict[str, Any], **words: Any) -> Examination:
    return examine(table, client="clinic", label="y", **words)


def kinds(found: Examination, state: str | None = None) -> list[tuple[str, tuple[str, ...]]]:
    return [(f.kind, f.columns) for f in found.findings if state in (None, f.state)]


# ---------------------------------------------------------------------- no false alarms


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes"])
@pytest.mark.parametrize("seed", range(40, 46))
def test_a_clean_table_is_clean(name: str, seed: int):
    """Rows drawn at random shift nothing, and a clean table has nothing to fix."""
    found = look(clean(seed, name, 30))
    assert found.healthy
    assert kinds(found) == []
    assert not any(shift.is_flagged for shift in found.shifts)
    assert found.flags() == []


# ---------------------------------------------------------------------- what is put in is found


def faulty(kind: str) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """A table with one fault, what it is called, and the clients."""
    table, rng = clean(), np.random.default_rng(1)
    home, y = table["clinic"], table["y"]
    rows = len(home)
    at = {one: home == one for one in CLIENTS}
    numbers = rng.normal(14, 1.5, rows).round(1)
    glucose = rng.lognormal(np.log(100), 0.25, rows).round(1)
    texts = rng.choice(["no", "yes"], rows).astype(object)
    made: Any = {
        "counter": lambda: ("id", (), np.arange(rows) * 3),
        "numbered": lambda: ("id", (), rng.permutation(rows)),
        "patient_id": lambda: ("id", (), rng.choice(10**6, rows, replace=False)),
        "code": lambda: ("id", (), np.array([f"P{i:05}" for i in rng.permutation(rows)])),
        "renamed": lambda: ("label copy", (), np.where(y == 1, "benign", "malignant")),
        "affine": lambda: ("label copy", (), 7 - 3.5 * y),
        "noisy": lambda: ("label copy", (), y * 100 + rng.normal(0, 20, rows)),
        "filled": lambda: ("label copy", (), np.where(y == 0, "yes", "")),
        "day": lambda: ("dates", (), np.array([f"{i % 28 + 1:02}.03.2023" for i in range(rows)])),
        "number_day": lambda: ("dates", (), 20230301 + rng.integers(0, 28, rows)),
        "glucose": lambda: ("units", ("oslo",), np.where(at["oslo"], glucose / 18.016, glucose)),
        "temperature": lambda: (
            "units",
            ("lyon",),
            np.where(at["lyon"], numbers * 0.9 + 86, (numbers * 0.5 + 30).round(1)),
        ),
        "absent": lambda: ("empty at a client", ("bonn",), np.where(at["bonn"], np.nan, numbers)),
        "stuck": lambda: ("constant", ("turin",), np.where(at["turin"], 14.0, numbers)),
        "sentinel": lambda: ("code", None, np.where(rng.random(rows) < 0.1, 999, numbers)),
        "spelled": lambda: ("spelling", (), np.where(rng.random(rows) < 0.2, "Yes ", texts)),
        "mixed": lambda: (
            "mixed",
            ("turin",),
            np.where(at["turin"], np.where(texts == "yes", "1", "0"), texts),
        ),
        "recoded": lambda: (
            "other codes",
            ("turin",),
            np.where(at["turin"], np.where(texts == "yes", "ja", "nein"), texts),
        ),
        "dose": lambda: ("mixed", (), np.array([f"{i % 30 / 2 + 1} mg" for i in range(rows)])),
        "crp": lambda: ("mixed", None, np.array([f"<{v}" if v < 13 else f"{v}" for v in numbers])),
        "land": lambda: ("client again", (), np.char.upper(home)),
        "same": lambda: ("constant", (), np.ones(rows)),
        "size": lambda: ("of clients", (), (home == "oslo").astype(int)),
        "again": lambda: ("twins", (), table["mean_area"]),
        "income": lambda: ("decimals", (), np.array([f"{v * 1e3:,.1f}" for v in numbers])),
    }[kind]()
    what, clients, column = made
    return {**table, kind: column}, what, clients


FAULTS = [
    "counter",
    "numbered",
    "patient_id",
    "code",
    "renamed",
    "affine",
    "noisy",
    "filled",
    "day",
    "number_day",
    "glucose",
    "temperature",
    "absent",
    "stuck",
    "sentinel",
    "spelled",
    "mixed",
    "recoded",
    "dose",
    "crp",
    "land",
    "same",
    "size",
    "again",
    "income",
]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_and_alone(kind: str):
    """It is named with its column and clients and what to do, and the clean columns stay clean."""
    table, what, clients = faulty(kind)
    found = look(table)
    own = [finding for finding in found.findings if finding.kind == what]
    assert [finding.columns for finding in own] == [(kind,)]
    assert clients is None or own[0].clients == clients
    assert own[0].fix
    others = {finding.kind for finding in found.findings} - {what}
    assert others <= {"empty"}  # of columns with empty cells, which are a fault by themselves
    if own[0].flags == ("--drop", kind) and own[0].state != "note":
        assert dict(zip(found.flags()[::2], found.flags()[1::2], strict=True))["--drop"] == kind
        assert kinds(look(table, drop=[kind])) == []


def test_units_have_their_factor():
    """The factor and the units that it lies between are said."""
    table, _, _ = faulty("glucose")
    (unit,) = [finding for finding in look(table).findings if finding.kind == "units"]
    assert unit.facts["factor"] == pytest.approx(1 / 18.016, rel=0.1)
    assert "glucose in mmol/l and mg/dl" in unit.found
    assert "multiply the values of oslo" in unit.fix


@pytest.mark.parametrize(
    ("deviation", "factor"), [(0.06, 2.54), (0.25, 18.016), (0.25, 38.67), (0.4, 88.4), (0.3, 1000)]
)
def test_units_are_found_in_one_of_many_clients(deviation: float, factor: float):
    """Clients that differ by a few percent are no units; one that is times a factor is."""
    rng = np.random.default_rng(11)
    owner = np.repeat(np.arange(6), 60)
    own = np.exp(rng.normal(0, 0.05, 6))[owner]
    values = rng.lognormal(0, deviation, 360) * own
    assert units("v", values, owner, list("abcdef")) == []
    odd = np.where(owner == 4, values * factor, values)
    (found,) = units("v", odd, owner, list("abcdef"))
    assert found.client == "e"
    assert found.factor == pytest.approx(factor, rel=0.25)
    halves = np.where(values > np.median(values), 0, 1)  # the large ones and the small ones
    assert units("v", values, halves, ["large", "small"]) == []


def test_equal_rows_are_counted_as_pandas_counts_them():
    """Within a client and across clients; columns of few values make equal rows by themselves."""
    pandas = pytest.importorskip("pandas")
    table = clean()
    frame = pandas.DataFrame(table)
    moved = frame.iloc[:7].assign(clinic="oslo")
    joined = pandas.concat([frame, frame.iloc[20:25], moved], ignore_index=True)
    (finding,) = look(joined).findings
    plain = joined.drop(columns="clinic")
    assert finding.facts["within"] == int(joined.duplicated().sum())
    several = joined.groupby(list(plain.columns))["clinic"].transform("nunique") > 1
    assert finding.facts["across"] == int(several.sum())
    assert "oslo" in finding.clients
    assert finding.state == "suspect"
    rng = np.random.default_rng(0)
    coarse = {f"q{i}": ("number", rng.integers(0, 3, 500).astype(float)) for i in range(4)}
    levels = {name: levels_of(*column) for name, column in coarse.items()}
    counted = copies(coarse, levels, rng.integers(0, 3, 500))
    assert counted.within > 100
    assert counted.is_chance


def test_what_the_reader_refuses_is_a_fault():
    """Clients without a name, several kinds of cells, empty labels: all in one list."""
    table = {name: values.astype(object) for name, values in clean().items()}
    table["clinic"][3] = ""
    table["mean_area"][5] = "large"
    table["y"][9] = ""
    found = look(table)
    assert not found.healthy
    faults = [finding for finding in found.findings if finding.state == "fault"]
    assert {finding.columns for finding in faults} == {(), ("mean_area",)}
    words = " ".join(finding.found for finding in faults)
    assert "names no client in 1 rows" in words
    assert "'large' in row 5" in words
    assert "Label 'y' is empty in 1 rows" in words
    with pytest.raises(FederationError, match=r"no column 'home'.*client"):
        examine(table, client="home", label="y")


# ---------------------------------------------------------------------- clients and shifts


def test_what_every_client_has():
    """Samples, classes, the largest class and its share, and empty cells, per client."""
    table = clean()
    table["mean_area"] = np.where(table["clinic"] == "oslo", np.nan, table["mean_area"])
    found = look(table, missing="median+indicator")
    for client in found.clients:
        own = table["y"][table["clinic"] == client.name]
        assert (client.samples, client.classes) == (len(own), 2)
        assert client.majority_share == max(own.mean(), 1 - own.mean())
        assert client.majority == str(int(own.mean() > 0.5))
    assert "suspect: empty at a client (mean_area): no value at oslo" in str(found)
    assert found.empty == {"mean_area": {"bonn": 0, "lyon": 0, "oslo": 1, "turin": 0}}
    assert found.healthy
    regression = look(clean(name="diabetes"), task="regression")
    target, home = clean(name="diabetes")["y"], clean(name="diabetes")["clinic"]
    assert regression.clients[0].median == np.median(target[home == "bonn"])


def test_shifts_are_those_of_scipy():
    """Rank distance and chance of the Mann-Whitney test; total variation and that of χ²."""
    rng = np.random.default_rng(3)
    owner = rng.integers(0, 3, 400)
    x = np.round(rng.normal(0, 1, 400) + 0.8 * (owner == 1), 1)  # with ties
    x[rng.random(400) < 0.1] = np.nan
    kind = rng.choice(["u", "v", "w"], 400, p=[0.5, 0.3, 0.2])
    kind[owner == 2] = rng.choice(["u", "w"], int((owner == 2).sum()))
    columns = {"x": ("number", x), "kind": ("category", kind)}
    levels = {name: levels_of(*column) for name, column in columns.items()}
    found = {(s.column, s.client): s for s in shifts(columns, levels, owner, list("abc"))}
    assert len(found) == 6
    for i, client in enumerate("abc"):
        own, rest = x[(owner == i) & ~np.isnan(x)], x[(owner != i) & ~np.isnan(x)]
        test = stats.mannwhitneyu(own, rest, use_continuity=False, method="asymptotic")
        shift = found["x", client]
        share = test.statistic / len(own) / len(rest)
        assert shift.measure == RANK
        assert shift.distance == pytest.approx(np.sqrt(2) * stats.norm.ppf(share), rel=1e-9)
        assert shift.chance == pytest.approx(min(1, 6 * test.pvalue), rel=1e-6)
        assert (shift.here, shift.elsewhere) == (np.median(own), np.median(rest))
        counts = np.array([[(kind[m] == k).sum() for k in "uvw"] for m in (owner == i, owner != i)])
        shift = found["kind", client]
        shares = counts / counts.sum(1, keepdims=True)
        assert shift.measure == VARIATION
        assert shift.distance == pytest.approx(np.abs(shares[0] - shares[1]).sum() / 2)
        chance = stats.chi2_contingency(counts, correction=False).pvalue
        assert shift.chance == pytest.approx(min(1, 6 * chance), rel=1e-9)
    assert found["x", "b"].is_flagged
    assert found["kind", "c"].is_flagged
    assert not found["x", "a"].is_flagged or abs(found["x", "a"].distance) >= 0.5


def test_rare_levels_count_together():
    """The χ² test holds where levels are rare: chances of drawn tables are hardly ever small."""
    rng = np.random.default_rng(0)
    small = 0
    for _ in range(500):
        levels = rng.integers(0, 30, 200)
        here = rng.random(200) < 0.1
        counts = [np.bincount(levels[m], minlength=30).astype(float) for m in (here, ~here)]
        small += chance_of_counts(*counts) < 0.01
    assert small <= 15  # 5 are expected; more than 15 have a chance below 1 in 1,000


def test_a_code_is_far_from_everything():
    """0 of a count and −1 of a centred column are values; 999 and a lonely 0 are codes."""
    rng = np.random.default_rng(0)
    assert suspected_code(rng.poisson(9, 500).astype(float)) is None
    assert suspected_code(np.round(rng.normal(0, 3, 500))) is None
    assert suspected_code(np.append(rng.normal(240, 50, 500), [0.0] * 30)) == (0, 30)
    assert suspected_code(np.append(rng.normal(5, 2, 500), [-999.0] * 4)) == (-999, 4)


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CSV file with an id, a unit that differs, and empty cells."""
    monkeypatch.chdir(tmp_path)
    table, _, _ = faulty("glucose")
    table["patient, id"] = np.random.default_rng(0).permutation(len(table["y"]))
    table["mean_area"] = np.where(table["clinic"] == "oslo", "", table["mean_area"].astype(str))
    header = ",".join(f'"{name}"' for name in table)
    rows = (",".join(map(str, row)) for row in zip(*table.values(), strict=True))
    Path("my.csv").write_text("\n".join([header, *rows]))
    return "my.csv"


WORDS = ["--client", "clinic", "--label", "y"]


def test_the_command_prints_findings_and_what_to_run(file: str, capsys: pytest.CaptureFixture[str]):
    """It ends with 2 where training would refuse, and the command that it names trains."""
    assert main(["data", file, *WORDS]) == 2
    shown = capsys.readouterr().out
    for words in ("largest class", "Empty cells", "units", "id", "--missing median+indicator"):
        assert words in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("To train on it")]
    command = shlex.split(line.split(": ", 1)[1])
    assert command[:3] == ["sartor", "run", "auto"]
    assert command[-4:] == ["--drop", '"patient, id"', "--missing", "median+indicator"]
    flags = command[command.index("--client") :]
    assert main(["data", file, *flags]) == 0
    shown = capsys.readouterr().out
    assert "427 training" in shown or "training, 0 validation" in shown
    assert "training refuses" not in shown


def test_the_answer_for_a_program_has_everything(file: str, capsys: pytest.CaptureFixture[str]):
    """Findings, shares of empty cells, shifts and flags, as strict JSON."""
    assert main(["data", file, *WORDS, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = answer["examination"]
    assert not answer["healthy"]
    assert {one["kind"] for one in found["findings"]} >= {"units", "id", "empty"}
    assert found["empty"]["mean_area"]["oslo"] == 1
    assert found["flags"] == ["--missing", "median+indicator", "--drop", '"patient, id"']
    assert main(["data", file, *WORDS, "--missing", "mean", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["healthy"]
    assert answer["samples"]["train"] > 400
    assert len(answer["examination"]["shifts"]) == 4 * 10 + 3  # oslo has no mean_area


def test_a_folder_of_clients_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every file is a client; --client on a folder is answered by what a folder is."""
    monkeypatch.chdir(tmp_path)
    Path("clinics").mkdir()
    for name in ("a", "b"):
        rows = [f"{i},{i * 37 % 50 / 10},{i % 2}" for i in range(40)]
        Path(f"clinics/{name}.csv").write_text("\n".join(["nr,v,y", *rows]))
    assert main(["data", "./clinics", "--label", "y", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["examination"]
    assert found["findings"][0]["columns"] == ["nr"]
    assert [client["samples"] for client in found["clients"]] == [40, 40]
    assert main(["data", "./clinics", "--client", "nr", "--label", "y"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "every file (or folder of images) is one client" in error
    assert main(["data", "my.xlsx", *WORDS]) == 2


def test_a_page_shows_the_maps(file: str, capsys: pytest.CaptureFixture[str]):
    """``--page`` writes one file with findings, maps and the command; only of a table."""
    pytest.importorskip("matplotlib")
    assert main(["data", file, *WORDS, "--page", "look.html"]) == 2
    assert "Page  look.html" in capsys.readouterr().out
    page = Path("look.html").read_text(encoding="utf-8")
    for words in ("shift-map", "empty-map", "What to do", "--missing median+indicator", "glucose"):
        assert words in page
    assert "<script src" not in page
    assert main(["data", "digits", "--page", "look.html"]) == 2
    assert "shows an examined table" in capsys.readouterr().err
