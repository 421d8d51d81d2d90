"""How columns differ between clients: shift, beyond chance, and units.

Every client is compared with all others together. A column of numbers has the *rank distance*

    d = √2 Φ⁻¹(P),   P = the share of pairs in which the value here is above the one elsewhere

(ties count half), which is Cohen's d where the numbers are normal, and which outliers, skewness and
units cannot move; its chance is that of the Mann-Whitney test. A column of categories, or of few
whole numbers, has the *total variation* between the shares of its levels (0: the same, 1: no level
in common), its chance is that of the χ² test. Chances are multiplied by the number of comparisons.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sartor.data.cells import Array

RANK, VARIATION = "rank distance", "total variation"
LEAST = {RANK: 0.5, VARIATION: 0.2}
"""A shift that is flagged is at least so large, whatever its chance."""

CHANCE = 0.01
"""A shift that is flagged has at most this chance, after counting all comparisons of a table."""

FEW_LEVELS = 10
"""Whole numbers with at most so many different values are compared as categories."""

FEWEST = 5
"""A client with fewer values of a column is not compared."""


@dataclass(frozen=True)
class Shift:
    """How far one client's values of a column lie from those of all others.

    Attributes:
        column: its name.
        client: the client's name.
        measure: "rank distance" or "total variation".
        distance: its value; a rank distance has the sign of the difference.
        chance: of a difference as large without a shift, times the number of comparisons.
        here: the client's median, or the level whose share differs most.
        elsewhere: the others' median, or None.
        shares: of that level here and elsewhere, if it is one.
    """

    column: str
    client: str
    measure: str
    distance: float
    chance: float
    here: float | str
    elsewhere: float | None = None
    shares: tuple[float, float] | None = None

    @property
    def is_flagged(self) -> bool:
        """Whether it is large, and larger than chance."""
        return abs(self.distance) >= LEAST[self.measure] and self.chance <= CHANCE


def shifts(
    columns: Mapping[str, tuple[str, Array]],
    levels: Mapping[str, tuple[list[str], Array] | None],
    owner: Array,
    clients: Sequence[str],
) -> list[Shift]:
    """Compare every client with the others in every column, as ``read_column`` gives columns.

    ``levels`` is what ``levels_of`` gives for them.
    """
    found: list[Shift] = []
    if len(clients) > 1:
        for name, (_, values) in columns.items():
            coded = levels[name]
            if coded is None:
                found += _by_rank(name, values, owner, clients)
            else:
                found += _by_share(name, *coded, owner, clients)
    return [
        Shift(**{**vars(shift), "chance": min(1.0, shift.chance * len(found))}) for shift in found
    ]


def levels_of(kind: str, values: Array) -> tuple[list[str], Array] | None:
    """Return levels and the code of every row (-1: empty), or None for many different numbers."""
    if kind == "category":
        cells = values.tolist()
        order = {level: i for i, level in enumerate(sorted(set(cells) - {""}))}
        order[""] = -1
        codes = np.fromiter(map(order.__getitem__, cells), np.int64, len(cells))
        return [level for level in order if level], codes
    if len(np.unique(values[:10_000])) > FEW_LEVELS + 1:  # NaN is one of them
        return None
    known = values[~np.isnan(values)]
    distinct = np.unique(known)
    if len(distinct) > FEW_LEVELS or (distinct != np.floor(distinct)).any():
        return None
    codes = np.searchsorted(distinct, values)
    codes[np.isnan(values)] = -1
    return [f"{value:.10g}" for value in distinct], codes


def average_ranks(values: Array) -> tuple[Array, float]:
    """Return ranks from 1 with ties shared, and Σ (t³ − t) over groups of t equal values."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    sizes = np.diff(np.append(starts, len(values))).astype(np.float64)
    ranks = np.empty(len(values))
    ranks[order] = np.repeat(starts + (sizes + 1) / 2, sizes.astype(np.int64))
    return ranks, float((sizes**3 - sizes).sum())


def _by_rank(name: str, values: Array, owner: Array, clients: Sequence[str]) -> list[Shift]:
    known = ~np.isnan(values)
    x, k = values[known], owner[known]
    total = len(x)
    if total < 2 * FEWEST:
        return []
    ranks, ties = average_ranks(x)
    here = np.bincount(k, minlength=len(clients)).astype(np.float64)
    rest = total - here
    used = np.flatnonzero((here >= FEWEST) & (rest >= FEWEST))
    pairs = here[used] * rest[used]
    sums = np.bincount(k, weights=ranks, minlength=len(clients))[used]
    above = sums - here[used] * (here[used] + 1) / 2
    variance = pairs / 12 * (total + 1 - ties / (total * (total - 1)))
    z = (above - pairs / 2) / np.sqrt(np.maximum(variance, 1e-300)) * (variance > 0)
    share = np.clip(above / pairs, 0.5 / pairs, 1 - 0.5 / pairs)
    distance = math.sqrt(2) * torch.special.ndtri(torch.from_numpy(share)).numpy()
    found = []
    for place, i in enumerate(used.tolist()):
        chance = math.erfc(abs(z[place]) / math.sqrt(2))
        medians = (math.nan, math.nan)  # of many clients, only those that may be shown
        if len(clients) <= 50 or chance <= CHANCE:
            own = k == i
            medians = float(np.median(x[own])), float(np.median(x[~own]))
        found.append(Shift(name, clients[i], RANK, float(distance[place]), chance, *medians))
    return found


def _by_share(
    name: str, levels: Sequence[str], codes: Array, owner: Array, clients: Sequence[str]
) -> list[Shift]:
    known = codes >= 0
    cells = owner[known] * len(levels) + codes[known]
    counts = np.bincount(cells, minlength=len(clients) * len(levels)).astype(np.float64)
    counts = counts.reshape(len(clients), len(levels))
    total, found = counts.sum(0), []
    for i, client in enumerate(clients):
        here, rest = counts[i], total - counts[i]
        if min(here.sum(), rest.sum()) < FEWEST or len(levels) < 2:
            continue
        shares = here / here.sum(), rest / rest.sum()
        gap = shares[0] - shares[1]
        top = int(np.argmax(np.abs(gap)))
        found.append(
            Shift(
                name,
                client,
                VARIATION,
                float(np.abs(gap).sum() / 2),
                chance_of_counts(here, rest),
                levels[top],
                shares=(float(shares[0][top]), float(shares[1][top])),
            )
        )
    return found


def chance_of_counts(here: Array, rest: Array) -> float:
    """Return the chance of the χ² test for two rows of counts; rare levels count together."""
    total = here + rest
    least = total * min(here.sum(), rest.sum()) / total.sum()
    rare = least < 5
    table = np.stack([here, rest])
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], axis=1)
    table = table[:, table.sum(0) > 0]
    if table.shape[1] < 2:
        return 1.0
    wanted = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    value = float((np.square(table - wanted) / wanted).sum())
    half = torch.tensor([(table.shape[1] - 1) / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


# ---------------------------------------------------------------------- units

FACTORS = {
    2.2046: "kilograms and pounds",
    2.54: "inches and centimetres",
    3.2808: "metres and feet",
    4.008: "calcium in mmol/l and mg/dl",
    4.184: "kilocalories and kilojoules",
    6.006: "urea in mmol/l and mg/dl",
    7.0: "weeks and days",
    7.5006: "kilopascals and mmHg",
    10.0: "units ten times apart",
    12.0: "years and months",
    17.1: "bilirubin in mg/dl and µmol/l",
    18.016: "glucose in mmol/l and mg/dl",
    24.0: "days and hours",
    28.35: "ounces and grams",
    30.44: "months and days",
    38.67: "cholesterol in mmol/l and mg/dl",
    60.0: "minutes and seconds, or hours and minutes",
    88.5: "creatinine in mg/dl and µmol/l, or triglycerides in mmol/l and mg/dl",
    100.0: "shares and percent, or metres and centimetres",
    365.25: "years and days",
    1000.0: "thousands, such as grams and kilograms",
    3600.0: "hours and seconds",
    1e6: "millions",
}
"""Factors between units that are often mixed up, and the units."""

_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_GAP = math.log(1.7)  # clients whose medians are closer share a unit, as far as anybody can see
_NEAR = 0.15  # a factor may be so far from a known one, in logarithms: clients do differ
_FAR = 1.4  # times the width, from the tenth to the ninetieth percentile, that a unit moves values
_EVEN = 0.5  # the usual medians may differ by this share of a factor, in logarithms
_FEWEST_UNITS = 15  # values that a client must have


@dataclass(frozen=True)
class Unit:
    """A client whose numbers look like those of the others times a factor.

    Attributes:
        column: its name.
        client: the client's name.
        factor: how many times the others' values its values are; 0 for temperatures.
        units: the units between which this factor lies, or "".
    """

    column: str
    client: str
    factor: float
    units: str


def units(name: str, values: Array, owner: Array, clients: Sequence[str]) -> list[Unit]:
    """Find clients whose values of a column are those of the others in another unit.

    All quantiles must lie about the same factor apart, and farther than values of one client do:
    two groups of people differ in the middle by less than they differ among themselves. So a small
    factor is not seen in a column that varies widely.
    """
    known = np.isfinite(values) & (values > 0)
    x, k = values[known], owner[known]
    ends = np.cumsum(np.bincount(k, minlength=len(clients)))[:-1]
    own = np.split(x[np.argsort(k, kind="stable")], ends)
    usable = [
        i
        for i, part in enumerate(own)
        if len(part) >= _FEWEST_UNITS and len(np.unique(part)) > FEW_LEVELS
    ]
    if len(usable) < 2:
        return []
    middle = {i: math.log(float(np.median(own[i]))) for i in usable}
    order = sorted(usable, key=middle.__getitem__)
    groups = [[order[0]]]
    for before, i in itertools.pairwise(order):
        groups += [[]] if middle[i] - middle[before] > _GAP else []
        groups[-1].append(i)
    if len(groups) < 2:
        return []
    most = max(groups, key=lambda group: (len(group), sum(len(own[i]) for i in group)))
    usual = np.quantile(np.concatenate([own[i] for i in most]), _QUANTILES)
    spread = max(middle[i] for i in most) - min(middle[i] for i in most)
    found = []
    for group in groups:
        rest = np.concatenate([own[i] for i in usable if i not in group])
        for i in group if group is not most else ():
            unit = _unit(np.quantile(own[i], _QUANTILES), usual)
            apart = min(abs(middle[i] - middle[j]) for j in most)
            if (
                unit is not None
                and spread <= _EVEN * apart
                and _between(own[i], rest) > 0.15 * apart
            ):
                found.append(Unit(name, clients[i], *unit))
    return found


def _between(here: Array, rest: Array) -> float:
    """Return the logarithm of the gap between two sets of values, without their outermost."""
    pairs = (here, rest), (rest, here)
    return max(math.log(np.quantile(high, 0.05) / np.quantile(low, 0.95)) for high, low in pairs)


def _unit(here: Array, usual: Array) -> tuple[float, str] | None:
    for degrees, others in ((here, usual), (usual, here)):
        is_body = 30 < others[2] < 45 and 86 < degrees[2] < 113
        if is_body and np.abs((degrees - 32) / 1.8 - others).max() < 1.5:
            return 0.0, "degrees Celsius and Fahrenheit"
    apart = np.log(here / usual)
    factor = float(np.median(apart))
    widths = [float(np.log(side[-1] / side[0])) for side in (here, usual)]
    if abs(factor) < max(_GAP, _FAR * max(widths)):
        return None  # no farther apart than people are among themselves
    if np.abs(apart - factor).max() > 0.4 * max(widths):
        return None  # another shape, not another unit
    off = {abs(math.log(known) - abs(factor)): name for known, name in FACTORS.items()}
    near = [off[distance] for distance in sorted(off) if distance <= _NEAR]
    if not near and abs(factor) < math.log(3):
        return None
    return math.exp(factor), ", or ".join(near[:2])


def shown(shift: Shift) -> dict[str, Any]:
    """Return a shift as plain values."""
    return {**vars(shift), "flagged": shift.is_flagged}
