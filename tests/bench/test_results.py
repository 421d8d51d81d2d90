from __future__ import annotations

import copy
import doctest
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import __main__ as command
from bench import device, floors, page, rates, results
from bench.rates import Rates
from bench.workloads import WORKLOADS
from sartor.core.errors import ConfigError
from tests.report.test_report import Page


def contender(seconds, others=0.0):
    return {
        "seconds": seconds,
        "fastest": 0.5 * seconds,
        "slowest": 2 * seconds,
        "rounds": 6,
        "steps_per_second": 3000 / seconds,
        "memory_mb": 400.0,
        "memory_before_mb": 300.0,
        "gpu_memory_mb": 0.0,
        "accuracy": [0.5, 0.7],
        "first_round": 3.0,
        "parts": {},
        "others": others,
        "torch": "2.13",
    }


def found(name="dnn", sartor=1.0, plain=4.0, others=0.0):
    return {
        "workload": asdict(WORKLOADS[name]),
        "source": "Fashion-MNIST",
        "steps": 3000.0,
        "least": 600,
        "most": 600,
        "work": {"flops": 2e10, "bytes": 1e9, "steps": 3000.0},
        "contenders": {"sartor": contender(sartor, others), "plain": contender(plain)},
        "left_out": {},
    }


def record(commit="abc1234", day=15, run=16, workloads=(), **changes):
    return {
        "kind": "rounds",
        "commit": {"id": commit, "date": f"2026-11-{day}T12:00:00+02:00", "changed": False},
        "date": f"2026-11-{run}T10:00:00+00:00",
        "environment": {"device": "A <fast> CPU", "torch": "2.13"},
        "device": "cpu",
        "rates": asdict(Rates(1e11, 1e10, "A <fast> CPU")),
        "settings": {"rounds": 3, "repeats": 2, "threads": 2, "quick": False},
        "workloads": list(workloads) or [found()],
        **changes,
    }


def test_what_is_written_is_read_again_oldest_commit_first(tmp_path):
    """Commits are in order for any order of the runs; files in a folder get their own names."""
    new, old = record("bbbbbbb", day=15, run=16), record("aaaaaaa", day=13, run=20)
    names = [results.write(r, tmp_path / "kept").name for r in (new, old)]
    assert names[0] == "2026-11-16T100000-rounds-bbbbbbb.json"
    assert len(set(names)) == 2
    assert results.read([tmp_path / "kept"]) == [old, new]
    alone = results.write(new, tmp_path / "one.json")
    assert results.read([alone]) == [new]


def test_a_record_carries_commit_date_and_machine():
    """What is needed to understand a number later."""
    stamp = results.stamp("cpu")
    here = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=results.ROOT, capture_output=True, text=True, check=False
    ).stdout
    commit = stamp["commit"]["id"]
    assert here.startswith(commit) if here else commit == "unknown"
    assert stamp["date"].endswith("+00:00")
    assert stamp["environment"]["device"]
    assert {"torch", "threads"} <= set(stamp["environment"])


def test_without_git_the_commit_is_unknown(monkeypatch):
    """A source archive is measured too."""

    def absent(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(results.subprocess, "run", absent)
    assert results.stamp("cpu")["commit"] == {"id": "unknown", "date": "", "changed": False}


def test_files_from_before_the_commit_was_kept_are_read(tmp_path):
    """They come first, as unknown; what is no record is refused by name."""
    old = {"device": "cpu", "workloads": [{k: v for k, v in found().items() if k != "work"}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    results.write(record(), tmp_path / "new.json")
    first, second = results.read([tmp_path])
    rows = results.history([first, second])
    assert [row["commit"] for row in rows] == ["unknown", "abc1234"]
    assert [row["share of floor"] for row in rows] == [None, pytest.approx(0.2)]
    assert "unknown" in page.render([first, second])
    for text, said in (
        ("[]", "is not the result"),
        ("{", "is not JSON"),
        ("{}", "is not the result"),
    ):
        (tmp_path / "old.json").write_text(text)
        with pytest.raises(ConfigError, match=f"old.json {said}"):
            results.read([tmp_path])
    with pytest.raises(ConfigError, match="No results in"):
        results.read([tmp_path / "nowhere"])


def test_the_ratio_is_that_of_the_plain_loop():
    """Above 1 the contender is faster; without the plain loop there is none."""
    both = found(sartor=1.0, plain=4.0)
    assert results.ratio(both, "sartor") == 4.0
    assert results.ratio(both, "plain") == 1.0
    del both["contenders"]["plain"]
    assert results.ratio(both, "sartor") is None


def test_history_keeps_workloads_apart():
    """Another number of samples is another workload; the share is the floor over the seconds."""
    quick = found(sartor=2.0)
    quick["workload"]["samples"] = 6_000
    rows = results.history(
        [
            record("aaaaaaa", workloads=[found(sartor=2.0), quick]),
            record("bbbbbbb", workloads=[found(sartor=1.0, others=1.2)]),
        ]
    )
    assert [(row["workload"], row["commit"], row["× plain loop"]) for row in rows] == [
        ("dnn", "aaaaaaa", 2.0),
        ("dnn", "bbbbbbb", 4.0),
        ("dnn, samples 6,000", "aaaaaaa", 2.0),
    ]
    # 2e10 operations at 1e11 a second take 0.2 s; 1e9 bytes at 1e10 take 0.1 s.
    assert [row["share of floor"] for row in rows] == pytest.approx([0.1, 0.2, 0.1])
    assert [row["note"] for row in rows] == ["", "busy", ""]
    assert {row["machine"] for row in rows} == {"A <fast> CPU, 2 threads"}


def test_a_row_of_the_device_has_its_floor_and_its_place_in_the_history():
    """The work becomes seconds; a row without work stays as it is."""
    row = {"what": "lenet", "seconds a round": 0.5, "work": floors.Work(2e10, 1e9, 10)}
    reported = device.beside_floor(row, Rates(1e11, 1e10))
    assert reported["floor by arithmetic"] == pytest.approx(0.2)
    assert reported["floor by memory"] == pytest.approx(0.1)
    assert reported["share of the floor"] == pytest.approx(0.4)
    assert "work" in row
    assert device.beside_floor({"what": "sweep"}, Rates(1.0, 1.0)) == {"what": "sweep"}
    kept = record(kind="device", rows=[reported, {"what": "sweep", "ratio": 3.0}], others=1.0)
    (line,) = results.history([kept])
    assert (line["workload"], line["share of floor"]) == ("device: lenet", pytest.approx(0.4))
    assert line["note"] == "busy"


@pytest.fixture(scope="module")
def plain_page():
    return page.render([record(workloads=[found(sartor=1.0, plain=4.0)])])


def test_the_page_has_every_number_of_the_run(plain_page):
    """Seconds, range, ratio, steps, floor, share, memory, accuracy, commit and machine."""
    html = plain_page
    row = html[html.index("Sartor</th>") :].split("</tr>")[0]
    cells = ["0.5 to 2", "4.00", "3,000", "0.2", "20.0", "400", "60.0"]
    assert [cell for cell in cells if f">{cell}<" not in row] == []
    assert "Sartor is 4.0 times as fast as a plain PyTorch loop (dnn)." in html
    assert "commit abc1234" in html
    assert "2026-11-16 10:00 UTC" in html
    assert "A &lt;fast&gt; CPU" in html
    assert "<fast>" not in html
    assert "20 GFLOP take 0.2 s, 1 GB take 0.1 s" in html
    assert "of A &lt;fast&gt; CPU, in the same run" in html
    assert "Before you rely on this" not in html


def test_the_bars_are_the_ratios():
    """A bar a contender, as long as its ratio, and the ends of its range."""
    figure = page.figures.ratio_figure(record(workloads=[found(sartor=1.0, plain=4.0)]))
    (axes,) = figure.canvas.axes
    assert [bar.get_width() for bar in axes.patches[:2]] == [4.0, 1.0]
    assert [list(line.get_xdata()) for line in axes.lines[:2]] == [[2.0, 8.0], [0.5, 2.0]]
    assert "dnn, Sartor: 4.00; dnn, plain PyTorch loop: 1.00" in figure.alt


def test_the_page_says_when_not_to_trust_it():
    """A busy machine, low rates, a quick form, changed files, and who was left out."""
    noisy = record(workloads=[{**found(others=1.5), "left_out": {"fluke": "no network"}}])
    noisy["rates"]["others"] = 0.7
    noisy["settings"]["quick"] = True
    noisy["commit"]["changed"] = True
    html = page.render([noisy])
    for words in (
        "kept up to 1.5 processors busy",
        "kept 0.7 processors busy",
        "quick form",
        "differed from the commit",
        "dnn: fluke-fl was left out: no network.",
        "commit abc1234+",
    ):
        assert words in html


def test_a_page_without_the_plain_loop_or_a_floor_says_less():
    """No ratio, no figure of ratios, no share."""
    bare = found()
    del bare["contenders"]["plain"], bare["work"]
    html = page.render([record(workloads=[bare])])
    assert "no ratio to a plain loop" in html
    assert 'id="ratio-bars"' not in html
    assert "Share of the floor" not in html


def test_a_page_of_several_runs_shows_the_newest_and_how_it_got_there():
    """The latest run on top, though of an old commit; points in the order of the commits."""
    runs = [
        record("aaaaaaa", day=13, run=16, workloads=[found(sartor=4.0)]),
        record("bbbbbbb", day=14, run=20, workloads=[found(sartor=2.0)]),
        record("ccccccc", day=15, run=17, workloads=[found(sartor=1.0)]),
    ]
    figure = page.figures.history_figure(results.history(runs))
    (axes,) = figure.canvas.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, 2.0, 4.0]]
    labels = [tick.get_text() for tick in axes.get_xticklabels()]
    assert labels == ["aaaaaaa", "bbbbbbb", "ccccccc"]
    html = page.render(runs)
    assert "Sartor is 2.0 times" in html
    assert "commit bbbbbbb" in html
    assert 'id="ratio-history"' in html
    other = copy.deepcopy(runs[1])
    other["environment"]["device"] = "another"
    mixed = page.figures.history_figure(results.history([runs[0], other, runs[2]]))
    assert sorted(len(line.get_ydata()) for line in mixed.canvas.axes[0].lines) == [1, 2]
    assert page.figures.history_figure(results.history(runs[:1])) is None


def test_all_kinds_of_records_share_a_page():
    """Each has a section. The page loads nothing, and its tags and names are in order."""
    methods = [
        {
            "method": name,
            "ms a round": 200.0 * times,
            "times FedAvg": times,
            "gradients": 1.0,
            "published": None,
            "KiB a client": 60.0,
        }
        for name, times in (("fedavg", 1.0), ("pfedme", 4.25))
    ]
    growth = [
        {"what": "data", "value": n, "seconds": 0.01 * n, "fastest": 0.01, "slowest": 9.0}
        for n in (10, 1000)
    ]
    lanes = {"what": "lanes", "network in": "float32", "seconds a round": 0.125}
    html = page.render(
        [
            record(kind="methods", title="lenet5", rows=methods),
            record(kind="scaling", meaning={"data": "samples of a client"}, rows=growth),
            record(kind="device", rows=[lanes], others=1.25),
            record("aaaaaaa", day=13),
            record("bbbbbbb", day=14),
        ]
    )
    for part in ('id="methods"', "4.25", 'id="growth"', "samples of a client", "10000", "0.125"):
        assert part in html
    assert html.count("other processes kept 1.2 processors busy on average") == 1
    reported = Page(html)
    assert reported.faults == []
    assert len(reported.ids) == len(set(reported.ids))
    assert {"script", "link", "iframe", "img"} & set(reported.tags) == set()
    assert [link for link in reported.links if not link.startswith("#")] == []
    assert "No method was measured." in page.render([record(kind="methods", title="", rows=[])])


def test_history_by_the_command_line(tmp_path, monkeypatch, capsys):
    """Nothing is measured; the table is printed and the page written; faults are words."""
    monkeypatch.setattr(command, "measure", lambda *args: pytest.fail("it measured"))
    results.write(record("aaaaaaa", day=13), tmp_path / "runs")
    results.write(record("bbbbbbb", day=14), tmp_path / "runs")
    target = tmp_path / "new" / "page.html"
    words = ["bench", "--history", str(tmp_path / "runs"), "--html", str(target)]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 0
    reported = capsys.readouterr().out
    assert reported.index("aaaaaaa") < reported.index("bbbbbbb")
    assert str(target) in reported
    assert "Sartor is 4.0 times" in target.read_text()
    monkeypatch.setattr(sys, "argv", ["bench", "--history", str(tmp_path / "none")])
    assert command.main() == 1
    assert "No results in" in capsys.readouterr().out


def test_a_measurement_is_printed_kept_and_shown(tmp_path, monkeypatch, capsys):
    """Every contender's report goes into the summary, the file and the page."""

    def call(python, module, *args, threads):
        if module == "bench.rates":
            return asdict(Rates(1e11, 1e10, "A CPU"))
        if module == "bench.prepare":
            given = found()
            return {key: given[key] for key in ("source", "steps", "least", "most", "work")}
        if args[0] == "reference":
            raise command.Failed("it fell over")
        seconds = 0.5 if args[0] == "sartor" else 2.0
        report = SimpleNamespace(**contender(seconds))
        return {
            "seconds": [9.0, seconds, seconds],
            "accuracy": [0.1, 0.2, 0.6],
            "memory_mb": report.memory_mb,
            "memory_before_mb": 1.0,
            "parts": {},
            "others": 0.0,
            "torch": "2.13",
        }

    monkeypatch.setattr(command, "call", call)
    words = ["bench", "--workload", "dnn", "--rounds", "2"]
    words += ["--contenders", "sartor", "reference", "plain"]
    words += ["--json", str(tmp_path / "runs"), "--html", str(tmp_path / "page.html")]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 0
    reported = capsys.readouterr().out
    assert "floor: 0.2000 by arithmetic, 0.1000 by memory" in reported
    (kept,) = results.read([tmp_path / "runs"])
    (workload,) = kept["workloads"]
    assert results.ratio(workload, "sartor") == 4.0
    assert workload["left_out"] == {"reference": "it fell over"}
    assert workload["contenders"]["sartor"]["rounds"] == 4
    assert kept["settings"]["threads"] >= 1
    html = (tmp_path / "page.html").read_text()
    assert "Sartor is 4.0 times" in html
    assert "it fell over" in html


def test_outputs_are_written_only_where_asked(tmp_path, capsys):
    """No option, no file."""
    made = results.write_outputs(Namespace(json=None, html=None), "methods", rows=[], title="")
    assert made["kind"] == "methods"
    assert made["others"] >= 0
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [results, rates])
def test_examples_in_docstrings(module):
    """They run."""
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed


def test_the_folder_of_the_benchmarks_stays_out_of_the_repository(tmp_path, monkeypatch):
    """Whatever is written below it first."""
    monkeypatch.setattr(results, "CACHE", tmp_path / ".bench")
    results.write(record(), tmp_path / ".bench" / "history")
    assert (tmp_path / ".bench" / ".gitignore").read_text() == "*\n"
    results.write(record(), tmp_path / "elsewhere")
    assert not (Path(tmp_path) / "elsewhere" / ".gitignore").exists()
