from __future__ import annotations

import importlib
import itertools
import re
import sys
import zlib
from importlib.resources import files

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text

import sartor
from sartor.core.errors import ConfigError, MissingExtraError, RunFolderError
from sartor.report import write_figures
from sartor.report.charts import Line, line_figure
from sartor.report.drawing import SERIES, VARIABLES, Figure
from sartor.report.figures import draw_all
from sartor.report.fitting import COLUMN, TEXT, paper_width
from sartor.report.printing import DOTS, for_paper, page_colours, save
from sartor.results.comparison import Comparison
from tests.report.test_advice_page import make_advice
from tests.synthetic_results import make_comparison, make_result

FIGURES = {"accuracy-by-round", "gain-by-client", "bytes-against-accuracy", "label-map"}
FIGURES |= {"mixing-matrix"}
MANY = ("local", "fedavg", "fedprox", "fedapa", "ditto", "pfedme", "apfl", "fedrep", "fedamp")


@pytest.fixture(scope="module")
def figures():
    """Ten methods with long names of clients: the hardest to fit into a column."""
    names = tuple(f"hospital of town {i}" for i in range(20))
    results = {name: make_result(name, names=names) for name in (*MANY, "pfedbred")}
    return {figure.key: figure for figure in draw_all(Comparison(results))}


def streams(data: bytes) -> bytes:
    """Return what a PDF draws, unpacked."""
    found = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, flags=re.DOTALL)
    texts = []
    for packed in found:
        try:
            texts.append(zlib.decompress(packed))
        except zlib.error:
            texts.append(packed)
    return b"\n".join(texts)


def numbers_of(colour: str) -> list[float]:
    return [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]


def test_a_pdf_has_vectors_embedded_fonts_and_the_width_of_a_column(tmp_path):
    """TrueType inside, no bitmap, no Type 3 font; the colours are those of the page, in the light.

    No placeholder reaches the paper.
    """
    paths = write_figures(make_comparison(clients=8), tmp_path)
    assert {path.stem for path in paths} == FIGURES
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"%PDF")
        assert b"/FontFile2" in data
        assert b"/Type3" not in data
        assert b"/Subtype /Image" not in data
        wide = path.stem in ("gain-by-client", "mixing-matrix")
        box = re.search(rb"/MediaBox \[([^\]]*)\]", data)
        assert box
        assert float(box[1].split()[2]) == pytest.approx(72 * (TEXT if wide else COLUMN), abs=0.5)
        drawn = re.findall(rb"([\d.]+) ([\d.]+) ([\d.]+) (?:rg|RG)\b", streams(data))
        drawn += [(grey,) * 3 for grey in re.findall(rb"([\d.]+) (?:g|G)\b", streams(data))]
        used = {tuple(round(255 * float(part)) for part in colour) for colour in drawn}
        held = {tuple(round(255 * part) for part in numbers_of(key)) for key in VARIABLES}
        assert not used & held
        if path.stem == "accuracy-by-round":
            blue = page_colours()[SERIES[1]]
            assert tuple(round(255 * part) for part in numbers_of(blue)) in used
    captions = (tmp_path / "captions.txt").read_text(encoding="utf-8")
    assert "Accuracy by round. Solid: the point" in captions


def test_a_png_has_its_size_and_colours(tmp_path, figures):
    """300 dots an inch, white ground, and the blue of the second series is in it."""
    path = save(figures["accuracy-by-round"], tmp_path / "new" / "a.png")
    picture = np.round(255 * imread(path)[..., :3]).astype(int)
    assert picture.shape[1] == round(COLUMN * DOTS)
    assert picture[0, 0].tolist() == [255, 255, 255]
    blue = [round(255 * part) for part in numbers_of(page_colours()[SERIES[1]])]
    assert (picture == blue).all(-1).sum() > 100
    assert (picture.sum(-1) < 60).sum() == 0  # placeholders are almost black; our ink is not


def test_no_message_leaves_the_paper_and_none_is_too_small(figures):
    """Every text of every figure lies inside its canvas, at six points or more."""
    for figure in figures.values():
        canvas = for_paper(figure, TEXT if figure.wide else COLUMN)
        renderer = FigureCanvasAgg(canvas).get_renderer()
        canvas.draw(renderer)
        box, (width, height) = canvas.get_tightbbox(renderer), canvas.get_size_inches()
        beyond = (-box.x0, box.x1 - width, -box.y0, box.y1 - height)
        assert max(beyond) < 0.02, (figure.key, beyond)
        sizes = [float(text.get_fontsize()) for text in canvas.findobj(Text) if text.get_text()]
        assert min(sizes) >= 6


def lines_named(names: list[str]) -> Figure:
    lines = [Line(name, [0, 1, 2], [k, k + 1.0, k]) for k, name in enumerate(names)]
    return line_figure("many", "Many", lines, x_label="round", y_label="accuracy, %")


@pytest.mark.parametrize("width", [COLUMN, TEXT])
@pytest.mark.parametrize(
    "names",
    [
        [f"method {k}" for k in range(14)],
        [f"a method with a long name {k}" for k in range(8)],
        ["LocalTrain", "λ = 0.02", "λ = 0.1", "GlobalTrain", "adaptive λ (shrinkage)"],
    ],
    ids=["fourteen", "long", "mixed"],
)
def test_a_legend_fits_and_leaves_most_of_the_picture_to_the_curves(names, width):
    """No wider than the picture; the curves keep more than half of its height at their width."""
    figure = lines_named(names)
    if width < paper_width(figure):
        return  # printed over the whole text instead; the phone's picture grows
    canvas = for_paper(figure, width)
    FigureCanvasAgg(canvas)
    canvas.draw_without_rendering()
    axes = canvas.axes[0]
    legend = axes.get_legend().get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= canvas.bbox.width
    assert legend.height < 0.3 * canvas.bbox.height
    assert axes.get_window_extent().height > 0.5 * canvas.bbox.height
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names


def test_many_long_names_take_the_width_of_the_text():
    """Fourteen short names fit into a column, in four rows; eight long ones do not."""
    assert paper_width(lines_named([f"Fed {k}" for k in range(14)])) == COLUMN
    assert paper_width(lines_named([f"a method with a long name {k}" for k in range(8)])) == TEXT


def test_printing_leaves_the_drawing_as_it_was(tmp_path, figures):
    """The same figure can be shown on a page after it was printed."""
    figure = figures["label-map"]

    def plain() -> str:
        return re.sub(r"-p[0-9a-f]{10}", "", figure.svg)  # names of clip paths are random

    before = plain()
    save(figure, tmp_path / "a.pdf")
    assert plain() == before


# Machado, Oliveira and Fernandes 2009, full severity, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deutan": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
}


def lab(rgb: np.ndarray) -> np.ndarray:
    """Return CIE L*a*b* of linear RGB."""
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.clip(rgb, 0, 1) @ np.asarray(matrix).T / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("ground", ["light", "dark"])
@pytest.mark.parametrize("eye", BLINDNESS)
def test_series_can_be_told_apart_by_every_eye(eye, ground):
    """Any two of the seven colours differ by more than ten units of L*a*b*, to every eye."""
    style = files("sartor.report").joinpath("style.css").read_text(encoding="utf-8")
    block = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)[ground == "dark"]
    colours = re.findall(r"--series-\d: (#[0-9a-f]{6})", block)
    assert len(colours) == len(SERIES)
    seen = [lab(BLINDNESS[eye] @ np.asarray(numbers_of(colour)) ** 2.2) for colour in colours]
    apart = {
        (i + 1, j + 1): float(np.linalg.norm(seen[i] - seen[j]))
        for i, j in itertools.combinations(range(7), 2)
    }
    assert min(apart.values()) > 10, sorted(apart.items(), key=lambda pair: pair[1])[:3]


def test_advice_is_printed_too_and_mistakes_are_named(tmp_path):
    """Both figures of an advice; another ending and a place that cannot be are refused."""
    paths = write_figures(make_advice(), tmp_path, "png")
    assert [path.name for path in paths] == ["error-by-pull.png", "distance-by-client.png"]
    figure = draw_all(make_comparison())[0]
    with pytest.raises(ConfigError, match=r"pdf or png, got 'a.svg'; name the file a\.pdf"):
        save(figure, tmp_path / "a.svg")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="a file stands where a folder is needed"):
        save(figure, tmp_path / "file" / "a.pdf")


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    """MissingExtraError with the pip command, and importing the report still works."""
    monkeypatch.setattr(sartor, "report", sartor.report)  # put back afterwards, with its modules
    for name in [*sys.modules]:
        if name.startswith("sartor.report") or name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fresh = importlib.import_module("sartor.report")
    with pytest.raises(MissingExtraError, match=r"pip install 'sartor\[figures\]'"):
        fresh.write_figures("nowhere")


def test_without_matplotlib_the_page_has_its_words_and_tables(monkeypatch):
    """The page of a comparison is written without figures, and says how to get them."""
    monkeypatch.setattr(sartor, "report", sartor.report)  # put back afterwards, with its modules
    for name in [*sys.modules]:
        if name.startswith("sartor.report") or name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    from sartor.report.page import render

    page = render(make_comparison())
    assert (
        "pip install &#39;sartor[figures]&#39;" in page or "pip install 'sartor[figures]'" in page
    )
    assert "<svg" not in page
    assert "Comparison of methods" in page
