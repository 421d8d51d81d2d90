"""Laws of a folder whose tables are standardised, and of a folder of images."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sartor
from sartor import Federation
from sartor.cli import main
from sartor.core.errors import FederationError, MissingExtraError

Image = pytest.importorskip("PIL.Image")

HEADER = ("age", "sex", "weight", "y")


def rows_of(number: int, seed: int, shift: float = 0.0) -> list[list[Any]]:
    """Rows of one client, with a text among the columns."""
    rng = np.random.default_rng(seed)
    age, weight = rng.normal(50 + shift, 10, number).round(2), rng.normal(70, 9, number).round(2)
    sex, ill = rng.choice(["f", "m"], number), rng.integers(0, 2, number)
    return [list(row) for row in zip(age, sex, weight, ill, strict=True)]


def write(path: Path, rows: list[list[Any]], header: tuple[str, ...] | None = HEADER) -> None:
    """Write a CSV file."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([*([header] if header else []), *rows])


@pytest.fixture
def clinics(tmp_path: Path) -> tuple[Path, dict[str, list[list[Any]]]]:
    """Two clinics, a file each."""
    rows = {"bonn": rows_of(12, 1), "oslo": rows_of(8, 2, shift=25.0)}
    for name, own in rows.items():
        write(tmp_path / f"{name}.csv", own)
    return tmp_path, rows


# ---------------------------------------------------------------------- tables


def test_standardised_files_are_one_table(clinics: Any) -> None:
    """The files are prepared as the table is that holds all their rows and the client."""
    folder, rows = clinics
    made = Federation.from_folder(folder, standardise=True, seed=3)
    joined = [[name, *row] for name, own in rows.items() for row in own]
    table = dict(zip(("site", *HEADER), map(list, zip(*joined, strict=True)), strict=True))
    other = Federation.from_dataframe(table, client="site", label="y", seed=3)
    assert made.fingerprint() == other.fingerprint()
    assert made.info["preprocessing"] == other.info["preprocessing"]
    assert made.info["features"] == ["age", "sex=f", "sex=m", "weight"]
    assert made.info["source"] == "folder"
    assert made.info["columns"] == ["age", "sex", "weight"]


def test_constants_are_those_of_training_rows_alone(clinics: Any) -> None:
    """Age has mean 0 and deviation 1 over the training rows of all clients, not over all rows."""
    folder, _ = clinics
    made = Federation.from_folder(folder, standardise=True)
    age = made.x[made.train.rows, 0]
    assert age.mean().item() == pytest.approx(0, abs=1e-6)
    assert age.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert abs(made.x[:, 0].mean().item()) > 1e-3
    own = made.x[made.train.of(0), 0].mean().item()
    assert own < -0.3  # bonn is younger: the constants are common


def test_a_target_is_standardised_and_reported_in_its_unit(clinics: Any) -> None:
    """A column of numbers is a regression whose scale is kept."""
    folder, rows = clinics
    made = Federation.from_folder(folder, label="weight", standardise=True, test=0.0)
    weights = np.array([float(row[2]) for own in rows.values() for row in own])
    step = made.info["preprocessing"]["target"]
    assert made.task == "regression"
    assert (step["mean"], step["scale"]) == pytest.approx((weights.mean(), weights.std()))
    assert (made.y.numpy() * step["scale"] + step["mean"]) == pytest.approx(weights, rel=1e-5)


def test_given_divisions_and_files_without_a_header_are_kept(tmp_path: Path) -> None:
    """NAME.train and NAME.test stay apart; columns without names count from 0."""
    numbers = [[row[0], row[2], row[3]] for row in rows_of(6, 3)]
    write(tmp_path / "a.train.csv", numbers[:4], None)
    write(tmp_path / "a.test.csv", numbers[4:], None)
    made = Federation.from_folder(tmp_path, standardise=True)
    assert made.names == ("a",)
    assert made.train.of(0).tolist() == [2, 3, 4, 5]  # the test file comes first
    assert made.test.of(0).tolist() == [0, 1]
    assert made.info["columns"] == ["0", "1"]


def test_files_of_other_formats_and_columns(clinics: Any) -> None:
    """Npz files are scaled per feature; other columns are refused; a text teaches the option."""
    folder, rows = clinics
    with pytest.raises(FederationError, match=r"holds . in sample 0.*standardise=True"):
        Federation.from_folder(folder)
    write(folder / "rome.csv", [row[1:] for row in rows["bonn"]], HEADER[1:])
    with pytest.raises(FederationError, match=r"rome\.csv has samples of shape"):
        Federation.from_folder(folder, standardise=True)
    for file in folder.iterdir():
        file.unlink()
    x = np.random.default_rng(0).normal(5, 3, (20, 2))
    np.savez(folder / "a.npz", x=x.astype("f4"), y=np.arange(20) % 2)
    made = Federation.from_folder(folder, standardise=True)
    assert made.x[made.train.rows].mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert Federation.from_folder(folder).x.numpy() == pytest.approx(x, rel=1e-6)


def test_newcomers_are_prepared_like_those_who_trained(clinics: Any, tmp_path: Path) -> None:
    """like= takes the constants and classes of the federation that trained."""
    folder, _ = clinics
    made = Federation.from_folder(folder, standardise=True)
    new = tmp_path / "new"
    new.mkdir()
    write(new / "rome.csv", rows_of(6, 9, shift=100.0))
    late = Federation.from_folder(new, like=made.info)
    step = made.info["preprocessing"]["columns"][0]
    first = float(rows_of(6, 9, shift=100.0)[0][0])
    assert late.x[0, 0].item() == pytest.approx((first - step["mean"]) / step["scale"], rel=1e-5)
    result = sartor.fit("ditto", made, rounds=1)
    assert result.onboard(late, rounds=1).clients == ("rome",)


def test_the_command_line_standardises_folders(
    clinics: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--standardise reads texts in a folder, and newcomers of a folder are prepared alike."""
    folder, _ = clinics
    monkeypatch.setattr("sartor.cli.work._write_report", lambda out: out / "report.html")
    out = str(folder / "run")
    words = ["--data", str(folder), "--rounds", "1", "--out", out, "--json"]
    assert main(["run", "ditto", *words]) == 2
    assert "standardise=True" in capsys.readouterr().err
    assert main(["run", "ditto", *words, "--standardise"]) == 0
    new = folder / "new"
    new.mkdir()
    write(new / "rome.csv", rows_of(6, 9))
    assert main(["onboard", out, str(new), "--rounds", "1", "--json"]) == 0


# ---------------------------------------------------------------------- images


def paint(path: Path, value: int, size: tuple[int, int] = (8, 8), mode: str = "L") -> None:
    """Write an image of one colour; size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = value if mode in ("L", "I;16") else (value, 0, 0)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two clients; the second has one class of the two."""
    for i in range(4):
        paint(tmp_path / f"bonn/cat/{i}.png", 10 * i)
        paint(tmp_path / f"bonn/dog/{i}.PNG", 255 - i)
        paint(tmp_path / f"oslo/dog/{i}.jpg", 200)
    (tmp_path / "bonn" / "notes.txt").write_text("not an image")
    return tmp_path


def test_images_by_client_and_class(photos: Path) -> None:
    """Folders name clients and classes; grey images have one channel between 0 and 1."""
    made = Federation.from_folder(photos, seed=1)
    assert made.names == ("bonn", "oslo")
    assert made.info["class_names"] == ["cat", "dog"]
    assert made.input_shape == (1, 8, 8)
    assert made.x[:4, 0, 0, 0].tolist() == pytest.approx([0, 10 / 255, 20 / 255, 30 / 255])
    assert made.x[4, 0, 0, 0].item() == 1
    assert made.y.tolist() == [0] * 4 + [1] * 8
    assert (made.train.sizes + made.test.sizes).tolist() == [8, 4]
    assert sartor.fit("fedavg", made, rounds=1).clients == ("bonn", "oslo")


def test_one_coloured_image_makes_three_channels(photos: Path) -> None:
    """Colour is kept; grey images then have three equal channels."""
    paint(photos / "oslo/cat/red.png", 255, mode="RGB")
    made = Federation.from_folder(photos)
    assert made.input_shape == (3, 8, 8)
    red = made.x[8]  # oslo's cat comes before its dogs
    assert red[:, 0, 0].tolist() == [1, 0, 0]
    assert torch.equal(made.x[1, 0], made.x[1, 2])


def test_sizes_must_agree_or_be_brought_to_one(photos: Path) -> None:
    """Other sizes are refused with the option that fixes it; (height, width) in that order."""
    paint(photos / "oslo/dog/wide.png", 0, size=(20, 10))
    with pytest.raises(FederationError, match=r"2 different sizes \(8 × 8, 10 × 20\).*=8"):
        Federation.from_folder(photos)
    assert Federation.from_folder(photos, image_size=6).input_shape == (1, 6, 6)
    assert Federation.from_folder(photos, image_size=(4, 6)).input_shape == (1, 4, 6)
    with pytest.raises(FederationError, match="image_size must be"):
        Federation.from_folder(photos, image_size=0)


def test_channels_are_standardised_with_federated_statistics(photos: Path) -> None:
    """Every channel has mean 0 and deviation 1 over all training images."""
    made = Federation.from_folder(photos, standardise=True)
    pixels = made.x[made.train.rows]
    assert pixels.mean().item() == pytest.approx(0, abs=1e-5)
    assert pixels.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert made.info["preprocessing"]["kind"] == "scale"


def test_images_that_cannot_be_used_are_listed(photos: Path) -> None:
    """Wrong places, empty clients and broken files are reported by name."""
    paint(photos / "rome/loose.png", 1)
    (photos / "void").mkdir()
    with pytest.raises(FederationError) as caught:
        Federation.from_folder(photos)
    assert "rome/loose.png" in str(caught.value).replace("\\", "/")
    assert "Client void has no images" in str(caught.value)
    (photos / "rome/loose.png").unlink()
    (photos / "void").rmdir()
    (photos / "rome/cat").mkdir()
    (photos / "rome/cat/a.png").write_bytes(b"no image")
    paint(photos / "rome/cat/b.png", 1, mode="I;16")
    with pytest.raises(FederationError) as caught:
        Federation.from_folder(photos)
    text = str(caught.value)
    assert "a.png cannot be read" in text
    assert "b.png cannot be read: mode I;16 has more than 8 bits" in text


def test_pillow_that_is_missing_is_named(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to install it."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r'Pillow.*pip install "sartor\[data\]"'):
        Federation.from_folder(photos)
