"""Equal work: so many rounds for each method that all have the gradient evaluations of the dearest.

Every method is trained for PROBE rounds without scores, which shows what a round costs and what is
spent once (a prologue, an epilogue, the adaptation before use). The dearest of them in ``rounds``
rounds sets the work of all; it trains for exactly these, and every other for more. Where the costs
of rounds differ (sampled clients, a coin), a method ends in the round that comes nearest.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sartor.core.errors import ConfigError, DivergedError
from sartor.results.result import Result
from sartor.training.callbacks import STOP

PROBE = 3
KINDS = {"gradients": "gradients"}
"""What may be made equal."""


@dataclass(frozen=True)
class Cost:
    """What a method costs in gradient evaluations, mean over its runs."""

    round: float
    once: float
    varies: bool

    @classmethod
    def of(cls, result: Result) -> Cost:
        """Read it off a short training."""
        rounds = np.asarray(result.ledger.gradient_evaluations)
        varies = bool((rounds != rounds[:, :1]).any()) or rounds.shape[1] < PROBE
        return cls(float(rounds.mean()), float(np.mean(result.ledger.setup_gradients)), varies)


class Budget:
    """A callback that ends a training in the round that comes nearest to its work."""

    why = "it has had its gradient evaluations"

    def __init__(self, work: float, each: float) -> None:
        self.work, self.each, self.spent = work, each, 0.0

    def on_start(self, start: Any) -> None:
        """Count what an interrupted training had spent, about."""
        self.spent = start.done * self.each

    def on_round(self, event: Any) -> Any:
        """Ask to stop if another round would lead away from the work."""
        self.spent += float(np.mean(event.cost["gradient_evaluations"]))
        return STOP if self.spent + self.each / 2 > self.work else None


def check(kind: str, rounds: int | None, stops: bool) -> None:
    """Refuse what does not go together with equal work."""
    if kind not in KINDS:
        raise ConfigError(f"equal must be 'gradients', got {kind!r}.")
    if rounds is None:
        raise ConfigError(
            "equal='gradients' makes every method as dear as the dearest in a number of rounds; "
            "give that number, such as rounds=20 (--rounds 20)."
        )
    if stops:
        raise ConfigError(
            "equal='gradients' and early stopping cannot both decide how long a method trains; "
            "leave one of them out."
        )


def lengths(
    names: Sequence[str], rounds: int, train: Callable[[str, dict[str, Any]], Result]
) -> dict[str, dict[str, Any]]:
    """Return for every method the keywords of ``fit`` that give it the work of the dearest.

    Args:
        names: the methods; ``auto`` chooses its own rounds and is left as it is.
        rounds: what the dearest trains for.
        train: trains a method with some keywords of ``fit`` on top of those of the comparison.
    """
    quiet = {"rounds": min(rounds, PROBE), "eval_every": PROBE, "progress": None, "callbacks": ()}
    costs: dict[str, Cost] = {}
    for name in names:
        if name == "auto":
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they come again
                costs[name] = Cost.of(train(name, {**quiet, "out": None, "resume": False}))
        except DivergedError:  # and so will the training itself
            continue
    work = max((cost.once + rounds * cost.round for cost in costs.values()), default=0.0)
    found: dict[str, dict[str, Any]] = {name: {"rounds": rounds} for name in names}
    for name, cost in costs.items():
        if not cost.round:  # nothing that more rounds would add to
            continue
        number = max(1, round((work - cost.once) / cost.round))
        if not cost.varies:
            found[name] = {"rounds": number}
            continue
        most = math.ceil(1.5 * number) + PROBE
        found[name] = {"rounds": most, "callbacks": (Budget(work - cost.once, cost.round),)}
    return found
