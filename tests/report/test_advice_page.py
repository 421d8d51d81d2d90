"""Laws of the page of an advice."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from sartor.adviser import AdviceFolder
from sartor.adviser.advice import Advice, Client
from sartor.adviser.plan import CostPlan
from sartor.adviser.verification import Row, Verification
from sartor.report import write_report
from sartor.report.advice_figures import draw_advice, error_by_pull
from sartor.report.advice_page import render_advice, summarise_advice
from tests.report.test_report import NAUGHTY, Page

PULLS = (0.0, *np.logspace(-6, 4, 59).tolist(), math.inf)


def make_advice(names=("a", "b", "c", "d"), *, strategy="personalised", basis="theory") -> Advice:
    """Return an advice whose curve has its least at λ = 0.1 (or at an end)."""
    pull = {"personalised": 0.1, "local": 0.0, "global": math.inf}[strategy]
    inner = np.asarray(PULLS[1:-1])
    share = inner / (inner + 0.1)
    errors = 0.02 * (1 - share) ** 2 + 0.03 * share**2
    theory = basis == "theory"
    clients = [
        Client(
            name=name,
            samples=100 + i,
            distance=0.4 * (i % 5) if theory else math.nan,
            noise=0.5 if theory else math.nan,
            prox_strength=math.inf if i == 0 else 0.1,
            alone=0.02,
            one_model=0.03 if i % 2 else 0.01,
            advised=0.012 if i else 0.021,
        )
        for i, name in enumerate(names)
    ]
    counts = {"n": 101.5, "N": 406.0, "m": float(len(names))}
    estimates = {"p": 3.0, "L": 0.3, "mu": 0.05, "rho": 0.7, "R2": 0.3, "R2_standard_error": 0.1}
    estimates |= {"R2_jackknife": 0.2, "tau2": 0.1, "crossover": 0.05}
    plan = CostPlan(
        strategy=strategy,
        prox_strength=pull,
        local_lr=2.0,
        server_lr=10.0,
        num_local_steps=12,
        rounds=6,
        guaranteed_rounds=19,
        start=1.0,
        accuracy=0.01,
        bytes_total=123_000,
        gradients=5_000,
        rate=0.4,
        guaranteed_rate=0.8,
    )
    rules = {"v1 (ρ = 2)": 0.07, "v1": 1e-9, "v2": math.inf, "shrinkage": 0.2}
    return Advice(
        basis=basis,
        strategy=strategy,
        reason="In between: a sentence.",
        prox_strength=pull,
        clients=clients,
        pulls=list(PULLS),
        errors=[0.02, *errors.tolist(), 0.03],
        rules={**rules, "expected error": 0.1} if theory else {},
        constants={**counts, **estimates} if theory else counts,
        plan=plan,
        model="logistic regression",
        doubts=["a doubt of the page."],
        ways_out=["a way out of it."],
    )


def make_verification() -> Verification:
    row = Row("advised", "fedprox", 0.012, 0.5, 0.8, 0.0, 0.0, "", 6, 0.123, 5000)
    local = dataclasses.replace(row, strategy="local", method="local", loss=0.52, worse=0.02)
    one = dataclasses.replace(row, strategy="global", method="fedavg", loss=0.6, worse=0.1)
    return Verification(
        [row, local, one], "confirmed", 0.0, 20, 6, None, ["b"], ["b", "c"], ["a note."]
    )


@pytest.fixture(scope="module")
def text():
    config = {"data": "/somewhere/hospitals", "carry_out": "sartor run fedprox --set <x>"}
    return render_advice(make_advice(), make_verification(), config=config)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_is_whole_and_loads_nothing(text, page):
    """Tags close in order, ids are unique, sections and figures are there, links stay inside."""
    assert page.faults == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    sections = {"summary", "figures", "clients", "costs", "verification", "carry-out", "constants"}
    assert sections | {"error-by-pull", "distance-by-client"} <= set(page.ids)
    assert page.tags.count("svg") == 4  # each for a screen and for a phone
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert not re.findall(r"https?://", text)
    wanted = {link[1:] for link in page.links if link.startswith("#")}
    wanted |= {v for name, v in page.attributes if name == "aria-labelledby"}
    assert wanted <= set(page.ids)


def test_the_answer_comes_first_and_nothing_is_left_out(page):
    """Words, doubts, ways out, costs with their guarantee, measurements, and the next command."""
    assert page.text.index("Federate, and personalise with λ = 0.1") < page.text.index(
        "excess loss at every λ"
    )
    assert "Advice on hospitals" in page.text
    for part in (
        "A doubt of the page.",
        "Way out: a way out of it.",
        "sartor run fedprox --set <x>",
        "Confirmed: no end is better",
        "not reached",
        "A note.",
        "123 kB",
        "390 kB",
        "0.3 ± 0.1",
        "0.3 ± 0.2",
        "0.5477 ± 0.091",
    ):
        assert part in page.text, part
    assert not re.search(r"\bnan\b", page.text, flags=re.IGNORECASE)


def test_the_curve_shows_both_ends_the_choice_and_every_rule():
    """Their labels are texts of the picture; a rule outside the range is drawn at its edge."""
    svg = error_by_pull(make_advice()).svg
    for words in ("alone", "λ = 0", "one model", "λ = ∞", "chosen: λ = 0.1", "v1 (ρ = 2): 0.07"):
        assert words in svg
    for words in ("v1: 1e-09", "v2: ∞", "shrinkage: 0.2"):
        assert words in svg
    assert "expected error: " not in svg  # it is the choice itself


@pytest.mark.parametrize("strategy", ["local", "global"])
def test_an_advised_end_is_drawn_at_its_end(strategy):
    """Picture and description name the end; the rule of the curve is then marked, too."""
    figure = error_by_pull(make_advice(strategy=strategy))
    end = {"local": "0", "global": "∞"}[strategy]
    assert f"chosen: λ = {end}" in figure.svg
    assert f"chosen λ = {end}" in figure.alt
    assert "expected error: 0.1" in figure.svg


def test_figures_take_their_colours_from_the_page(text):
    """No placeholder is left, and every variable is defined for light and for dark."""
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"#0[0-9a]0[0-9]0[0-9]", pictures)
    assert set(re.findall(r"(?:fill|stroke): ?(#[0-9a-f]{3,6})", pictures)) <= {"#ffffff"}
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    light, dark = re.search(r":root \{(.*?)\}.*?:root \{(.*?)\}", text, flags=re.DOTALL).groups()
    assert all(f"{name}:" in light and f"{name}:" in dark for name in used)


def test_bars_are_as_long_as_gains(text):
    """The one loss is drawn to the other side, and the largest gain ends at the right."""
    found = re.findall(r'class="bar (\w+)" style="margin-left: ([\d.]+)%; width: ([\d.]+)%"', text)
    assert [side for side, _, _ in found] == ["bad", "good", "good", "good"]
    left, wide = float(found[0][1]), float(found[0][2])
    assert left == 0
    assert wide == pytest.approx(100 * 0.001 / 0.009, abs=0.06)
    assert float(found[1][1]) + float(found[1][2]) == pytest.approx(100, abs=0.11)


@pytest.mark.parametrize("basis", ["theory", "trial"])
def test_names_of_clients_cannot_become_markup(basis):
    """Whatever a client is called appears as text, in the table and in the figure."""
    page = Page(render_advice(make_advice(NAUGHTY, basis=basis)))
    assert page.faults == []
    assert not {"script", "img"} & set(page.tags)
    for name in NAUGHTY:
        assert name in page.text


def test_a_trial_has_losses_in_place_of_distances():
    """No estimates, no rules, no NaN; a λ that diverged leaves a gap."""
    advice = make_advice(basis="trial")
    advice.errors[-2] = math.nan
    page = Page(render_advice(advice))
    assert "loss-by-client" in page.ids
    assert not {"distance-by-client", "rules", "verification", "carry-out"} & set(page.ids)
    assert not re.search(r"\bnan\b", page.text, flags=re.IGNORECASE)
    assert "6 " in page.text
    assert "19 tried" in page.text


def test_many_clients_make_a_page_of_bounded_size():
    """Five thousand clients: rows are capped, those with the least and the most gain are kept."""
    advice = make_advice([f"c{i}" for i in range(5000)])
    text = render_advice(advice)
    assert len(text) < 2_000_000
    assert "1000 that gain most, of 5,000" in text
    assert ">c0<" in text  # the one that loses
    assert "Of 5,000 clients, one in 13 is drawn." in text


def test_the_summary_has_the_few_numbers():
    """Tiles: λ, loss, who is hurt, rounds, traffic."""
    words = summarise_advice(make_advice(), None)
    values = {label: value for label, value, _ in words.tiles}
    assert values["Pull λ"] == "0.1"
    assert values["One model hurts"] == "2 of 4"
    assert values["Rounds"] == "6"
    assert values["Traffic"] == "123 kB"


def test_every_figure_has_a_description_for_screen_readers(page):
    """An svg is an image with a label, and the label is a sentence with numbers."""
    for figure in draw_advice(make_advice()):
        assert figure.alt in page.text
        assert figure.caption in page.text
        assert re.search(r"\d", figure.alt)


def test_the_page_is_drawn_again_from_its_folder(tmp_path):
    """With and without a verification; infinities and all."""
    folder = AdviceFolder.create(tmp_path / "a", {"data": "digits"})
    folder.write_advice(make_advice())
    path = write_report(tmp_path / "a")
    assert path == tmp_path / "a" / "report.html"
    first = Page(path.read_text(encoding="utf-8"))
    assert "verification" not in first.ids
    assert "Advice on digits" in first.text
    folder.write_verification(make_verification())
    assert "verification" in Page(write_report(tmp_path / "a").read_text(encoding="utf-8")).ids
    alone = write_report(make_advice(), tmp_path / "alone.html")
    assert "Federate, and personalise" in alone.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_the_figures(tmp_path, dark):
    """Chromium draws the page without a console message; curve and bars have their colour."""
    path = write_report(make_advice(), tmp_path / "report.html")
    picture = tmp_path / "page.png"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
    command += ["--window-size=900,1900", f"--screenshot={picture}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    done = subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in done.stderr
    image = imread(picture)[..., :3]
    blue = (0x57, 0xB0, 0xEA) if dark else (0x00, 0x72, 0xB2)
    close = (np.abs(image - np.asarray(blue) / 255) < 0.02).all(-1)
    assert close.sum() > 1000
    assert (image[5, 5].mean() < 0.3) == dark
