"""What became of an advice: the advice beside its rivals on divisions drawn anew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sartor.results.tables import Table, jsonable

Judgement = Literal["confirmed", "not confirmed", "cannot tell"]


@dataclass(frozen=True)
class Row:
    """One way to train, on all divisions.

    Attributes:
        strategy: "advised", "local", "global", "fine-tuned" or "best λ tried".
        method: of the library.
        expected: the adviser's mean error; NaN where it has none.
        loss: mean test loss.
        accuracy: share of right answers on test data; NaN for regression.
        worse: mean test loss above that of the advised strategy.
        half: half the width of the 95 % interval of that difference, paired by division.
        chosen: what was chosen afterwards, by the test loss itself: a λ, a rate.
        rounds: of training; None where models were solved for.
        megabytes: sent in a division, both ways, at 4 bytes a number.
        gradients: gradient evaluations of a division.
    """

    strategy: str
    method: str
    expected: float
    loss: float
    accuracy: float
    worse: float
    half: float
    chosen: str = ""
    rounds: int | None = None
    megabytes: float = math.nan
    gradients: int | None = None


@dataclass(frozen=True)
class Verification:
    """The advice beside its rivals.

    Attributes:
        rows: advised, both ends, fine-tuned FedAvg and the best λ tried; an advised end stands
            twice.
        judgement: "confirmed": the intervals leave no end that is better by more than 1 % of the
            loss. "not confirmed": some row is better beyond its interval. Else "cannot tell".
        regret: how much lower the lowest test loss of a row is.
        divisions: how often every client's samples were divided.
        predicted_rounds: rounds to the stated accuracy; None where there is no such plan.
        measured_rounds: when the global model was that near; None if not reached or not measured.
        hurt_predicted: clients that one model was expected to hurt.
        hurt_measured: clients whose test loss with one model is above that of training alone.
        notes: what limits the comparison.
    """

    rows: list[Row]
    judgement: Judgement
    regret: float
    divisions: int
    predicted_rounds: int | None
    measured_rounds: int | None
    hurt_predicted: list[str]
    hurt_measured: list[str]
    notes: list[str]

    @property
    def holds(self) -> bool:
        """Whether the advice is confirmed."""
        return self.judgement == "confirmed"

    def table(self) -> Table:
        """Return the rows, with the accuracy in percent."""
        columns = ["strategy", "method", "expected", "test loss", "above advised", "± 95 %"]
        columns += ["accuracy %", "chosen", "rounds", "MB", "gradients"]
        rows = [
            [
                r.strategy,
                r.method,
                r.expected,
                r.loss,
                r.worse,
                r.half if r.strategy != "advised" else None,
                100.0 * r.accuracy,
                r.chosen,
                r.rounds,
                r.megabytes,
                r.gradients,
            ]
            for r in self.rows
        ]
        keep = [k for k in range(len(columns)) if k < 6 or any(_shown(row[k]) for row in rows)]
        notes = {
            "±": f"paired over {self.divisions} random divisions of every client's samples; "
            "wider than theirs alone, since they share samples (Nadeau and Bengio)"
        }
        if "chosen" in [columns[k] for k in keep]:
            notes["chosen"] = "by the test loss itself, which nobody has who trains"
        shown = [[row[k] for k in keep] for row in rows]
        return Table([columns[k] for k in keep], shown, notes, title="Advised and measured")

    def summary(self) -> str:
        """Return the outcome in a few lines."""
        first, *others = self.rows
        best = min(others, key=lambda row: row.worse)
        share = 100.0 * self.regret / first.loss if first.loss else math.nan
        lines = [
            {
                "confirmed": "Confirmed: no end is better than the advice by more than 1 %.",
                "not confirmed": f"NOT confirmed: {best.strategy} is better beyond its interval.",
                "cannot tell": "Cannot tell: the intervals allow the advice and its opposite.",
            }[self.judgement],
            f"Test loss {first.loss:.4g}; "
            + ", ".join(f"{r.strategy} {r.worse:+.2g} ± {r.half:.2g}" for r in others)
            + f" ({self.divisions} divisions, 95 %).",
            f"Regret against the lowest row: {self.regret:.2g}, {share:.1f} % of the loss.",
        ]
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
        counts = ("rounds", "gradients")
        numbers: list[dict[str, Any]] = [
            {k: math.nan if v is None and k not in counts else v for k, v in row.items()}
            for row in values["rows"]
        ]
        rows = [Row(**row) for row in numbers]
        return cls(**{**values, "rows": rows})

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()


def _shown(value: Any) -> bool:
    return value not in (None, "") and not (isinstance(value, float) and math.isnan(value))
