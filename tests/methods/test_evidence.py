"""Evidence: its limits, and what NumPy and SciPy find for the same prior on their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch import nn

import sartor
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import ServerContext
from sartor.core.task import Task, binary_cross_entropy, cross_entropy, squared_error
from sartor.methods import build
from sartor.methods.evidence import SUMS
from sartor.methods.parts.curves import derivatives

SIZES = (5, 14, 9, 70, 33)
D = 3


def draw(seed: int, kind: str = "regression") -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draw unequal clients: correlated features, models around a common one."""
    rng = np.random.default_rng(seed)
    mean, mix = np.array([1.0, -0.5, 0.0]), rng.normal(size=(D, D)) * 0.4 + np.eye(D)
    xs, ys = [], []
    for n in SIZES:
        x = rng.normal(size=(n, D)) @ mix
        score = x @ (mean + rng.normal(size=D) * np.array([0.8, 0.1, 0.4])) + 0.5 * rng.normal()
        if kind == "regression":
            y = score + rng.normal(size=n)
        else:
            y = (rng.uniform(size=n) < special.expit(score)).astype(np.int64)
        xs.append(x)
        ys.append(y)
    return xs, ys


def fitted(xs: list[np.ndarray], ys: list[np.ndarray], **settings: Any) -> sartor.Result:
    """Train on all samples; one more of each client is its test."""
    x = np.concatenate([np.concatenate([x, x[:1]]) for x in xs])
    y = np.concatenate([np.concatenate([y, y[:1]]) for y in ys])
    ids = np.repeat(np.arange(len(xs)), [len(y) + 1 for y in ys])
    last = np.cumsum([len(y) + 1 for y in ys]) - 1
    lists = [np.flatnonzero((ids == k) & ~np.isin(np.arange(len(y)), last)) for k in range(len(xs))]
    outputs = 1 if y.dtype == np.float64 else int(y.max()) + 1
    split = sartor.data.split.Ragged
    fed = sartor.Federation(
        torch.from_numpy(x),
        torch.from_numpy(y),
        split.from_lists(lists),
        split.empty(len(xs)),
        split.from_lists([[k] for k in last]),
        [str(k) for k in range(len(xs))],
        0 if outputs == 1 else outputs,
    )
    usual = {"rounds": 60, "dtype": "float64", "eval_every": 60, "model": nn.Linear(D, outputs)}
    options = {"multiples": False, **settings.pop("options", {})}
    return sartor.fit("evidence", fed, progress=False, options=options, **{**usual, **settings})


def coefficients(result: sartor.Result, client: int) -> np.ndarray:
    """Return the bias and the weights of a client's model, in the order of ``server``."""
    model = result.model(client)
    return np.concatenate([p.detach().numpy().ravel() for _, p in sorted(model.named_parameters())])


def server(result: sartor.Result, name: str) -> np.ndarray:
    """Return a tensor of the server, the bias before the weights."""
    found = result.server_state()[0]["server"][name]
    if isinstance(found, dict):
        return np.concatenate([found[k].numpy().ravel() for k in sorted(found)])
    return found.numpy()


def with_one(x: np.ndarray) -> np.ndarray:
    """Put the constant before the features."""
    return np.concatenate([np.ones((len(x), 1)), x], 1)


def joint(xs: list[np.ndarray], ys: list[np.ndarray], t: Any, s: Any, noise: float = 1.0) -> Any:
    """Solve for all models at once: (mean, models), as one ridge regression."""
    m, p = len(xs), D + 1
    t, s = np.broadcast_to(t, p), np.broadcast_to(s, p)
    a, b = np.zeros(((m + 1) * p, (m + 1) * p)), np.zeros((m + 1) * p)
    a[:p, :p] += np.diag(1 / s) + m * np.diag(1 / t)
    for k, (x, y) in enumerate(zip(map(with_one, xs), ys, strict=True), 1):
        own = slice(k * p, (k + 1) * p)
        a[own, own] = x.T @ x / noise + np.diag(1 / t)
        a[own, :p] = a[:p, own] = -np.diag(1 / t)
        b[own] = x.T @ y / noise
    found = np.linalg.solve(a, b).reshape(m + 1, p)
    return found[0], found[1:]


def log_marginal(xs: Any, ys: Any, t: Any, s: Any, noise: float) -> float:
    """Return log p(y) of the Gaussian model: no Laplace, no Newton, one big covariance."""
    big = np.concatenate([with_one(x) for x in xs])
    owner = np.repeat(np.arange(len(xs)), [len(x) for x in xs])
    same = owner[:, None] == owner[None, :]
    cov = (big * s) @ big.T + same * ((big * t) @ big.T) + noise * np.eye(len(big))
    return float(stats.multivariate_normal.logpdf(np.concatenate(ys), np.zeros(len(big)), cov))


def test_a_given_prior_is_fedprox_with_the_whole_problem_solved() -> None:
    """With τ² and S given, mean and models are those of one joint ridge regression."""
    xs, ys = draw(0)
    found = fitted(xs, ys, options={"learn": False}, hyper={"spread": 0.3, "width": 5.0}, rounds=3)
    mean, models = joint(xs, ys, 0.3, 5.0)
    np.testing.assert_allclose(server(found, "params"), mean, atol=1e-10)
    for k, model in enumerate(models):
        np.testing.assert_allclose(coefficients(found, k), model, atol=1e-10)


def test_no_spread_is_one_model_and_a_wide_one_is_every_client_alone() -> None:
    """τ = 0 is the pooled ridge regression; τ → ∞ least squares of each client."""
    xs, ys = draw(1)
    fixed = {"options": {"learn": False}, "rounds": 3}
    one = fitted(xs, ys, hyper={"spread": 0.0, "width": 2.0}, **fixed)
    x, y = with_one(np.concatenate(xs)), np.concatenate(ys)
    pooled = np.linalg.solve(x.T @ x + np.eye(D + 1) / 2.0, x.T @ y)
    alone = fitted(xs, ys, hyper={"spread": 1e9, "width": 2.0}, **fixed)
    for k in range(len(xs)):
        np.testing.assert_allclose(coefficients(one, k), pooled, atol=1e-10)
        least = np.linalg.lstsq(with_one(xs[k]), ys[k], rcond=None)[0]
        np.testing.assert_allclose(coefficients(alone, k), least, atol=1e-6)


@pytest.mark.parametrize(("groups", "pool"), [("scalar", None), ("layer", None), ("diag", 0.0)])
def test_what_is_learned_is_where_the_marginal_likelihood_is_flat(groups: str, pool: Any) -> None:
    """No variance of a group, nor the noise, can be moved to a larger log p(y)."""
    xs, ys = draw(2)
    hyper = {} if pool is None else {"pool": pool}
    found = fitted(xs, ys, options={"groups": groups}, hyper=hyper, rounds=400, eval_every=400)
    t, s, noise = server(found, "spread"), server(found, "width"), float(server(found, "noise"))
    best = log_marginal(xs, ys, t, s, noise)
    assert float(server(found, "log_evidence")) == pytest.approx(best, abs=1e-3)
    parts = {
        "scalar": [np.ones(4, bool)],
        "layer": [np.eye(4, dtype=bool)[0], ~np.eye(4, dtype=bool)[0]],
        "diag": list(np.eye(4, dtype=bool)),
    }[groups]
    for factor in (0.9, 1.1):
        for part in parts:
            assert log_marginal(xs, ys, np.where(part, factor * t, t), s, noise) <= best + 1e-4
        assert log_marginal(xs, ys, t, s, factor * noise) <= best + 1e-4


def test_samples_left_out_are_those_of_fits_without_them() -> None:
    """On a regression the approximation is exact: every sample against a fit of all others."""
    xs, ys = draw(3)
    fixed = {"options": {"learn": False}, "hyper": {"spread": 0.3, "width": 5.0}, "rounds": 4}
    found = fitted(xs, ys, **fixed)
    total = 0.0
    for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
        for i in range(len(y)):
            less_x = [*xs[:k], np.delete(x, i, 0), *xs[k + 1 :]]
            less_y = [*ys[:k], np.delete(y, i), *ys[k + 1 :]]
            own = joint(less_x, less_y, 0.3, 5.0)[1][k]
            total += 0.5 * float(y[i] - with_one(x[i : i + 1])[0] @ own) ** 2
    assert float(server(found, "left_out")) == pytest.approx(total / sum(SIZES), rel=1e-6)


def test_classification_reaches_the_optimum_that_scipy_finds() -> None:
    """The penalised log-likelihood of all clients, by Newton here and by L-BFGS there."""
    xs, ys = draw(4, "classification")
    found = fitted(xs, ys, options={"learn": False}, hyper={"spread": 0.3, "width": 5.0}, rounds=12)
    m, p = len(xs), 2 * (D + 1)

    def cost(flat: np.ndarray) -> float:
        mean, *models = flat.reshape(m + 1, p)
        value = 0.5 * (mean**2).sum() / 5.0
        for x, y, w in zip(xs, ys, models, strict=True):
            scores = w[:2] + x @ w[2:].reshape(2, D).T
            value += (special.logsumexp(scores, axis=1) - scores[np.arange(len(y)), y]).sum()
            value += 0.5 * ((w - mean) ** 2).sum() / 0.3
        return value

    start = np.zeros((m + 1) * p)
    best = optimize.minimize(cost, start, method="L-BFGS-B", options={"maxfun": 10**6})
    ours = np.concatenate([server(found, "params"), *(coefficients(found, k) for k in range(m))])
    assert cost(ours) <= best.fun + 1e-9
    np.testing.assert_allclose(ours, best.x, atol=2e-3)


def test_clients_of_one_class_and_separable_ones_are_answered() -> None:
    """Nothing diverges where a client alone has no finite best model."""
    xs, _ = draw(5, "classification")
    ys = [(x[:, 0] > 0).astype(np.int64) for x in xs]
    ys[0][:] = 0
    xs, ys = (
        [x[:3] if k == 1 else x for k, x in enumerate(xs)],
        [y[:3] if k == 1 else y for k, y in enumerate(ys)],
    )
    found = fitted(xs, ys, rounds=20)
    for k in range(len(xs)):
        assert np.isfinite(coefficients(found, k)).all()
    assert np.isfinite(server(found, "log_evidence"))


def test_units_of_the_target_do_not_matter() -> None:
    """Targets in other units give the same models in those units."""
    xs, ys = draw(6)
    one = fitted(xs, ys, rounds=80, eval_every=80)
    other = fitted(xs, [1000.0 * y for y in ys], rounds=80, eval_every=80)
    for k in range(len(xs)):
        np.testing.assert_allclose(coefficients(other, k), 1000 * coefficients(one, k), rtol=1e-3)


def test_the_order_of_clients_does_not_matter() -> None:
    """Clients the other way round have the same models."""
    xs, ys = draw(7, "classification")
    one, other = fitted(xs, ys), fitted(xs[::-1], ys[::-1])
    for k in range(len(xs)):
        mine, theirs = coefficients(one, k), coefficients(other, len(xs) - 1 - k)
        np.testing.assert_allclose(mine, theirs, atol=1e-9)


def test_large_models_and_other_tasks_are_refused() -> None:
    """The error says how many parameters there are, and what to use."""
    with pytest.raises(ConfigError, match=r"7,850.*head alone"):
        build("evidence", Task(nn.Linear(784, 10)), Local(), {})
    with pytest.raises(ConfigError, match="next-token"):
        build("evidence", Task(nn.Linear(3, 2), kind="next-token"), Local(), {})


@pytest.mark.parametrize("kind", ["classification", "regression", "multilabel"])
def test_derivatives_are_those_of_the_loss(kind: str) -> None:
    """First and second derivatives by the scores, against automatic ones of the task's loss."""
    drawn = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 3, generator=drawn, dtype=torch.float64)
    y = torch.randn(5, 3, generator=drawn, dtype=torch.float64)
    loss: Any = squared_error
    if kind == "multilabel":
        y, loss = (y > 0).double(), binary_cross_entropy
    if kind == "classification":
        y, loss = torch.tensor([0, 2, 1, 1, 0]), cross_entropy
    first, second = derivatives(kind, scores, y)
    for k in range(5):

        def one(s: torch.Tensor, k: int = k) -> torch.Tensor:
            return loss(s[None], y[k : k + 1])[0]

        torch.testing.assert_close(first[k], torch.func.grad(one)(scores[k]))
        torch.testing.assert_close(second[k], torch.func.jacrev(torch.func.grad(one))(scores[k]))


def test_who_is_absent_is_counted_by_those_who_are_there() -> None:
    """Of alike clients half give what all give; what the absent would have sent does not matter."""
    task = Task(nn.Linear(2, 2))
    method = build("evidence", task, Local(), {"multiples": False})
    hyper = {k: torch.tensor(v.default, dtype=torch.float64) for k, v in method.hyper.items()}
    key, ids = torch.zeros(2, dtype=torch.int64), torch.arange(4)
    ctx = ServerContext(hyper, key, torch.tensor(3), torch.full((4,), 9), ids, ids >= 0)
    params = {k: v.double() for k, v in task.init(0).items()}
    server = method.init_server(params, ctx)
    one = {name: torch.rand(6, dtype=torch.float64) for name in ("squares", "sure")}
    one |= {name: torch.rand(1, dtype=torch.float64) for name in ("evidence", "left_out")}
    one |= {"slope": torch.rand(1, 6, dtype=torch.float64)}
    one |= {"curvature": torch.eye(6, dtype=torch.float64)[None] + 0.1}
    one |= {name: torch.tensor(7.0, dtype=torch.float64) for name in SUMS if name not in one}
    uploads = {k: v.expand(4, *v.shape).clone() for k, v in one.items()}
    whole = method.aggregate(server, uploads, ctx)
    half = ctx._replace(present=ids < 2)
    spoiled = {k: v.index_fill(0, ids[2:], torch.nan) for k, v in uploads.items()}
    torch.testing.assert_close(method.aggregate(server, spoiled, half), whole)
