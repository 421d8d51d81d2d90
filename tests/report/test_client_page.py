"""The page of a client: plain, true to the tables, safe with any name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from scipy.stats import t as student
from sklearn.metrics import brier_score_loss, confusion_matrix, roc_auc_score
from typer.testing import CliRunner

import sartor
from sartor.cli.app import app
from sartor.core.errors import ConfigError
from sartor.report import client_words, write_client, write_report
from sartor.report.client_page import Clients, file_names
from sartor.report.gains import Gains, gains_of, interval
from sartor.results.comparison import Comparison
from sartor.results.gains import ClientGain
from sartor.results.headline import RMSE
from sartor.runs import ComparisonFolder
from tests.report.test_report import NAUGHTY, Page
from tests.synthetic_results import make_comparison, make_result

WARDS = ("north", "south", "ward 3/<b>")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three wards with a label of two classes and a column with missing values."""
    rng = np.random.default_rng(3)
    rows = 240
    ward = np.repeat(WARDS, rows // 3)
    x = rng.normal(size=(rows, 3))
    label = (x[:, 0] + rng.normal(0, 0.7, rows) > 0.3).astype(int)
    frame = pandas.DataFrame({"ward": ward, "a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "ill": label})
    lost = rng.random(rows) < np.where(ward == "south", 0.5, 0.1)
    frame.loc[lost, "b"] = np.nan
    path = tmp_path_factory.mktemp("data") / "wards.csv"
    frame.to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def folder(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a command that trained on it."""
    out = tmp_path_factory.mktemp("runs") / "wards"
    words = ["run", "fedavg", "--data", str(table), "--client", "ward", "--label", "ill"]
    words += ["--missing", "indicator", "--measure", "auroc", "--rounds", "3", "--seeds", "3"]
    done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out


def page_of(folder: Path, name: str) -> Page:
    return Page((folder / "clients" / name).read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- files and names


def test_names_become_files_that_are_safe_and_different() -> None:
    """No separators, no markup; equal but for capitals or odd signs, they still differ."""
    names = [*NAUGHTY, "oslo", "Oslo", "../oslo", "oslo-2", "", "医院", "病院"]
    files = file_names(names)
    assert list(files) == names
    assert len({file.lower() for file in files.values()}) == len(names)
    assert all(re.fullmatch(r"[\w.-]+\.html", file, re.ASCII) for file in files.values())
    assert not any(file.startswith(".") for file in files.values())


def test_every_client_has_a_page_and_the_report_leads_to_it(folder: Path) -> None:
    """The links of the report are files; each leads back; nothing is loaded or run."""
    report = Page((folder / "report.html").read_text(encoding="utf-8"))
    links = {link for link in report.links if not link.startswith(("#", "data:"))}
    assert len(links) == len(WARDS)
    for link in links:
        text = (folder / link).read_text(encoding="utf-8")
        page = Page(text)
        assert (page.faults, page.open) == ([], [])
        assert len(page.ids) == len(set(page.ids))
        assert {one for one in page.links if not one.startswith("#")} == {"../report.html"}
        assert {one[1:] for one in page.links if one.startswith("#")} <= set(page.ids)
        assert not {"script", "link", "iframe", "img", "b"} & set(page.tags)
        assert "http" not in text
    assert "ward 3/<b>" in page_of(folder, "ward_3_b.html").text


def test_one_page_is_written_on_demand(folder: Path, tmp_path: Path) -> None:
    """The command prints where it is; a name that is not there gets a hint."""
    done = CliRunner().invoke(
        app, ["report", str(folder), "--client", "north", "--out", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["client"] == str(tmp_path / "clients" / "north.html")
    assert [path.name for path in tmp_path.rglob("*")] == ["clients", "north.html"]
    with pytest.raises(ConfigError, match="did you mean 'north'"):
        write_client(folder, "nort")


def test_a_folder_that_is_used_again_keeps_no_page_of_another_client(tmp_path: Path) -> None:
    """Overwriting removes the pages of clients that are gone, and nothing else."""
    first = ComparisonFolder.create(tmp_path / "run", {})
    first.write_comparison(make_comparison(clients=3, rounds=2))
    write_report(tmp_path / "run")
    (tmp_path / "run" / "clients" / "mine.txt").write_text("kept")
    assert (tmp_path / "run" / "clients" / "client-02.html").exists()
    second = ComparisonFolder.create(tmp_path / "run", {}, overwrite=True)
    second.write_comparison(make_comparison(clients=2, rounds=2))
    write_report(tmp_path / "run")
    left = sorted(path.name for path in (tmp_path / "run" / "clients").iterdir())
    assert left == ["client-00.html", "client-01.html", "mine.txt"]


@pytest.mark.parametrize("name", NAUGHTY)
def test_a_name_cannot_become_markup(name: str) -> None:
    """Title, headline, code: the name is text wherever it stands."""
    names = (name, "b")
    results = {m: make_result(m, clients=2, names=names) for m in ("local", "fedapa")}
    page = Page(
        Clients(Comparison(results), {"data": {name: {"classes": {name: 1, "x": 2}}}}).render(name)
    )
    assert page.faults == []
    assert not {"script", "b", "i", "img"} & set(page.tags)
    assert name in page.text


# ---------------------------------------------------------------------- what it says


def test_the_page_has_the_numbers_of_the_terminal(folder: Path) -> None:
    """Alone, together, gain and interval are those that the command prints; and the report's."""
    result = sartor.load(folder)
    gain = result.gain()
    report = Page((folder / "report.html").read_text(encoding="utf-8")).text
    for texts, row in zip(gain.text_rows(), gain.rows, strict=True):
        shown = dict(zip(gain.columns, texts, strict=True))
        assert " ".join(texts[1:]).replace("-", "−") in report
        page = page_of(folder, file_names([row[0]])[row[0]]).text
        for part in ("alone", "federated", "gain"):
            assert shown[part].replace("-", "−") in page
        ends = f"{shown['low']} to {shown['high']}".replace("-", "−")
        assert f"95 % interval of {ends} over 3 divisions" in page
    assert gain.notes["interval of the mean gain"].replace("-", "−") in report
    assert "worse than alone" not in report
    assert "Training alone is missing" not in report


def test_the_measures_are_those_of_scikit_learn(folder: Path, table: Path) -> None:
    """AUROC, Brier score and confusion matrix of the three divisions, worked out anew."""
    result, facts = sartor.load(folder), json.loads((folder / "clients.json").read_text())
    found: dict[str, list[Any]] = {"AUROC": [], "Brier": [], "matrix": []}
    for run in range(3):
        federation = sartor.Federation.from_file(
            table, client="ward", label="ill", missing="indicator", seed=run
        )
        rows = federation.test.of(federation.index("south"))
        with torch.no_grad():
            scores = result.model("south", run)(federation.x[rows]).double()
        chance = torch.softmax(scores, -1)[:, 1].numpy()
        y = federation.y[rows].numpy()
        found["AUROC"].append(roc_auc_score(y, chance))
        found["Brier"].append(brier_score_loss(y, chance))
        found["matrix"].append(confusion_matrix(y, chance > 0.5, labels=[0, 1]))
    mine = facts["answers"]["fedavg"]["south"]
    for name in ("AUROC", "Brier"):
        assert mine["measures"][name] == pytest.approx(np.mean(found[name]), abs=1e-6)
    assert np.allclose(mine["confusion"], np.mean(found["matrix"], axis=0))
    assert sum(number for *_, number in mine["calibration"]) == 3 * len(rows)
    page = page_of(folder, "south.html").text
    assert f"{np.mean(found['AUROC']):.3f}" in page
    assert f"{np.mean(found['Brier']):.3f}" in page


def test_the_data_of_a_client_are_counted(folder: Path, table: Path) -> None:
    """Samples, classes and missing values are those of the file; no sample is in the facts."""
    frame = pandas.read_csv(table)
    own = frame[frame.ward == "south"]
    known = json.loads((folder / "clients.json").read_text())["data"]["south"]
    assert sum(known["samples"].values()) == len(own)
    assert list(known["classes"].values()) == own.ill.value_counts().sort_index().tolist()
    assert known["missing"] == {"b": pytest.approx(own.b.isna().mean())}
    page = page_of(folder, "south.html").text
    assert f"b {100 * own.b.isna().mean():.1f} {100 * frame.b.isna().mean():.1f}" in page


def test_what_leaves_the_house_is_counted(folder: Path) -> None:
    """The bytes of a round are those of the ledger; what is not protected is said."""
    ledger = pandas.read_csv(folder / "ledger.csv")
    first = ledger[ledger.run == 0]
    up = first.bytes_up.sum() / first.participants.sum()
    page = page_of(folder, "north.html").text
    assert f"{client_words.size(up)} out" in page
    for part in ("What do you send? Every round: model.", "docs/deploy.md", "rehearsal"):
        assert part in page


def made(gain: float, half: float, samples: float = 50.0) -> ClientGain:
    return ClientGain("a", samples, 0.8, 0.8 + gain, gain, gain - half, gain + half, 0.6)


def gains_over(runs: int) -> Gains:
    """Gains over some divisions of the same samples."""
    results = {}
    for name in ("local", "fedapa"):
        result = make_result(name, clients=2, seeds=tuple(range(runs)), rounds=2)
        result.config["data"] = {"samples": {"train": 60, "val": 0, "test": 20}}
        results[name] = result
    return gains_of(Comparison(results))["fedapa"]


@pytest.mark.parametrize("spread", [0.02, 0.03, 0.035])
def test_the_divisions_that_would_decide_are_the_first_that_do(spread: float) -> None:
    """At the number that is named the interval leaves zero out, and at one less it does not."""
    gains, gain = gains_over(3), 0.05
    share = 20 / 60

    def half(runs: int) -> float:
        return student.ppf(0.975, runs - 1) * math.sqrt((1 / runs + share) * spread**2)

    assert half(3) > gain
    said = client_words.what_would_decide(gains, made(gain, half(3)))
    named = re.search(r"--seeds (\d+)", said)
    assert named
    number = int(named[1])
    assert half(number) < gain <= half(number - 1)


def test_the_samples_that_would_decide_follow_from_the_interval() -> None:
    """Where more divisions cannot, the square of interval over gain is named."""
    said = client_words.what_would_decide(gains_over(10), made(0.02, 0.05))
    assert "About 6 times as many samples" in said  # (0.05 / 0.02)² = 6.25
    assert "310 test samples instead of 50" in said
    one = client_words.what_would_decide(gains_over(1), made(0.02, 0.05))
    assert "--seeds 10" in one
    level = client_words.what_would_decide(gains_over(10), made(0.0001, 0.012))
    assert "at most 1.2 points either way" in level
    assert "no realistic amount" in level
    assert "Do not decide" not in level
    unknown = client_words.what_would_decide(gains_over(1), made(0.02, math.nan))
    assert "--seeds 10" in unknown


@pytest.mark.parametrize(
    ("one", "headline", "advice"),
    [
        (made(0.05, 0.02), "a gains by training together", "Take part"),
        (made(-0.05, 0.02), "a loses by training together", "--do-no-harm"),
        (made(0.01, 0.02), "These data cannot tell whether a gains", "Do not decide"),
    ],
)
def test_the_verdict_decides_what_is_advised(one: ClientGain, headline: str, advice: str) -> None:
    """Sentence, samples and next steps follow from the interval."""
    names = ("a", "b")
    results = {m: make_result(m, clients=2, names=names, rounds=2) for m in ("local", "fedapa")}
    clients = Clients(Comparison(results))
    clients.gains["fedapa"].clients[0] = one
    page = Page(clients.render("a")).text
    assert headline in page
    assert advice in page
    assert f"{abs(one.gain * 50):.1f} samples" in page
    assert "60.0 % of the training samples" in page  # the largest class beside the accuracy


def test_without_training_alone_the_page_says_so() -> None:
    """No gain is claimed, and the way to one is named."""
    page = Page(
        Clients(Comparison({"fedapa": make_result("fedapa", clients=2)})).render("client-00")
    )
    assert "what it reaches alone was not measured" in page.text
    assert "sartor compare" in page.text
    assert not re.search(r"\bnan\b", page.text, flags=re.IGNORECASE)


def test_intervals_have_one_number_of_decimals() -> None:
    """The ends of an interval of errors are written alike."""
    metric = make_comparison().headline_metric
    assert interval(metric, -0.0071, 0.056) == "−0.7 to +5.6"
    assert interval(RMSE, -0.00978, 0.0534) == "−0.0098 to +0.0534"
    assert interval(RMSE, math.nan, math.nan) == ""
