"""Federations that nature divided: hospitals, schools, regions, islands, ports, writers.

Three are tables in a folder, which ``bench.federations`` is given; the others ship with
scikit-learn, some of them as the samples of its own tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Divided:
    """Samples, and the client of each.

    Attributes:
        x: (samples, features); NaN where a value is missing.
        y: labels from 0, or targets with mean 0 and deviation 1.
        owner: (samples,) the number of the client.
        classes: 0 for regression.
    """

    x: Array
    y: Array
    owner: Array
    classes: int

    @property
    def clients(self) -> int:
        """Return how many there are."""
        return int(self.owner.max()) + 1


class Missing(Exception):
    """Raised when the data of a federation are not there; the text says what was looked for."""


def divided(x: Any, y: Any, client: Any, *, regression: bool = False) -> Divided:
    """Number clients and classes in sorted order, or standardise the target."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y)
    owner = np.unique(np.asarray(client), return_inverse=True)[1].reshape(-1)
    if regression:
        y = y.astype(np.float64)
        return Divided(x, (y - y.mean()) / y.std(), owner, 0)
    names, labels = np.unique(y, return_inverse=True)
    return Divided(x, labels.reshape(-1).astype(np.int64), owner, len(names))


def quantiles(column: Any, parts: int) -> Array:
    """Return the part of every sample when a column is cut into equally large parts."""
    cuts = np.quantile(column, np.linspace(0, 1, parts + 1)[1:-1])
    found: Array = np.searchsorted(cuts, column, side="left")
    return found


def _table(folder: Path | None, name: str) -> Any:
    import pandas as pd

    if folder is None:
        raise Missing(f"{name}: give its folder with --data, or set SARTOR_DATA")
    if not (folder / name).is_file():
        raise Missing(f"{folder / name} is not there")
    return pd.read_csv(folder / name, na_values="?")


def heart(folder: Path | None) -> Divided:
    """Return the four hospitals, without the columns that most of them did not measure."""
    rows = _table(folder, "heart.csv").drop(columns=["slope", "ca", "thal"]).dropna()
    return divided(rows.drop(columns=["hospital", "disease"]), rows.disease, rows.hospital)


def heart_flamby(folder: Path | None) -> Divided:
    """Return the same rows with the features of FLamby's Fed-Heart-Disease.

    Its ``dataset.py`` drops the same three columns and then incomplete rows, and turns the type of
    chest pain and the resting ECG into indicators of every level but the first: 13 features.
    """
    import pandas as pd

    rows = _table(folder, "heart.csv").drop(columns=["slope", "ca", "thal"]).dropna()
    x = rows.drop(columns=["hospital", "disease"])
    x = pd.get_dummies(x, columns=["cp", "restecg"], drop_first=True)
    return divided(x, rows.disease, rows.hospital)


def heart_all(folder: Path | None) -> Divided:
    """Return all rows and columns, and for each column with gaps another that says where.

    So does ``Federation.from_file(..., missing="indicator")``; a gap is NaN here, and later becomes
    the mean of the training part.
    """
    rows = _table(folder, "heart.csv")
    x = rows.drop(columns=["hospital", "disease"])
    gaps = x.isna()
    x = x.join(gaps.loc[:, gaps.any()].add_suffix(" missing"))
    return divided(x, rows.disease, rows.hospital)


def school(folder: Path | None) -> Divided:
    """Return the exam scores of 139 schools."""
    rows = _table(folder, "school.csv")
    x = rows.drop(columns=["school", "score"])
    return divided(x, rows.score, rows.school, regression=True)


def brca(folder: Path | None) -> Divided:
    """Return the patients of six regions."""
    rows = _table(folder, "tcga_brca.csv").drop(columns=["fold", "days"]).dropna()
    return divided(rows.drop(columns=["region", "event"]), rows.event.astype(int), rows.region)


def cancer(folder: Path | None) -> Divided:
    """Return the tumours of scikit-learn, by fifths of their mean texture."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return divided(x, y, quantiles(x[:, 1], 5))


def wine(folder: Path | None) -> Divided:
    """Return the wines of scikit-learn, by thirds of their magnesium."""
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    return divided(x, y, quantiles(x[:, 4], 3))


def diabetes(folder: Path | None, by: str) -> Divided:
    """Return the patients of scikit-learn, by sixths of age, or by sex and thirds of weight.

    Sex is left out of the features where it is constant within a client.
    """
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    if by == "age":
        return divided(x, y, quantiles(x[:, 0], 6), regression=True)
    client = 3 * (x[:, 1] > 0) + quantiles(x[:, 2], 3)
    return divided(np.delete(x, 1, 1), y, client, regression=True)


def _openml(number: int, name: str) -> Any:
    """Read one of the tables with which scikit-learn tests its own download."""
    import gzip

    import pandas as pd

    package = f"sklearn.datasets.tests.data.openml.id_{number}"
    try:
        packed = (resources.files(package) / name).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise Missing(f"this scikit-learn comes without {name}") from None
    head, _, body = gzip.decompress(packed).decode().partition("@")
    head, _, body = re.split(r"(@data)\s*\n", "@" + body, maxsplit=1, flags=re.IGNORECASE)
    names = re.findall(r"@attribute\s+'?([\w.]+)'?", head, re.IGNORECASE)
    quote = "'" if body.count("'") > body.count('"') else '"'
    return pd.read_csv(
        BytesIO(body.encode()),
        names=names,
        na_values="?",
        quotechar=quote,
        escapechar="\\",
        skipinitialspace=True,
    )


def penguins(folder: Path | None) -> Divided:
    """Return the sex of penguins by four measures; a client is a species on an island."""
    rows = _openml(42585, "data-v1-dl-21854866.arff.gz").replace("_", None).dropna()
    return divided(rows.iloc[:, 2:6], rows.sex, rows.species + rows.island)


def titanic(folder: Path | None) -> Divided:
    """Return who survived, by the port where they embarked."""
    rows = _openml(40945, "data-v1-dl-16826755.arff.gz")
    rows = rows[["pclass", "sex", "age", "sibsp", "parch", "fare", "embarked", "survived"]].dropna()
    x = rows.drop(columns=["embarked", "survived"]).assign(sex=rows.sex == "male")
    return divided(x, rows.survived, rows.embarked)


def digits(folder: Path | None) -> Divided:
    """Return the digits of scikit-learn in 4 by 4 pixels, by thirteenths in the order of the file.

    Thirteen people wrote them one after the other. The file does not say where one ends, so equal
    parts are near the writers, but not exactly they.
    """
    from sklearn.datasets import load_digits

    images, y = load_digits(return_X_y=True)
    x = images.reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(len(images), -1)
    return divided(x, y, quantiles(np.arange(len(y)), 13))


FEDERATIONS: dict[str, Callable[[Path | None], Divided]] = {
    "heart": heart,
    "heart-all": heart_all,
    "school": school,
    "tcga_brca": brca,
    "cancer": cancer,
    "wine": wine,
    "diabetes-age": partial(diabetes, by="age"),
    "diabetes-sex-bmi": partial(diabetes, by="sex-bmi"),
    "penguins": penguins,
    "titanic": titanic,
    "digits": digits,
}
