"""What a column may be besides a feature: an id, a copy of the label, a code, a date; equal rows.

Every function looks at one column (or all rows) as ``read_column`` gives them, and answers with
words for what it suspects, or nothing. Each counts what chance alone would do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sartor.data.cells import Array
from sartor.data.shifts import FEW_LEVELS, average_ranks, levels_of

FEWEST_ROWS = 20
"""Of fewer rows nothing is suspected."""

ENOUGH = 50_000
"""So many rows, drawn from a longer table, show whether a column knows the label."""

RECALL = 0.97
"""A column that knows every class so often, on average, is a copy of the label."""

CORRELATION = 0.998
"""Ranks that go with those of a target so closely are a copy of it."""

CODES = (-1, 0, 9, 88, 99, 777, 888, 999, 7777, 8888, 9999, 99999, 999999)
"""Numbers that often stand for an empty cell (those above 1 with either sign)."""

COPIES = 0.3
"""Equal rows are copies if of the pairs that are equal but for some columns so many are equal in
those too, whichever columns these are."""

RARELY = 0.05
"""Columns are left out together until two rows are equal in them with at most this chance."""

_ID = re.compile(
    r"(^|[_\s.-])(id|ids|uid|uuid|guid|mrn|nr|no|number|index|idx|key|pid|ssn|rowid|unnamed.*)$"
    r"|^(id|uuid|guid|pid|mrn)([_\s.-]|$)|[a-z]I[Dd]$",
    re.IGNORECASE,
)
_QUANTITY = re.compile(
    r"\s*(?P<sign>[<>≤≥~=]{0,2})\s*[+-]?\d+(?:[.,]\d+)?\s*(?P<unit>[a-zµ%°/²³^\d*]{0,10})\s*",
    re.IGNORECASE,
)


def suspected_id(name: str, kind: str, values: Array, owner: Array) -> str:
    """Say why a column may be an id or a counter, or nothing.

    Measurements with decimals all differ too, so whole numbers must also rise from row to row (in
    the file, or within every client), fill their range, or have the name of an id.
    """
    if kind == "category":
        known = values[values != ""]
        share = len(set(known.tolist())) / max(len(known), 1)
        return f"{share:.0%} of its texts differ" if share >= 0.95 and _enough(known) else ""
    known = ~np.isnan(values)
    x, k = values[known], owner[known]
    if not _enough(x) or (x != np.floor(x)).any():
        return ""
    different = len(np.unique(x)) / len(x)
    steps = np.diff(x)
    if (steps > 0).all() or (steps < 0).all():
        return "it counts the rows: every value is beyond the one before"
    order = np.argsort(k, kind="stable")
    steps, same = np.diff(x[order]), np.diff(k[order]) == 0
    sizes = np.bincount(k)
    if same.sum() >= FEWEST_ROWS and sizes.max() >= FEWEST_ROWS and (steps[same] > 0).all():
        return "it counts the rows of every client: each value is beyond the one before"
    if different == 1 and x.max() - x.min() + 1 <= 1.05 * len(x):
        return "it numbers the rows: all values differ, and they fill their range"
    if different >= 0.95 and _ID.search(name):
        return f"its name is that of an id, and {different:.0%} of its values differ"
    return ""


def _enough(values: Array) -> bool:
    return len(values) >= FEWEST_ROWS


def knows_label(kind: str, values: Array, y: Array, classes: int) -> float:
    """Return how well a column alone predicts the label, without looking at the row itself.

    For classes the mean over classes of the share of rows that the other rows of the same level, or
    the four nearest values, would get right; for targets the correlation of ranks. Empty cells are
    a level, since a column that is filled for the sick alone knows who is sick.
    """
    if len(y) > ENOUGH:
        some = np.random.default_rng(0).permutation(len(y))[:ENOUGH]
        values, y = values[some], y[some]
    if classes == 0:
        if kind == "category":
            return 0.0
        known = ~np.isnan(values)
        x, t = values[known], y[known]
        if len(x) < FEWEST_ROWS or len(np.unique(x)) <= FEW_LEVELS:
            return 0.0
        ranks = average_ranks(x)[0], average_ranks(t)[0]
        return abs(float(np.corrcoef(*ranks)[0, 1])) if np.ptp(t) else 0.0
    counts = np.bincount(y, minlength=classes)
    if len(y) < FEWEST_ROWS or (counts >= 5).sum() < 2:
        return 0.0
    right = _by_level(kind, values, y, classes)
    hits = np.bincount(y, weights=right, minlength=classes)
    used = counts >= 5
    return float((hits[used] / counts[used]).mean())


def _by_level(kind: str, values: Array, y: Array, classes: int) -> Array:
    """Return where the rest of the rows would predict a row's class from this column."""
    if kind == "number":
        distinct, codes = np.unique(values, return_inverse=True)  # NaN are one value
        if len(distinct) > max(50, len(values) // 20):
            return _by_neighbours(values, y)
    else:
        found = levels_of(kind, values)
        assert found is not None
        codes = found[1] + 1
    table = np.bincount(codes * classes + y, minlength=(int(codes.max()) + 1) * classes)
    table = table.reshape(-1, classes)
    own = table[codes, y] - 1
    order = np.sort(table, axis=1)
    first, second = order[:, -1], order[:, -2]
    rival = np.where(table[codes, y] == first[codes], second[codes], first[codes])
    return np.asarray((own > rival) & (own > 0))


def _by_neighbours(values: Array, y: Array) -> Array:
    """Return where three of the four nearest values have the class of a row."""
    mixed = np.random.default_rng(0).permutation(len(values))  # ties must not keep the file's order
    order = mixed[np.argsort(values[mixed], kind="stable")]
    near = np.stack([np.roll(y[order], shift) for shift in (-2, -1, 1, 2)])
    right = np.empty(len(values), dtype=np.bool_)
    right[order] = (near == y[order]).sum(0) >= 3
    return right


def suspected_code(values: Array) -> tuple[float, int] | None:
    """Return a number that may stand for an empty cell, and how often, or None.

    It is one of ``CODES``, is repeated, and lies outside all other values by more than the middle
    half of them spans.
    """
    known = values[np.isfinite(values)]
    for code in (*CODES, *(-code for code in CODES if code > 1)):
        same = known == code
        count = int(same.sum())
        if count < max(3, 0.002 * len(known)):
            continue
        rest = known[~same]
        if len(rest) < FEWEST_ROWS or len(np.unique(rest)) <= FEW_LEVELS:
            continue
        low, high = np.quantile(rest, (0.25, 0.75))
        gap = max(float(rest.min()) - code, code - float(rest.max()))
        if gap > 0.75 * (high - low) and high > low:
            return float(code), count
    return None


def suspected_dates(values: Array) -> bool:
    """Say whether numbers may be dates, such as 20240131."""
    known = values[np.isfinite(values)]
    if not _enough(known) or (known != np.floor(known)).any():
        return False
    year, month, day = known // 10_000, known // 100 % 100, known % 100
    fits = (year >= 1900) & (year < 2100) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    return bool(fits.all()) and len(np.unique(known)) > 3


def quantities(cells: Sequence[str]) -> tuple[str, ...]:
    """Return the signs and units that keep texts from being numbers ("<", "mg"), or nothing."""
    found = [_QUANTITY.fullmatch(cell) for cell in cells]
    if len(cells) < FEWEST_ROWS // 4 or not all(found):
        return ()
    marks = {part.strip() for match in found if match for part in match.group("sign", "unit")}
    return tuple(sorted(marks - {""})) if len(marks) <= 4 else ()


def twin_levels(levels: Sequence[str]) -> list[tuple[str, ...]]:
    """Return levels that differ in capitals, spaces or punctuation alone."""
    groups: dict[str, list[str]] = {}
    for level in levels:
        key = re.sub(r"[\W_]+", "", level.casefold())
        if key:
            groups.setdefault(key, []).append(level)
    return [tuple(group) for group in groups.values() if len(group) > 1]


# ---------------------------------------------------------------------- equal rows


class Copies(NamedTuple):
    """Rows that are equal to another in every column but that of the client.

    Attributes:
        within: rows that repeat an earlier row of the same client.
        across: rows that repeat a row of another client.
        clients: the numbers of the clients between whom most rows are shared, if any.
        is_chance: whether so many equal rows are to be expected of such columns.
    """

    within: int
    across: int
    clients: tuple[int, ...]
    is_chance: bool


def copies(
    columns: Mapping[str, tuple[str, Array]],
    levels: Mapping[str, tuple[list[str], Array] | None],
    owner: Array,
) -> Copies:
    """Count equal rows, and say whether columns of so few values would make them anyway.

    Rows that are equal in all columns but some are equal in those as well if they are copies; if
    they are not, only about as often as two rows are. The columns that keep most of them apart
    decide.
    """
    rows = len(owner)
    codes = {name: _bits(levels[name], values) for name, (_, values) in columns.items()}
    if not codes or rows < 2:
        return Copies(0, 0, (), True)
    hashes = {name: _mixed(code, i) for i, (name, code) in enumerate(codes.items())}
    whole = np.bitwise_xor.reduce(list(hashes.values()))
    pairs = _pairs(whole)
    if pairs == 0:
        return Copies(0, 0, (), True)
    is_chance = any(pairs < COPIES * _pairs(whole ^ one) for one in _groups(codes, hashes))
    order = np.lexsort((owner, whole))
    same = whole[order][1:] == whole[order][:-1]
    alike = owner[order][1:] == owner[order][:-1]
    within = int((same & alike).sum())
    # A row is shared if its group of equal rows has more than one client.
    group = np.concatenate([[0], np.cumsum(~same)])
    first, last = np.minimum.reduceat, np.maximum.reduceat
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    low, high = first(owner[order], starts), last(owner[order], starts)
    shared = low != high
    across = int(shared[group].sum())
    clients: tuple[int, ...] = ()
    if across:
        met, often = np.unique(np.stack([low[shared], high[shared]]), axis=1, return_counts=True)
        clients = tuple(met[:, int(np.argmax(often))].tolist())
    return Copies(within, across, clients, is_chance)


def _groups(codes: Mapping[str, Array], hashes: Mapping[str, Array]) -> Iterator[Array]:
    """Return joint hashes of columns, each of so many values that two rows are rarely equal."""
    rows = len(next(iter(codes.values())))
    share = {name: _pairs(code) / (rows * (rows - 1) / 2) for name, code in codes.items()}
    joint, chance, whole = np.zeros(rows, dtype=np.uint64), 1.0, False
    for name in sorted(share, key=share.__getitem__):
        joint, chance = joint ^ hashes[name], chance * share[name]
        if chance <= RARELY:
            yield joint
            joint, chance, whole = np.zeros(rows, dtype=np.uint64), 1.0, True
    if not whole:
        yield joint  # all columns together, which make equal rows by themselves


def _bits(coded: tuple[list[str], Array] | None, values: Array) -> Array:
    """Return a whole number for every cell; equal cells have equal ones."""
    if coded is not None:
        return (coded[1] + 1).astype(np.uint64)
    clean = np.where(np.isnan(values), np.nan, values) + 0.0  # one NaN, and no −0
    return clean.view(np.uint64)


def _mixed(code: Array, column: int) -> Array:
    """Return hashes by splitmix64, different for every column."""
    with np.errstate(over="ignore"):
        z = code + np.uint64(0x9E3779B97F4A7C15) * np.uint64(2 * column + 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def _pairs(codes: Array) -> float:
    """Return how many pairs of rows have the same code."""
    sizes = np.unique(codes, return_counts=True)[1].astype(np.float64)
    return float((sizes * (sizes - 1) / 2).sum())
