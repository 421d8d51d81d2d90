r"""Shapes that a reproduction must show, as data: a claim in words and a check on the means.

Every rule has ``claim`` and ``check``, and may name a ``measure`` (else the first table's), the
``columns`` it applies to (else all) and a ``slack`` that it tolerates. With V[row] the means over
seeds along the columns:

| check | needs | holds if |
|---|---|---|
| order | rows | V[rows[0]] ≤ V[rows[1]] ≤ ... in every column (``means``: of the column means) |
| above | row, than, by | V[row] ≥ V[than] + by for every ``than`` (``than = "others"``: all rows) |
| below | row, than, by | V[row] + by ≤ V[than] likewise |
| every_seed | row, than | the row is above ``than`` in every single run |
| between | row, ends | V[row] lies between the two ends |
| within | row, of, by | \|V[row] − V[of]\| ≤ by |
| envelope | row, of, by | V[row] ≥ max of V[of] − by (``lower``: ≤ min + by) |
| rises, falls | row(s) | V[row] moves one way along the columns; ``total`` wants that much in all |
| flat | row, by | max − min of V[row] ≤ by |
| crosses | row, than | V[row] − V[than] changes its sign once; ``near``, ``by``: where, in x |
| slope | row, near, by | log V[row] against log x has a slope within ``by`` of ``near`` |
| interior | row | the largest V[row] is at neither end (``lower``: the smallest) |
| best_in | row, at_least | the row is the best of all in so many columns |
| expression | value | a comparison of v("row", "column"[, "measure"]), sd likewise (over seeds) |
| | | and mean("row"), with + − * / |
| published | by | every number that was published lies within ``by`` of ours |

A row or column that was not run makes a rule "not run", never passed. A rule for every column fails
already by those that were run, if it fails in one of them.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sartor.core.errors import ConfigError, did_you_mean
from sartor.reproduce.arithmetic import evaluate, parse

Means = Mapping[str, Mapping[str, np.ndarray]]
"""row -> column -> one value per seed."""


@dataclass(frozen=True)
class Verdict:
    """What came of a rule: whether its claim holds, and the number that decides it."""

    claim: str
    holds: bool | None  # None if it was not run
    found: str

    @property
    def word(self) -> str:
        """PASS, FAIL or NOT RUN."""
        return "NOT RUN" if self.holds is None else "PASS" if self.holds else "FAIL"


class Missing(Exception):
    """A rule needs a number that is not there."""


@dataclass(frozen=True)
class View:
    """The numbers that a rule reads."""

    values: Means
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    places: Mapping[str, float | None]
    published: Mapping[str, Mapping[str, float | None]]
    measured: Callable[[str], Means]
    lost: frozenset[tuple[str, str]] = frozenset()  # cells of which every run diverged

    def runs(self, row: str, column: str) -> np.ndarray:
        """Return the values of a cell, one per seed."""
        cell = self.values.get(row, {}).get(column)
        if cell is None or not len(cell) or not np.isfinite(cell).any():
            if (row, column) in self.lost:
                raise Missing(f"every run of {row}, {column} diverged")
            raise Missing(f"no result for {row}, {column}")
        return cell

    def mean(self, row: str) -> np.ndarray:
        """Return the means of a row along the columns."""
        return np.array([np.nanmean(self.runs(row, column)) for column in self.columns])

    def others(self, row: str, rule: Mapping[str, Any]) -> list[str]:
        """Return what a row is compared with."""
        named = rule.get("than", rule.get("of", "others"))
        if named != "others":
            return [named] if isinstance(named, str) else list(named)
        spared = rule.get("except", ())
        return [r for r in self.rows if r != row and r not in spared]


Check = Callable[[Mapping[str, Any], View], tuple[bool, str]]
"""From a rule and the numbers to whether it holds, and the number that decides it."""


def judge(rule: Mapping[str, Any], view: View) -> Verdict:
    """Say whether a rule holds, and the number that decides it."""
    check = CHECKS.get(rule.get("check", ""))
    if check is None:
        known = did_you_mean(str(rule.get("check")), CHECKS)
        raise ConfigError(f"unknown check in the rule {rule.get('claim')!r}{known}")
    try:
        holds, found = check(rule, view)
    except Missing as missing:
        single = rule["check"] in EVERY_COLUMN and not rule.get("means")
        seen = _by_column(rule, view) if single else {}
        against = [f"{column}: {number}" for column, (fine, number) in seen.items() if not fine]
        if against:
            return Verdict(rule["claim"], False, "; ".join(against))
        so_far = f"; so far it holds in {len(seen)} of {len(view.columns)} columns"
        return Verdict(rule["claim"], None, f"{missing}{so_far * bool(seen)}")
    return Verdict(rule["claim"], bool(holds), found)


def _by_column(rule: Mapping[str, Any], view: View) -> dict[str, tuple[bool, str]]:
    """Judge a rule in every column by itself; those without all numbers are left out."""
    found = {}
    for column in view.columns:
        try:
            found[column] = CHECKS[rule["check"]](rule, replace(view, columns=(column,)))
        except Missing:
            continue
    return found


def _order(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    rows = np.stack([view.mean(row) for row in rule["rows"]])
    steps = np.diff(rows.mean(1) if rule.get("means") else rows, axis=0)
    worst = float(steps.min())
    return worst >= -rule.get("slack", 0.0), f"smallest step {worst:+.4g}"


def _apart(sign: int, word: str) -> Check:
    def check(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
        mine, others = view.mean(rule["row"]), view.others(rule["row"], rule)
        gaps = [sign * (mine - view.mean(other)) for other in others]
        least = np.min([gap.mean() if rule.get("means") else gap.min() for gap in gaps])
        wanted = rule.get("by", 0.0) - rule.get("slack", 0.0)
        return least >= wanted, f"least {word} {least:+.4g}"

    return check


def _every_seed(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    pairs = itertools.product(view.others(rule["row"], rule), view.columns)
    flat = np.concatenate([view.runs(rule["row"], c) - view.runs(other, c) for other, c in pairs])
    found = f"{int((flat > 0).sum())} of {len(flat)} runs above, least lead {flat.min():+.4g}"
    return flat.min() > -rule.get("slack", 0.0), found


def _between(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    mine, ends = view.mean(rule["row"]), np.stack([view.mean(row) for row in rule["ends"]])
    out = float(np.maximum(ends.min(0) - mine, mine - ends.max(0)).max())
    return out <= rule.get("slack", 0.0), f"outside by at most {max(out, 0.0):.4g}"


def _within(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    gaps = [np.abs(view.mean(rule["row"]) - view.mean(o)).max() for o in view.others("", rule)]
    return max(gaps) <= rule["by"], f"at most {max(gaps):.4g} apart"


def _envelope(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    mine, of = view.mean(rule["row"]), np.stack([view.mean(row) for row in rule["of"]])
    short = float((mine - of.min(0)).max() if rule.get("lower") else (of.max(0) - mine).max())
    return short <= rule["by"], f"short of the better by at most {short:.4g}"


def _moves(sign: int) -> Check:
    def check(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
        curves = sign * np.stack([view.mean(r) for r in rule.get("rows") or [rule["row"]]])
        step = float(np.diff(curves).min())
        total = float((curves[:, -1] - curves[:, 0]).min())
        fine = step >= -rule.get("slack", 0.0) and total >= rule.get("total", 0.0)
        return fine, f"in all {sign * total:+.4g}, smallest step {sign * step:+.4g}"

    return check


def _flat(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    spread = float(np.ptp(view.mean(rule["row"])))
    return spread <= rule["by"], f"range {spread:.4g}"


def _crosses(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    gap = view.mean(rule["row"]) - view.mean(rule["than"])
    x = [place for column in view.columns if (place := view.places[column]) is not None]
    if len(x) < len(view.columns):
        raise ConfigError(f"{rule['claim']!r} needs columns with an x; give each its x = NUMBER.")
    found = crossings(x, gap)
    where = ", ".join(f"{place:.3g}" for place in found) or "nowhere"
    near = rule.get("near")
    close = near is None or any(abs(place - near) <= rule["by"] for place in found)
    return len(found) == 1 and close, f"at {where}"


def crossings(x: Sequence[float], gap: np.ndarray) -> list[float]:
    """Return where a curve crosses zero, by straight lines between the places."""
    return [
        float(x[k] + (x[k + 1] - x[k]) * gap[k] / (gap[k] - gap[k + 1]))
        for k in range(len(gap) - 1)
        if (gap[k] > 0) != (gap[k + 1] > 0)
    ]


def _slope(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    """Fit log V[row] = a + b log x by least squares, and compare b."""
    x = [place for column in view.columns if (place := view.places[column] or 0.0) > 0.0]
    if len(x) < max(2, len(view.columns)):
        raise ConfigError(
            f"{rule['claim']!r} needs two columns or more with an x above 0; give each its "
            "x = NUMBER."
        )
    heights = view.mean(rule["row"])
    if (heights <= 0).any():
        return False, f"no logarithm of {heights.min():.4g}"
    found = float(np.polyfit(np.log(x), np.log(heights), 1)[0])
    return abs(found - rule["near"]) <= rule["by"], f"slope {found:+.3f}"


def _interior(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    curve = view.mean(rule["row"]) * (-1 if rule.get("lower") else 1)
    best = int(curve.argmax())
    return 0 < best < len(curve) - 1, f"best at {view.columns[best]}"


def _best_in(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    mine = view.mean(rule["row"])
    rest = np.stack([view.mean(other) for other in view.others(rule["row"], rule)])
    wins = int((mine >= rest.max(0) - rule.get("slack", 0.0)).sum())
    return wins >= rule["at_least"], f"best in {wins} of {len(mine)} columns"


def _published(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    gaps = [
        abs(float(np.nanmean(view.runs(row, column))) - value)
        for row, cells in view.published.items()
        for column, value in cells.items()
        if value is not None and row in view.values and column in view.columns
    ]
    if not gaps:
        raise Missing("no result for any published number")
    near = sum(gap <= rule["by"] for gap in gaps)
    return near == len(gaps), f"{near} of {len(gaps)} numbers, farthest {max(gaps):.4g}"


# ---------------------------------------------------------------------- expressions

_COMPARE = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_COMPARE[ast.Eq] = operator.eq


def _expression(rule: Mapping[str, Any], view: View) -> tuple[bool, str]:
    """Evaluate "a < b" where both sides are arithmetic on v, sd (row, column) and mean(row)."""
    body = parse(rule["value"])
    if not isinstance(body, ast.Compare) or len(body.ops) != 1 or type(body.ops[0]) not in _COMPARE:
        raise ConfigError(
            f"{rule['value']!r} is not one comparison of two numbers; write LEFT < RIGHT, with <, "
            "<=, >, >= or ==."
        )

    def words(function: str, given: list[str]) -> float | None:
        if function in ("v", "sd") and len(given) in (2, 3):
            other = replace(view, values=view.measured(given[2])) if given[2:] else view
            runs = other.runs(given[0], given[1])
            return float(np.nanmean(runs) if function == "v" else np.nanstd(runs))
        if function == "mean" and len(given) == 1:
            return float(view.mean(given[0]).mean())
        return None

    left, right = (evaluate(side, words=words) for side in (body.left, body.comparators[0]))
    return _COMPARE[type(body.ops[0])](left, right), f"{left:.4g} against {right:.4g}"


CHECKS: dict[str, Check] = {
    **{"above": _apart(1, "lead"), "below": _apart(-1, "gap"), "order": _order},
    **{"every_seed": _every_seed, "between": _between, "within": _within, "envelope": _envelope},
    **{"rises": _moves(1), "falls": _moves(-1), "flat": _flat, "crosses": _crosses},
    **{"slope": _slope, "interior": _interior, "best_in": _best_in},
    **{"expression": _expression, "published": _published},
}

EVERY_COLUMN = ("order", "above", "below", "every_seed", "between", "within", "envelope")
"""Checks of single columns: one column that fails decides them."""
