"""What became of an advice: predicted beside measured, with its table and its sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sartor.results.tables import Table, jsonable


@dataclass(frozen=True)
class Row:
    """One strategy, trained.

    Attributes:
        strategy: "advised", "local" or "global".
        method: of the library.
        expected: the adviser's mean error: excess loss (theory) or validation loss (trial).
        loss: mean test loss.
        accuracy: share of right answers on test data; NaN for regression.
        worse: mean test loss above that of the advised strategy.
        standard_error: of that difference, paired, with clients as the units: the test samples of a
            client share one model (``trial.clustered_error``).
        rounds: of training.
        megabytes: sent, both ways, at 4 bytes a number.
        gradients: gradient evaluations.
        sample_error: the standard error if every test sample were a unit of its own, as for these
            very models.
    """

    strategy: str
    method: str
    expected: float
    loss: float
    accuracy: float
    worse: float
    standard_error: float
    rounds: int
    megabytes: float
    gradients: int
    sample_error: float = math.nan


@dataclass(frozen=True)
class Verification:
    """Predicted beside measured.

    Attributes:
        rows: advised, local and global; an advised end stands twice.
        holds: the advised strategy's test loss is at most one standard error (clients as units)
            above the better end.
        predicted_rounds: rounds to the stated accuracy; None for a trial.
        measured_rounds: when the global model was that near; None if not reached or not measured.
        hurt_predicted: clients that one model was expected to hurt.
        hurt_measured: clients whose test loss with one model is above that of training alone.
        notes: what limits the comparison.
    """

    rows: list[Row]
    holds: bool
    predicted_rounds: int | None
    measured_rounds: int | None
    hurt_predicted: list[str]
    hurt_measured: list[str]
    notes: list[str]

    def table(self) -> Table:
        """Return predicted beside measured, a row per strategy."""
        columns = [
            "strategy",
            "method",
            "expected",
            "test loss",
            "above advised",
            "± clients",
            "± samples",
        ]
        columns += ["accuracy %", "rounds", "MB", "gradients"]
        rows = [
            [
                r.strategy,
                r.method,
                r.expected,
                r.loss,
                r.worse,
                r.standard_error,
                r.sample_error,
                100.0 * r.accuracy,
                r.rounds,
                r.megabytes,
                r.gradients,
            ]
            for r in self.rows
        ]
        notes = {
            "±": "standard errors of the difference: with clients as units, which counts, and with "
            "test samples as units, which takes the trained models as given"
        }
        return Table(columns, rows, notes, title="Predicted and measured")

    def summary(self) -> str:
        """Return the outcome in a few lines."""
        end = min(self.rows[1:], key=lambda row: row.loss)
        first = self.rows[0]
        said = "holds" if self.holds else "does NOT hold"
        against = (
            f"that of the better end ({end.strategy}) {end.loss:.4g}, a difference of "
            f"{-end.worse:+.2g} with standard error {end.standard_error:.2g} over clients."
        )
        if end.method == first.method:  # an advised end that is the better one
            other = max(self.rows[1:], key=lambda row: row.loss)
            against = (
                f"that of the other end ({other.strategy}) {other.loss:.4g}, a difference of "
                f"{-other.worse:+.2g} with standard error {other.standard_error:.2g} over clients."
            )
        lines = [f"The recommendation {said}: its test loss is {first.loss:.4g}, {against}"]
        if self.predicted_rounds is not None:
            found = self.measured_rounds
            lines.append(
                f"Rounds to the stated accuracy: {self.predicted_rounds} predicted, "
                + (f"{found} measured." if found is not None else "not reached or not measured.")
            )
        both = set(self.hurt_predicted) & set(self.hurt_measured)
        lines.append(
            f"Hurt by one model: {len(self.hurt_predicted)} clients expected, "
            f"{len(self.hurt_measured)} measured, {len(both)} of them the same."
        )
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        values = {**vars(self), "rows": [vars(row) for row in self.rows]}
        found: dict[str, Any] = jsonable(values)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verification:
        """Return the verification that ``to_dict`` wrote down."""
        numbers: list[dict[str, Any]] = [
            {k: math.nan if v is None else v for k, v in row.items()} for row in values["rows"]
        ]
        rows = [Row(**row) for row in numbers]
        return cls(**{**values, "rows": rows})

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()
