"""Compare published with measured numbers, and list claims with their verdicts.

A measured mean of R repeats has the standard error s.e. = s / √R. A published number is met when

    |ours − published| ≤ 2 · √(s.e.² + s.e._published²),

with s.e._published = 0 where the source gives none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sartor.results.tables import Table


@dataclass(frozen=True)
class Measured:
    """A number published in a paper, and ours.

    Attributes:
        what: what was measured.
        published: the value in the paper; NaN where it gives none.
        ours: our mean.
        standard_error: of our mean; NaN for a single run, which cannot be judged.
        published_error: standard error of the published value, where it is given.
    """

    what: str
    published: float
    ours: float
    standard_error: float = math.nan
    published_error: float = 0.0

    @property
    def difference(self) -> float:
        """Ours minus published."""
        return self.ours - self.published

    @property
    def within(self) -> bool | None:
        """Whether the difference is at most two standard errors; None if that is unknown.

        >>> Measured("a", published=1.0, ours=1.1, standard_error=0.05).within
        True
        >>> Measured("a", published=1.0, ours=1.1).within is None
        True
        """
        error = math.hypot(self.standard_error, self.published_error)
        if not (math.isfinite(error) and math.isfinite(self.difference)):
            return None
        return abs(self.difference) <= 2 * error * (1 + 1e-12)


@dataclass(frozen=True)
class Check:
    """A claim and whether it holds.

    Attributes:
        claim: one sentence.
        passed: True, False, or None where it was not tested.
        detail: the numbers behind it.
    """

    claim: str
    passed: bool | None
    detail: str = ""

    @property
    def word(self) -> str:
        """PASS, FAIL or NOT RUN."""
        return {True: "PASS", False: "FAIL", None: "NOT RUN"}[self.passed]


def published_table(
    rows: Sequence[Measured],
    *,
    what: str = "quantity",
    kind: str = "",
    source: str = "",
    title: str = "",
) -> Table:
    """Return published and measured numbers, and whether they agree within two standard errors.

    Args:
        rows: the numbers.
        what: heading of the first column.
        kind: format of the numbers, as in ``sartor.results.tables.format_cell``; "percent" for
            shares.
        source: where the published values come from, for a note.
        title: of the table.
    """
    names = [what, "published", "ours", "s.e.", "difference", "within two s.e."]
    answer = {True: "yes", False: "no", None: "–"}
    formats = {**dict.fromkeys(names[1:4], kind), "difference": "change"}
    if kind != "percent":
        formats["difference"] = kind
    judged = [row.within for row in rows if row.within is not None]
    notes = {"within two s.e.": f"{sum(judged)} of the {len(judged)} that can be judged"}
    if source:
        notes["published"] = source
    single = sum(math.isnan(row.standard_error) for row in rows)
    if single:
        notes["not judged"] = f"{single} measured once, so without a standard error"
    return Table(
        names,
        [
            [r.what, r.published, r.ours, r.standard_error, r.difference, answer[r.within]]
            for r in rows
        ],
        notes=notes,
        formats=formats,
        title=title,
    )


def tally(checks: Sequence[Check]) -> str:
    """Return how many claims hold, in words.

    >>> tally([Check("a", True), Check("b", False), Check("c", None)])
    '1 of 2 claims hold; 1 was not tested'
    >>> tally([Check("c", None), Check("d", None)])
    'none of 2 claims could be tested'
    """
    tested = [check for check in checks if check.passed is not None]
    held = sum(bool(check.passed) for check in tested)
    left = len(checks) - len(tested)
    rest = f"; {left} {'was' if left == 1 else 'were'} not tested" if left else ""
    if checks and not tested:
        return f"none of {len(checks)} claims could be tested"
    return f"{held} of {len(tested)} claims hold{rest}"
