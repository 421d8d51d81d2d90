"""The answer: should we federate, how much should each client personalise, what will it cost?"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from sartor.adviser.features import View
from sartor.adviser.plan import CostPlan, Strategy
from sartor.adviser.verification import Verification
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.results.tables import Table, jsonable
from sartor.theory import linear_models
from sartor.training.progress import Progress

Basis = Literal["evidence", "theory", "trial"]
Verdict = Literal["alone", "one model", "personalise", "cannot tell"]
Verifier = Callable[["Advice", Progress | None], Verification]

CONTRADICTED = "by the theory, which held-out samples contradict"
"""What stands below expected errors that cannot be trusted."""

METHODS = {"local": "local", "global": "fedavg", "personalised": "fedprox"}
"""The method of the library that carries a strategy out, unless the settings name another."""

KINDS = {"evidence": "held-out loss", "theory": "excess loss", "trial": "validation loss"}
"""What the errors of an advice are, by its basis."""

VERDICTS: dict[Strategy, Verdict] = {
    "local": "alone",
    "global": "one model",
    "personalised": "personalise",
}
"""What a strategy answers, where the data can tell."""


@dataclass(frozen=True)
class Subject:
    """What an advice is about, for its verification.

    Attributes:
        federation: the data, with the features that the model takes.
        view: how the convex model sees them; None for a trial.
        clients: the clients' samples as a linear model has them; None for a trial.
        model: the network of a trial; None for the theory, where ``view`` has it.
        local: local training of a trial.
        rounds: of the recommendation, or of the trial.
        seed: of the runs.
        device: where to train.
        plans: steps and costs, by strategy; empty for a trial.
        centres: the exact global models, by strategy; empty for a trial.
    """

    federation: Federation
    view: View | None
    clients: linear_models.Clients | None
    model: nn.Module | None
    local: Local | None
    rounds: int
    seed: int
    device: str
    plans: dict[str, CostPlan] = field(default_factory=dict)
    centres: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Client:
    """What the adviser says of one client.

    Attributes:
        name: of the client.
        samples: n_i.
        distance: how far its best model is estimated to lie from the mean of all, √max(d̂_i², 0);
            NaN where it could not be estimated.
        noise: √t̂_i, the expected distance of its own fit from its best model.
        prox_strength: λ_i.
        alone: expected loss above the best possible if it trains alone (theory), or its validation
            loss (trial).
        one_model: the same with one model for all.
        advised: the same with the recommendation.
        half: half the width of the 95 % interval of the gain; NaN where there is none.
    """

    name: str
    samples: int
    distance: float
    noise: float
    prox_strength: float
    alone: float
    one_model: float
    advised: float
    half: float = math.nan

    @property
    def outcome(self) -> str:
        """What the recommendation does to this client: "gains", "loses" or "cannot tell"."""
        if not abs(self.gain) > self.half:
            return "cannot tell"
        return "gains" if self.gain > 0 else "loses"

    @property
    def gain(self) -> float:
        """How much loss the recommendation saves against training alone."""
        return self.alone - self.advised

    @property
    def hurt_by_one_model(self) -> bool:
        """Whether a single global model is expected to be worse than training alone."""
        return self.one_model > self.alone


@dataclass(frozen=True)
class Advice:
    """What ``advise`` found.

    Attributes:
        basis: "evidence" (a learned prior, judged by samples left out), "theory" (estimates from
            the clients' fits) or "trial" (λ by training).
        strategy: what is recommended: "local", "global" or "personalised".
        reason: the regime, in one sentence.
        prox_strength: λ of the recommendation; 0 for local, ∞ for global.
        clients: one entry per client.
        pulls: values of λ from 0 to ∞.
        errors: mean error at these: loss of samples left out (evidence), expected excess loss
            (theory) or validation loss (trial).
        rules: λ by each rule, name -> value; empty for a trial.
        constants: n, m, N, L, μ, ρ, and R with its standard errors, by name.
        plan: steps and predicted cost; None for a trial in which no clients train together.
        model: what was fitted, in words.
        doubts: why the theory was not used, or how far it can be trusted.
        ways_out: how to resolve the doubts.
        settings: what a run needs to carry the recommendation out.
        held_out: mean losses on held-out samples. Of the theory's check: "alone", "theory" (with
            its choice) and "one model"; "gap" and "error" of the theory's choice against the better
            end. Of the evidence: "alone", "one model" and "personalised"; "gain" of the better of
            the last two over the first and "degree", what personalising saves against one model,
            each with "_half", half the width of its 95 % interval. Empty for a trial.
        asked: bytes that the advice itself takes, both ways, all clients, were the clients apart:
            for the "estimates" and the "held-out check", or for the "trial".
        measured: the advice by a measure that was asked for; see ``sartor.adviser.measured``.
        subject: what verification trains; not part of the JSON.
        verifier: trains and compares (``sartor.adviser.verify``); not part of the JSON.
        verdict: the answer: "alone", "one model", "personalise" or "cannot tell"; that of the
            strategy if empty.
    """

    basis: Basis
    strategy: Strategy
    reason: str
    prox_strength: float
    clients: list[Client]
    pulls: list[float]
    errors: list[float]
    rules: dict[str, float]
    constants: dict[str, float]
    plan: CostPlan | None
    model: str
    doubts: list[str] = field(default_factory=list)
    ways_out: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    subject: Any = field(default=None, repr=False, compare=False)
    verifier: Verifier | None = field(default=None, repr=False, compare=False)
    verdict: str = ""

    def __post_init__(self) -> None:
        """Fill in the verdict that the strategy implies."""
        object.__setattr__(self, "verdict", self.verdict or VERDICTS[self.strategy])

    @property
    def method(self) -> str:
        """The library's method that carries the recommendation out."""
        return str(self.settings.get("method", METHODS[self.strategy]))

    @property
    def kind(self) -> str:
        """What the errors are: held-out, excess or validation loss."""
        return KINDS[self.basis]

    @property
    def contradicted(self) -> bool:
        """Whether held-out samples contradict the theory, whose expected errors are then wrong."""
        checked = self.basis == "theory" and bool(self.held_out)
        return checked and self.held_out["gap"] > self.held_out["error"]

    @property
    def hurt(self) -> list[str]:
        """The clients that a single global model is expected to hurt."""
        return [client.name for client in self.clients if client.hurt_by_one_model]

    def error_at(self, pull: float) -> float:
        """Return the mean error at the tried λ nearest to a value."""
        tried = np.asarray(self.pulls)
        if math.isinf(pull) or pull == 0.0:
            return self.errors[-1 if pull else 0]
        inner = tried[1:-1]
        return self.errors[1 + int(np.abs(np.log(inner / pull)).argmin())]

    def table(self) -> Table:
        """Return one row per client: size, distance, λ_i, expected errors and gain."""
        shown = {
            "samples": "samples",
            "distance": "distance",
            "noise": "noise",
            "lambda_i": "prox_strength",
            "alone": "alone",
            "one model": "one_model",
            "advised": "advised",
            "gain": "gain",
        }
        if self.basis != "theory":  # weights of a network cannot be compared
            del shown["distance"], shown["noise"]
        if self.basis == "evidence":  # a pull for each coordinate; and gains have intervals
            del shown["lambda_i"]
            shown |= {"± 95 %": "half", "outcome": "outcome"}
        rows = [
            [
                c.name,
                *(getattr(c, key) for key in shown.values()),
                "yes" if c.hurt_by_one_model else "no",
            ]
            for c in self.clients
        ]
        columns = ["client", *shown, "one model hurts"]
        formats = {"lambda_i": "strength"}
        notes = {"expected": CONTRADICTED} if self.contradicted else {}
        expected = "" if self.basis == "evidence" else "Expected "
        title = f"{expected}{self.kind} of every client".capitalize()
        return Table(columns, rows, notes, formats=formats, title=title)

    def costs(self) -> Table:
        """Return the steps and the predicted cost, a row each."""
        if self.plan is None:
            return Table(["quantity", "value"], [], title="Cost")
        p = self.plan
        if self.basis == "evidence":  # every round solves; there are no steps to choose
            exact = [
                ["rounds", p.rounds],
                ["megabytes, both ways", p.bytes_total / 1e6],
                ["gradient evaluations", p.gradients],
            ]
            return Table(["quantity", "value"], exact, title="Cost")
        rows: list[list[Any]] = [
            ["local steps a round K", p.num_local_steps],
            ["local step size η", p.local_lr],
        ]
        if p.strategy == "personalised":
            rows.append(["server step size γ", p.server_lr])
        rows += [
            ["rounds, predicted", p.rounds],
            [
                "rounds, guaranteed" if self.basis == "theory" else "rounds of the trial",
                p.guaranteed_rounds,
            ],
            ["megabytes, both ways", p.bytes_total / 1e6],
            ["gradient evaluations", p.gradients],
            *(
                [f"megabytes, once, for the {name}", count / 1e6]
                for name, count in self.asked.items()
            ),
        ]
        return Table(["quantity", "value"], rows, title="Steps and cost")

    def summary(self) -> str:
        """Return the answer in a few lines."""
        options = "".join(f", {k}={v}" for k, v in self.settings.get("options", {}).items())
        by = f"{self.method}{options if self.basis == 'evidence' else ''}"
        pull = f" with λ = {self.prox_strength:.3g}" if self.basis != "evidence" else ""
        what = {
            "local": f"Do not federate: every client trains alone ({by}).",
            "global": f"Federate, with one model for all ({by}).",
            "personalised": f"Federate, and personalise{pull} ({by}).",
        }[self.strategy]
        if self.verdict == "cannot tell":
            lower = what[0].lower() + what[1:]
            what = f"These data cannot tell whether to federate. The safer bet: {lower}"
        ends = f"{self.errors[0]:.4g} alone, {self.errors[-1]:.4g} with one model"
        at = self.error_at(self.prox_strength)
        expected = f"Expected mean {self.kind}: {at:.4g} ({ends}; {self.model})."
        if self.basis == "evidence":
            seen = self.held_out
            expected = (
                f"Mean {self.kind}: {seen['alone']:.4g} alone, {seen['one model']:.4g} with one "
                f"model, {seen['personalised']:.4g} personalised ({self.model})."
            )
        if self.contradicted:
            seen = self.held_out
            expected = (
                f"Mean loss on held-out samples: {seen['alone']:.4g} alone, "
                f"{seen['one model']:.4g} with one model ({self.model}). Expected errors are the "
                "theory's, which these contradict."
            )
        lines = [what, self.reason, expected]
        sends = self.basis == "evidence" or self.strategy != "local"
        if self.plan is not None and sends:
            p = self.plan
            lines.append(
                f"Cost: about {p.rounds} rounds, {p.bytes_total / 1e6:.3g} MB and "
                f"{p.gradients:,} gradient evaluations."
            )
        hurt = self.hurt
        if self.basis == "evidence":
            lines += [] if self.strategy == "local" else [self._outcomes()]
        elif hurt:
            lines.append(
                f"One model for all would hurt {len(hurt)} of {len(self.clients)} clients: "
                f"{_some(hurt)}."
            )
        else:
            lines.append("One model for all would hurt nobody.")
        lines += [f"Note: {doubt}" for doubt in self.doubts]
        lines += [f"Way out: {way}" for way in self.ways_out]
        return "\n".join(lines)

    def _outcomes(self) -> str:
        """Say how many clients gain and lose, by the intervals of their own samples."""
        named = {
            word: [c.name for c in self.clients if c.outcome == word] for word in ("gains", "loses")
        }
        gaining, losing = (len(found) for found in named.values())
        unsure = len(self.clients) - gaining - losing
        who = f" ({_some(named['loses'])})" if losing else ""
        return (
            f"Of {len(self.clients)} clients, by their own samples alone: {gaining} surely gain, "
            f"{losing} surely lose{who}, {unsure} cannot tell."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values; ∞ is the string "inf"."""
        plan = None if self.plan is None else vars(self.plan)
        found = {
            "basis": self.basis,
            "strategy": self.strategy,
            "verdict": self.verdict,
            "method": self.method,
            "reason": self.reason,
            "prox_strength": self.prox_strength,
            "model": self.model,
            "constants": self.constants,
            "rules": self.rules,
            "plan": plan,
            "pulls": self.pulls,
            "errors": self.errors,
            "clients": [
                {
                    **vars(c),
                    "gain": c.gain,
                    "outcome": c.outcome,
                    "hurt_by_one_model": c.hurt_by_one_model,
                }
                for c in self.clients
            ],
            "doubts": self.doubts,
            "ways_out": self.ways_out,
            "settings": self.settings,
            "held_out": self.held_out,
            "measured": self.measured,
            "asked": self.asked,
        }
        result: dict[str, Any] = jsonable(_spelled(found))
        return result

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Advice:
        """Return the advice that ``to_dict`` wrote down; it can be read, but not verified."""
        known = {key: _unspelled(value) for key, value in values.items() if key != "method"}
        reported = ("gain", "outcome", "hurt_by_one_model")
        clients = [{k: v for k, v in c.items() if k not in reported} for c in known["clients"]]
        plan = known["plan"]
        changed = {
            "clients": [Client(**_numbers(client)) for client in clients],
            "plan": None if plan is None else CostPlan(**_numbers(plan)),
            "errors": [math.nan if error is None else error for error in known["errors"]],
        }
        return cls(**{**known, **changed})

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self.summary().splitlines())
        return lines + self.table()._repr_html_()

    def verify(self, *, progress: Progress | None = None) -> Verification:
        """Put the recommendation beside its rivals, on divisions of all samples drawn anew.

        Args:
            progress: shows how far it is.

        Raises:
            ConfigError: the advice was read from a file, which has no data to train on.
            FederationError: no client has two samples.
        """
        if self.subject is None or self.verifier is None:
            raise ConfigError(
                "This advice was read from a file, which holds no data to train on; ask again with "
                "sartor.advise(federation), or sartor advise --verify, and verify that."
            )
        return self.verifier(self, progress)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "")


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return missing values as NaN."""
    return {k: math.nan if v is None else v for k, v in values.items()}


def _unspelled(value: Any) -> Any:
    """Return infinities that were spelled as numbers."""
    if isinstance(value, dict):
        return {k: _unspelled(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_unspelled(v) for v in value]
    return math.inf if value == "inf" else value


def _spelled(value: Any) -> Any:
    """Spell infinities, which JSON has not."""
    if isinstance(value, dict):
        return {k: _spelled(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value
