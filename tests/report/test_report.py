from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from sartor import Local, fit
from sartor.core.errors import RunFolderError
from sartor.methods import METHODS
from sartor.report import write_report
from sartor.report.figures import draw_all, looks
from sartor.report.heat import mixing_matrix
from sartor.report.page import render, targets
from sartor.report.page_tables import client_table, ledger_table
from sartor.report.words import summarise
from sartor.results.comparison import Comparison
from sartor.results.result import Result
from sartor.runs import ComparisonFolder, RunFolder
from tests.synthetic_results import make_comparison, make_result
from tests.toys import Net, federation

VOID = {"meta", "br", "hr", "img", "link", "input"}
NAUGHTY = ("<script>alert(1)</script>", "a&b", '"><img src=x onerror=alert(1)>', "$x_1$ & ${y")


class Page(HTMLParser):
    """Reads a page: tags, ids, links, texts; and checks that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.faults: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.attributes.append((name, value or ""))
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "data", "poster"):
                self.links.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def text():
    return render(make_comparison())


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_is_whole_html_with_every_section_and_figure(page):
    """Tags close in order, ids are unique, every section and all five figures are there."""
    assert page.faults == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    sections = {"summary", "methods", "figures", "clients", "ledger", "settings", "environment"}
    figures = {"accuracy-by-round", "gain-by-client", "bytes-against-accuracy", "mixing-matrix"}
    assert sections | figures | {"label-map", "fairness", "to-reach"} <= set(page.ids)
    # Five figures, and three of them once more for a phone; panels side by side scroll there.
    assert page.attributes.count(("class", "figure")) == 8


def test_the_page_loads_nothing_and_runs_nothing(text, page):
    """No script, no style sheet, no picture, no font from elsewhere; links stay on the page."""
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.findall(r"https?://", text)
    assert "@import" not in text
    assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", text))


def test_every_inner_link_has_its_target(text, page):
    """Navigation, clip paths, labels: every target exists."""
    wanted = {link[1:] for link in page.links if link.startswith("#")}
    wanted |= set(re.findall(r"url\(#([^)]*)\)", text))
    wanted |= {v for name, v in page.attributes if name in ("aria-labelledby", "aria-describedby")}
    assert wanted <= set(page.ids)


def test_every_figure_has_a_description_for_screen_readers(page):
    """An svg is an image with a label, and the label is a sentence with numbers."""
    labels = [value for name, value in page.attributes if name == "aria-labelledby"]
    for figure in draw_all(make_comparison()):
        assert f"{figure.key}-alt" in labels
        assert len(figure.alt) > 40
        assert figure.alt in page.text
        assert figure.caption in page.text


def test_figures_take_their_colours_from_the_page(text):
    """No fixed black or white and no placeholder is left, so dark mode cannot hide any text."""
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"#0[0-9a]0[0-9]0[0-9]", pictures)
    fixed = set(re.findall(r"(?:fill|stroke): ?(#[0-9a-f]{3,6})", pictures))
    assert fixed <= {"#ffffff"}  # clip paths
    assert "var(--ink)" in pictures
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    light, dark = re.search(r":root \{(.*?)\}.*?:root \{(.*?)\}", text, flags=re.DOTALL).groups()
    assert all(f"{name}:" in light and f"{name}:" in dark for name in used)


@pytest.mark.parametrize("clients", [4, 60])
def test_names_of_clients_and_methods_cannot_become_markup(clients, tmp_path):
    """Whatever a client is called appears as text, in tables and in figures."""
    names = NAUGHTY + tuple(f"c{i}" for i in range(clients - 4))
    evil = '<b onclick="x()">m</b>'
    comparison = Comparison(
        {
            "local": make_result("local", clients=clients, names=names),
            evil: make_result("fedapa", clients=clients, names=names),
        },
        config={"<i>key</i>": "</style><script>x</script>"},
    )
    page = Page(write_report(comparison, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.faults == []
    assert not {"script", "b", "i", "img"} & set(page.tags)
    for name in (*NAUGHTY, evil):
        assert name in page.text


def test_the_summary_names_the_best_the_verdicts_and_the_cost():
    """The words agree with the tables."""
    comparison = make_comparison(seeds=(0, 1, 2, 3, 4, 5))
    words = summarise(comparison)
    table = comparison.table()
    best = table.rows[int(np.argmax([cell.mean for cell in table.column("accuracy")]))]
    assert words.headline.startswith(f"{best[0]} is the most accurate of 4")
    assert f"{100 * best[1].mean:.1f} %" in words.headline
    said = " ".join(words.findings)
    assert f"{best[4].mean:,.1f} MB" in said
    gain = comparison[best[0]].gain(comparison["local"])
    counts = [gain.column("verdict").count(word) for word in ("gains", "loses", "cannot tell")]
    values = [value for _, value, _ in words.tiles]
    assert " · ".join(map(str, counts)) in values
    assert f"{100 * gain.notes['mean gain']:+.1f}" in values
    assert gain.notes["interval of the mean gain"].partition(" (")[0].replace("-", "−") in said


def test_one_allocation_is_never_presented_as_certain():
    """There is a caveat with one seed, another with three, and none with five."""
    assert "One allocation" in " ".join(summarise(make_comparison()).caveats)
    assert "3 allocations" in " ".join(summarise(make_comparison(seeds=(0, 1, 2))).caveats)
    assert "allocation" not in " ".join(summarise(make_comparison(seeds=(0, 1, 2, 3, 4))).caveats)


def test_methods_that_the_runs_do_not_tell_apart_are_said_to_be_so():
    """Two equal methods: the second is named, and no difference is claimed."""
    first, second = make_result("fedapa"), make_result("fedapa")
    words = summarise(Comparison({"local": make_result("local"), "a": first, "b": second}))
    assert words.headline.startswith("a and b cannot be told apart, of 3 methods: they get")
    assert not any("follows at" in text for text in words.findings)


def test_when_training_alone_is_best_the_page_says_so():
    """No federated method is praised for being second."""
    comparison = Comparison({"local": make_result("local"), "fedavg": make_result("fedavg")})
    words = summarise(comparison)
    assert words.headline.startswith("Training alone wins")
    assert any(finding.startswith("With fedavg, ") for finding in words.findings)


def test_a_mixture_of_points_is_pointed_out():
    """A caveat says that one method is evaluated pre and another post."""
    assert any("after aggregation" in caveat for caveat in summarise(make_comparison()).caveats)


def test_a_diverged_method_is_reported_and_not_drawn_as_zero():
    """It is named with round and client; nothing on the page reads NaN."""
    lost = make_result("fedprox", diverged={"round": 3, "client": "client-07"})
    comparison = Comparison({"local": make_result("local"), "fedprox": lost})
    text = render(comparison)
    page = Page(text)
    assert "fedprox diverged in 1 of 1 runs, first in round 3 at client-07" in page.text
    assert not re.search(r"\bnan\b", page.text, flags=re.IGNORECASE)
    everything = Comparison({"fedprox": lost})
    assert "all of them diverged" in Page(render(everything)).text


def test_a_single_result_is_reported_alone_or_beside_its_baseline():
    """Without one the page says what is missing; with one it shows the gain."""
    result = make_result("fedapa")
    page = Page(render(result))
    assert "gain-by-client" not in page.ids
    assert "compare with local" in page.text
    result.attach_baseline(make_result("local"))
    assert "gain-by-client" in Page(render(result)).ids


def test_settings_of_a_sweep_are_drawn_apart_and_the_choice_is_cautioned():
    """Each has its own line, colour and panel; a caveat warns of choosing on test data."""
    sweep = make_result("fedprox", seeds=(0, 1), hyper=[{"l": 0.1}, {"l": 0.5}])
    local = make_result("local", seeds=(0, 1))
    page = Page(render(Comparison({"local": local, "fedprox": sweep})))
    assert "fedprox l=0.1" in page.text
    assert "fedprox l=0.5 post" in page.text
    assert "flattered by the choice" in page.text


def test_every_client_has_a_row_under_every_method():
    """The table of clients: one row each, both points of each method."""
    comparison = make_comparison()
    table = client_table(comparison)
    assert len(table) == 20
    assert table.columns[4:6] == ["local pre", "local post"]
    shown = dict(zip(table.columns, table.rows[3], strict=True))
    assert shown["fedapa post"] == comparison["fedapa"].client_accuracy(run=0)[3]
    assert len(client_table(make_comparison(seeds=(0, 1)))) == 40


def test_the_ledger_on_the_page_is_the_ledger_of_the_result():
    """Bytes per client and round: LeNet-5 without its head, both ways, as in the sheet."""
    table = ledger_table(make_comparison())
    row = dict(zip(table.columns, table.rows[3], strict=True))
    assert row["KiB per client and round"] == pytest.approx(477.8, abs=0.05)
    assert row["MB down"] == pytest.approx(make_result("fedapa").bytes_down / 1e6)
    assert row["ms evaluate"] == pytest.approx(20)


def test_a_method_keeps_its_colour_and_the_reference_is_the_quiet_one():
    """Colour 1 is used for the reference only, at any position."""
    results = dict(make_comparison())
    found = looks(Comparison({name: results[name] for name in ("fedapa", "local", "fedavg")}))
    numbers = {name: number for name, (number, _) in found.items()}
    assert numbers["local"] == 1
    assert numbers["fedapa"] != numbers["fedavg"]
    assert 1 not in (numbers["fedapa"], numbers["fedavg"])


def test_ten_methods_have_ten_looks_in_figures_and_tables(tmp_path):
    """Where colours repeat, the marker differs; a row carries the mark of its curve."""
    names = ["local", *(f"method {number}" for number in range(9))]
    comparison = Comparison({name: make_result(name) for name in names})
    found = looks(comparison)
    assert len(set(found.values())) == 10
    text = render(comparison)
    marks = re.findall(r'class="mark (series-\d)".*?<path d="([^"]*)"', text, flags=re.DOTALL)
    assert len(set(marks)) == 10
    curves = [
        line for line in draw_all(comparison)[0].canvas.axes[0].lines if line.get_marker() != "None"
    ]
    assert len({(line.get_color(), line.get_marker()) for line in curves}) == 10


def test_the_page_shows_fairness_and_what_targets_cost(text, page):
    """Both tables are those of the comparison; the first target is where training alone ends."""
    comparison = make_comparison()
    fair = comparison.fairness()
    assert f"{fair.column('Gini')[3]:.4f}" in page.text
    alone = round(comparison["local"].accuracy, 3)
    assert next(iter(targets(comparison))) == alone
    assert f"target: {100 * alone:.1f} % (where local ends)" in page.text
    rounds = comparison.to_reach(alone).column("rounds")[3]
    row = re.search(r"What a target costs.*?fedapa</th>(.*?)</tr>", text, flags=re.DOTALL)
    assert row
    assert f">{rounds:.0f}</td>" in row[1]
    short = make_comparison(rounds=4)
    first, *others = targets(short)
    assert any(short.to_reach(first).column("rounds"))
    assert not any(short.to_reach(others[-1]).column("rounds"))
    lost = make_result("fedprox", diverged={"round": 3, "client": "client-07"})
    assert targets(Comparison({"fedprox": lost})) == {}


def test_the_mixing_matrix_is_drawn_over_rounds():
    """First, middle and last of what was recorded, each under its round."""
    result = make_result("fedapa")
    matrix = result.snapshots[0]["mix"]
    result.snapshots = [{"round": t, "mix": matrix * (t + 1) / 10} for t in range(9)]
    (figure,) = [f for f in draw_all(Comparison({"fedapa": result})) if f.key == "mixing-matrix"]
    assert [axes.get_title(loc="left") for axes in figure.canvas.axes] == [
        "round 0",
        "round 4",
        "round 8",
    ]
    colours = [np.asarray(axes.collections[0].get_facecolor()) for axes in figure.canvas.axes]
    strongest = [each[:, 3].max() for each in colours]
    assert strongest == pytest.approx([(1 / 9) ** 0.5, (5 / 9) ** 0.5, 1])
    assert "rounds 0, 4, 8" in figure.caption


def test_many_clients_make_a_page_of_bounded_size():
    """A thousand clients: rows are capped with a note, and large matrices are images."""
    comparison = Comparison(
        {m: make_result(m, clients=1000, rounds=3, seeds=(0, 1, 2)) for m in ("local", "fedapa")}
    )
    text = render(comparison)
    assert len(text) < 4_000_000
    assert "the first 2000 of 3000 rows" in text


def test_odd_shapes_are_reported_all_the_same():
    """One client, one round, no labels, no snapshots, a client without test samples."""
    lonely = make_result("fedapa", clients=1, rounds=1)
    lonely.label_counts = None
    assert "label-map" not in Page(render(lonely)).ids
    some = make_result("fedavg", clients=3, rounds=2, count=np.array([20, 0, 5]))
    assert math.isnan(some.client_accuracy()[1])
    assert not re.search(r"\bnan\b", Page(render(some)).text, flags=re.IGNORECASE)


def test_a_report_is_written_from_folders_too(tmp_path):
    """From a run folder and a comparison folder, with the environment that trained."""
    run = RunFolder.create(tmp_path / "run", {"rounds": 20})
    run.write_result(make_result())
    assert write_report(tmp_path / "run") == tmp_path / "run" / "report.html"
    folder = ComparisonFolder.create(tmp_path / "all", {"rounds": 20})
    folder.write_comparison(make_comparison())
    path = write_report(str(tmp_path / "all"), tmp_path / "pages" / "p.html")
    assert "fedapa and fedprox cannot be told apart" in Page(path.read_text(encoding="utf-8")).text
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="choose another folder"):
        write_report(make_result(), tmp_path / "file" / "report.html")


def test_a_lead_that_was_bought_with_work_is_pointed_out() -> None:
    """A caveat says that a method has many times the gradient evaluations of another."""
    local, other = make_result("local"), make_result("fedapa")
    fair = summarise(Comparison({"local": local, "fedapa": other}))
    assert not any("gradient evaluations of" in text for text in fair.caveats)
    other.ledger.gradient_evaluations = other.ledger.gradient_evaluations * 10
    unfair = summarise(Comparison({"local": local, "fedapa": other}))
    assert any("times the gradient evaluations of local" in text for text in unfair.caveats)


@pytest.fixture(scope="module")
def everyone() -> dict[str, Result]:
    """Train every method for a step on the same five clients."""
    small = {"model": Net(), "chunk": 8, "device": "cpu", "dtype": "float64"}
    small |= {"rounds": 1, "local": Local(steps=1), "eval_every": 1}
    options = {"fedbn": {"private": ("body",)}}
    fed = federation()
    return {name: fit(name, fed, options=options.get(name), **small) for name in METHODS}


def test_every_method_can_be_reported(everyone: dict[str, Result]) -> None:
    """All on one page, each with its row and its numbers."""
    page = Page(render(Comparison(everyone)))
    assert (page.faults, page.open) == ([], [])
    for name, result in everyone.items():
        assert name in page.texts
        assert f"{100 * result.accuracy:.1f}" in page.text


def test_what_a_method_records_of_its_server_is_drawn_or_left_out(
    everyone: dict[str, Result],
) -> None:
    """A page shows the last mixing matrix only, so every method that mixes has a page here."""
    mixing = {n: r for n, r in everyone.items() if any("mix" in s for s in r.snapshots)}
    assert {"fedapa", "fedamp", "pfedla"} <= mixing.keys()
    assert len(mixing) < len(everyone)
    for name, result in everyone.items():
        figure = mixing_matrix(Comparison({name: result}))
        assert (figure is not None) == (name in mixing)
    for name, result in mixing.items():
        page = Page(render(Comparison({name: result})))
        assert (page.faults, page.open) == ([], [])
        assert "mixing-matrix" in page.ids
