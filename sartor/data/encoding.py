"""Columns of a table as features: standardised numbers and one-hot categories.

The constants come from federated statistics. A client k sends, for every column and over its
training rows alone, three numbers (or, for a category, its levels); the server adds them up:

    n = Σ_k n_k,   mean = Σ_k s_k / n,   variance = Σ_k q_k / n − mean²

| symbol | code | meaning |
| --- | --- | --- |
| n_k | ``count`` | values of a column that client k has, missing ones left out |
| s_k | ``sum`` | their sum |
| q_k | ``squares`` | the sum of their squares |

The result is the same, up to rounding, as standardising the pooled training rows. What is sent is a
sum over a client's rows: a client with one row sends that row. A median, if empty cells are to be
filled with one, is found by questions that each client answers with a count (``federated_median``).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sartor.core.errors import FederationError, did_you_mean
from sartor.data.cells import Array as Array
from sartor.data.cells import Note, read_column, words_of
from sartor.data.checks import some
from sartor.data.text import encode as encode_text
from sartor.data.text import tokenise

MOST_LEVELS = 100
"""A text column with more levels than this is hardly a category."""

FEWEST_ROWS = 20
"""With at least so many rows, a text column whose cells all differ is no category either."""

_CONSTANT = 1e-14  # a variance below this share of the mean square is rounding


def column_faults(name: str, kind: str, values: Array, clients: Array, missing: str) -> list[str]:
    """List what keeps a column, as ``read_column`` gives it, from being a feature."""
    given = len(values) - len(empty_cells(kind, values))
    if not given:
        return [f"Column {name!r} is empty; leave it out with drop=[{name!r}] (--drop {name})."]
    faults = cell_faults(name, kind, values, clients, missing)
    levels = set(values.tolist()) - {""} if kind == "category" else set()
    if len(levels) > MOST_LEVELS or (len(levels) == given and given >= FEWEST_ROWS):
        faults.append(
            f"Column {name!r} has {len(levels)} different texts in {given} rows, as ids or free "
            f"texts do (at most {MOST_LEVELS} make a category, and not one for every row); leave "
            f"it out with drop=[{name!r}] (--drop {name}), or learn from it alone with "
            f"text_column={name!r}."
        )
    return faults


def cell_faults(name: str, kind: str, values: Array, clients: Array, missing: str) -> list[str]:
    """List the empty (if ``missing`` is "error") and the infinite cells of a column."""
    faults = []
    gone = empty_cells(kind, values)
    if len(gone) and missing == "error":
        faults.append(
            f"Column {name!r} has {len(gone)} empty cells{where(gone, clients)}; fill them, leave "
            "out those rows, or pass missing='median+indicator' (--missing median+indicator), "
            "'indicator', 'median' or 'mean'."
        )
    if kind == "number" and np.isinf(values).any():
        bad = np.flatnonzero(np.isinf(values))
        faults.append(
            f"Column {name!r} has {len(bad)} infinite cells{where(bad, clients)}; fix them, or "
            "leave out those rows."
        )
    return faults


def empty_cells(kind: str, values: Array) -> Array:
    """Return the rows of a column, as ``read_column`` gives it, whose cells are empty."""
    return np.flatnonzero(np.isnan(values) if kind == "number" else values == "")


# ---------------------------------------------------------------------- federated statistics


def client_statistics(columns: Mapping[str, tuple[str, Array]], rows: Array) -> dict[str, Any]:
    """Return what one client sends: count, sum and sum of squares, or levels, of every column.

    >>> client_statistics({"a": ("number", np.array([1.0, 3.0, 9.0]))}, np.array([0, 1]))
    {'a': {'count': 2, 'sum': 4.0, 'squares': 10.0}}
    """
    sent: dict[str, Any] = {}
    for name, (kind, values) in columns.items():
        own = values[rows]
        if kind == "category":
            sent[name] = {"levels": sorted(set(own.tolist()) - {""})}
        else:
            own = own[~np.isnan(own)]
            sent[name] = {
                "count": len(own),
                "sum": float(own.sum()),
                "squares": float(np.square(own).sum()),
            }
    return sent


def combine_statistics(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the constants of every column from the messages of all clients: the server's part.

    A column that does not vary keeps its scale, so that it becomes 0.

    >>> one = {"a": {"count": 2, "sum": 4.0, "squares": 10.0}, "b": {"levels": ["x"]}}
    >>> combine_statistics([one, one])[0]
    {'name': 'a', 'kind': 'number', 'mean': 2.0, 'scale': 1.0}
    """
    found: list[dict[str, Any]] = []
    for name, first in messages[0].items():
        if "levels" in first:
            levels = sorted(set().union(*(message[name]["levels"] for message in messages)))
            found.append({"name": name, "kind": "category", "levels": levels})
            continue
        count, total, squares = (
            sum(message[name][key] for message in messages) for key in ("count", "sum", "squares")
        )
        mean, power = (total / count, squares / count) if count else (0.0, 0.0)
        variance = power - mean * mean
        scale = variance**0.5 if variance > _CONSTANT * max(power, 1e-300) else 1.0
        found.append({"name": name, "kind": "number", "mean": mean, "scale": scale})
    return found


def federated_median(parts: Sequence[Array]) -> float:
    """Return the median of all clients' values by bisection over counts; NaN are left out.

    The server asks how many values are at most t, and every client answers with a number. After at
    most 64 questions (128 for an even count) the answer is exact: a double has 64 bits.

    >>> federated_median([np.array([3.0, np.nan, 1.0]), np.array([10.0, 2.0])])
    2.5
    """
    clients = [np.sort(part[~np.isnan(part)]) for part in parts]
    count = sum(map(len, clients))
    if not count:
        return 0.0
    held = [part for part in clients if len(part)]
    low, high = min(part[0] for part in held), max(part[-1] for part in held)

    def smallest(rank: int) -> float:
        """Return the value of this rank: the least that so many values do not exceed."""
        least, most = _place(low), _place(high)
        while least < most:
            middle = (least + most) // 2
            asked = _value(middle)
            below = sum(int(np.searchsorted(part, asked, "right")) for part in held)
            least, most = (least, middle) if below >= rank else (middle + 1, most)
        return _value(least)

    middle = (count + 1) // 2
    first = smallest(middle)
    return first if count % 2 else (first + smallest(middle + 1)) / 2


def _place(value: float) -> int:
    """Return the position of a double among all doubles."""
    bits = int(np.float64(value).view(np.int64))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFFFFFFFFFF)


def _value(place: int) -> float:
    """Return the double at a position."""
    return math.copysign(float(np.int64(abs(place)).view(np.float64)), place)


def encode(columns: Mapping[str, tuple[str, Array]], recipe: Sequence[Mapping[str, Any]]) -> Array:
    """Return features ``(rows, features)`` float32 by the constants of ``combine_statistics``.

    A number becomes (value − mean) / scale, with the "fill" of the recipe (else the mean) where it
    is missing, and a second feature says where if the recipe has an "indicator"; a category one
    column for every level, all 0 for a level that no client trained on (``unseen`` counts those).

    >>> encode({"c": ("category", np.array(["x", "z"]))}, [
    ...     {"name": "c", "kind": "category", "levels": ["x", "y"]}]).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    parts = []
    for step in recipe:
        _, values = columns[step["name"]]
        if step["kind"] == "number":
            filled = np.where(np.isnan(values), step.get("fill", step["mean"]), values)
            parts.append(((filled - step["mean"]) / step["scale"])[:, None])
            if step.get("indicator"):
                parts.append(np.isnan(values)[:, None])
        else:
            parts.append(values[:, None] == np.array(step["levels"], dtype=np.str_))
    return np.concatenate([part.astype(np.float32) for part in parts], axis=1)


def unseen(
    columns: Mapping[str, tuple[str, Array]], recipe: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    """Count, for every column of categories, the cells with a level that no client trained on.

    >>> unseen({"c": ("category", np.array(["x", "z", "z", ""]))}, [
    ...     {"name": "c", "kind": "category", "levels": ["x", "y"]}])
    {'c': {'z': 2}}
    """
    found: dict[str, dict[str, int]] = {}
    for step in recipe:
        if step["kind"] == "category":
            counts = Counter(columns[step["name"]][1].tolist())
            strange = {k: n for k, n in counts.most_common() if k and k not in step["levels"]}
            found |= {step["name"]: strange} if strange else {}
    return found


def words_of_unseen(found: Mapping[str, Mapping[str, int]]) -> str:
    """Say which levels no client trained on, and in how many cells."""
    cells = sum(sum(counts.values()) for counts in found.values())
    each = []
    for name, counts in found.items():
        levels = some([f"{level!r} in {number}" for level, number in list(counts.items())[:4]], 3)
        each.append(f"{name!r} ({levels})")
    return (
        f"{cells} cell{' holds' if cells == 1 else 's hold'} a category that no client trained "
        f"on, in {some(each)}; the models take it for none of those that they know."
    )


def with_indicators(
    recipe: Sequence[Mapping[str, Any]],
    columns: Mapping[str, tuple[str, Array]],
    rows: Sequence[Array],
) -> list[dict[str, Any]]:
    """Give every column of numbers with empty cells, in any client's rows, a second feature."""
    used = np.concatenate(rows)
    found = []
    for step in recipe:
        kind, values = columns[step["name"]]
        gaps = kind == "number" and bool(np.isnan(values[used]).any())
        found.append({**step, "indicator": True} if gaps else dict(step))
    return found


def feature_names(recipe: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for every feature: the column, or column=level.

    >>> feature_names([{"name": "c", "kind": "category", "levels": ["x", "y"]}])
    ['c=x', 'c=y']
    """
    names: list[str] = []
    for step in recipe:
        name = step["name"]
        if step["kind"] == "number":
            names += [name, f"{name} missing"] if step.get("indicator") else [name]
        else:
            names += [f"{name}={level}" for level in step["levels"]]
    return names


# ---------------------------------------------------------------------- later, without the data


def prepare(x: Any, recipe: Mapping[str, Any] | None) -> Array:
    """Turn new samples into features by a stored recipe (``federation.info["preprocessing"]``).

    Args:
        x: for a table, a data frame, a dict of columns, a list of dicts, or an array with the
            columns in their order; for texts a list of them; else an array of features.
        recipe: what the training data went through, or None for nothing.

    Raises:
        FederationError: lists every column that is missing or cannot be read.
    """
    if recipe is None or recipe["kind"] == "given":
        return np.asarray(x)
    if recipe["kind"] == "scale":
        array = np.asarray(x, dtype=np.float64)
        shape = (-1, *([1] * (array.ndim - 2)))
        mean, scale = (np.reshape(recipe[key], shape) for key in ("mean", "scale"))
        return np.asarray((array - mean) / scale, dtype=recipe.get("dtype", "float32"))
    if recipe["kind"] == "text":
        is_table = isinstance(x, Mapping) or hasattr(x, "columns")
        texts = columns_of(x, [recipe["column"]])[recipe["column"]] if is_table else x
        vocabulary = {word: number for number, word in enumerate(recipe["words"], 2)}
        words = [tokenise(str(one)) for one in ([texts] if isinstance(texts, str) else texts)]
        return encode_text(words, vocabulary, recipe["length"])
    steps = recipe["columns"]
    given = columns_of(x, [step["name"] for step in steps])
    faults: list[str] = []
    notes: list[Note] = []
    read: dict[str, tuple[str, Array]] = {}
    for step in steps:
        name, category = step["name"], step["kind"] == "category"
        mark = recipe.get("decimal", "auto")
        found = read_column(name, given[name], faults, category=category, decimal=mark, notes=notes)
        if found is None:
            continue
        if found[0] != step["kind"]:
            faults.append(
                f"Column {name!r} held numbers in training, but is text here; give numbers."
            )
            continue
        nobody = np.full(len(found[1]), "")
        faults += cell_faults(name, *found, nobody, recipe["missing"])
        read[name] = found
    if faults:
        raise FederationError("\n".join(faults))
    strange = unseen(read, steps)
    odd = [note for note in notes if note.how != recipe.get("decimal")]  # not as in training
    for sentence in [*words_of(odd), *([words_of_unseen(strange)] if strange else [])]:
        warnings.warn(sentence, stacklevel=2)
    return encode(read, steps)


def columns_of(x: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the named columns of a data frame, dict of columns, list of dicts, or array.

    Raises:
        FederationError: names every column that is not there.
    """
    if isinstance(x, Sequence) and len(x) and isinstance(x[0], Mapping):
        known = list(dict.fromkeys(key for row in x for key in row))
        table: Any = {name: [row.get(name) for row in x] for name in known}
    elif isinstance(x, Mapping):
        known, table = list(x), {k: np.atleast_1d(np.asarray(v)) for k, v in x.items()}
    elif hasattr(x, "columns"):
        known, table = [str(name) for name in x.columns], {str(k): x[k].to_numpy() for k in x}
    else:
        array = np.asarray(x)
        if array.ndim != 2 or array.shape[1] != len(names):
            raise FederationError(
                f"The models know {len(names)} columns ({some(names, 8)}), got an array of shape "
                f"{array.shape}; give a data frame, a dict of columns, or rows with these columns "
                "in this order."
            )
        known, table = list(names), {name: array[:, i] for i, name in enumerate(names)}
    lost = [f"{name!r}{did_you_mean(name, known)}" for name in names if name not in table]
    if lost:
        raise FederationError(f"Columns that the models know are missing: {', '.join(lost)}")
    return {name: table[name] for name in names}


def where(rows: Array, clients: Array) -> str:
    """Name the first rows of a fault and their clients, in brackets."""
    names = [name for name in dict.fromkeys(clients[rows].tolist()) if name][:5]
    return f" (rows {some(rows)}" + (f"; client {', '.join(names)})" if names else ")")
