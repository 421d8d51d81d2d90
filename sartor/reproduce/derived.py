"""Hyper-parameters that follow from the data of a run, written as arithmetic in a plan.

``set = { local_lr = "1 / (L + prox_strength)" }`` gives every run a step of its own. An expression
may use + − * /, min, max, sqrt, numbers, the row's other hyper-parameters, and:

| name | meaning |
|---|---|
| L | max_i Λ_max(X_iᵀX_i/n_i)/4, the smoothness of the clients' logistic losses |
| n | training samples of the average client |
| m | clients |
| d | features |
| R | √mean_i‖w_i* − w_g*‖², where the true models are known |

A word that the column defines (``values = { small = 0.2 }``) is replaced before: it may be all of a
value, not a part of an expression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sartor.core.errors import ConfigError, did_you_mean
from sartor.reproduce.arithmetic import evaluate, parse
from sartor.reproduce.problems import Problem


def derive(hyper: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """Replace every expression among the hyper-parameters by its value for one problem.

    Raises:
        ConfigError: an expression uses a name that is not known, or something else than arithmetic.
    """

    def name(word: str, asked: tuple[str, ...] = ()) -> float:
        if word in asked:
            raise ConfigError(
                f"{word!r} follows from itself; give one of {sorted(asked)} a number."
            )
        if word not in hyper:
            if word not in FACTS:
                known = did_you_mean(word, [*FACTS, *hyper])
                raise ConfigError(
                    f"{word!r} is no number that a run can derive a value from{known}"
                )
            return FACTS[word](problem)
        value = hyper[word]
        if isinstance(value, str):
            return evaluate(parse(value), name=lambda other: name(other, (*asked, word)))
        return float(value)

    return {k: name(k) if isinstance(v, str) else v for k, v in hyper.items()}


def jittered(hyper: Mapping[str, Any], spread: float, seed: int) -> dict[str, Any]:
    """Multiply every number among the hyper-parameters by 1 + spread · z, z ~ N(0, 1).

    z follows from the seed and the name, so the rows of one seed share it. Never below a tenth of
    the number.
    """
    if not spread:
        return dict(hyper)

    def drawn(name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        z = np.random.default_rng([seed, *name.encode()]).standard_normal()
        return value * max(0.1, 1.0 + spread * float(z))

    return {name: drawn(name, value) for name, value in hyper.items()}


def smoothness(problem: Problem) -> float:
    """Return L = max_i Λ_max(X_iᵀX_i/n_i)/4 over the clients' training samples."""
    fed = problem.federation
    features = (fed.x[fed.train.of(i)].double().flatten(1) for i in range(fed.num_clients))
    return max(float(torch.linalg.matrix_norm(x, 2)) ** 2 / len(x) / 4 for x in features)


def heterogeneity(problem: Problem) -> float:
    """Return R, the root mean square distance of the true models from their mean."""
    if problem.truth is None:
        raise ConfigError(
            "'R' needs a synthetic problem, whose true models are known; set data = "
            "'logistic-theory', 'logistic-literal' or 'logistic-radius'."
        )
    away = problem.truth - problem.truth.mean(0)
    return float(away.square().sum(1).mean().sqrt())


FACTS: dict[str, Callable[[Problem], float]] = {
    "L": smoothness,
    "R": heterogeneity,
    "n": lambda problem: len(problem.federation.train.rows) / problem.federation.num_clients,
    "m": lambda problem: float(problem.federation.num_clients),
    "d": lambda problem: float(problem.federation.x[0].numel()),
}
"""What an expression may ask of a problem."""
