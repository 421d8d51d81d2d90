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
from sartor.core.method import Batch, ServerContext
from sartor.core.task import Task, binary_cross_entropy, cross_entropy, squared_error
from sartor.methods import build
from sartor.methods.evidence import SUMS
from sartor.methods.parts.curves import derivatives, left_out, losses
from sartor.theory import learned_prior
from sartor.theory.linear_models import Clients, basis, predict
from tests.toys import Net

SIZES = (5, 14, 9, 70, 33)
D = 3


def draw(
    seed: int, kind: str = "regression", shift: float = 0.0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draw unequal clients: correlated features, models around a common one."""
    rng = np.random.default_rng(seed)
    mean, mix = np.array([1.0, -0.5, 0.0]), rng.normal(size=(D, D)) * 0.4 + np.eye(D)
    xs, ys = [], []
    for n in SIZES:
        x = rng.normal(size=(n, D)) @ mix
        score = x @ (mean + rng.normal(size=D) * np.array([0.8, 0.1, 0.4])) + 0.5 * rng.normal()
        score = score + shift
        if kind == "regression":
            y = score + rng.normal(size=n)
        else:
            y = (rng.uniform(size=n) < special.expit(score)).astype(np.int64)
        xs.append(x)
        ys.append(y)
    return xs, ys


def federated(xs: list[np.ndarray], ys: list[np.ndarray], prefix: str = "") -> sartor.Federation:
    """Return clients that train on all samples; one more of each is its test."""
    x = np.concatenate([np.concatenate([x, x[:1]]) for x in xs])
    y = np.concatenate([np.concatenate([y, y[:1]]) for y in ys])
    ids = np.repeat(np.arange(len(xs)), [len(y) + 1 for y in ys])
    last = np.cumsum([len(y) + 1 for y in ys]) - 1
    lists = [np.flatnonzero((ids == k) & ~np.isin(np.arange(len(y)), last)) for k in range(len(xs))]
    split = sartor.data.split.Ragged
    return sartor.Federation(
        torch.from_numpy(x),
        torch.from_numpy(y),
        split.from_lists(lists),
        split.empty(len(xs)),
        split.from_lists([[k] for k in last]),
        [f"{prefix}{k}" for k in range(len(xs))],
        0 if y.dtype == np.float64 else int(y.max()) + 1,
    )


def fitted(xs: list[np.ndarray], ys: list[np.ndarray], **settings: Any) -> sartor.Result:
    """Train on all samples."""
    fed = federated(xs, ys)
    model = nn.Linear(D, max(fed.num_classes, 1))
    usual = {"rounds": 60, "dtype": "float64", "eval_every": 60, "model": model}
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
    apart = np.diag(t) if np.ndim(t) == 1 else t
    cov = (big * s) @ big.T + same * (big @ apart @ big.T) + noise * np.eye(len(big))
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


def test_a_sample_left_out_is_never_answered_better() -> None:
    """Nor where it would determine its model more than wholly, before the prior is learned.

    And the order of the classes does not matter, as it does to a factor that does not exist.
    """
    draw = np.random.default_rng(0)
    scores = torch.from_numpy(draw.normal(size=(1, 4, 60)))
    y = torch.from_numpy(draw.integers(0, 4, 60))
    errors, bend = derivatives("classification", scores, y)
    half = torch.from_numpy(draw.normal(size=(60, 4, 4)))
    size = torch.logspace(-2, 2, 60, dtype=torch.float64)[:, None, None]
    g = size * half @ half.mT
    most = torch.linalg.eigvals(bend[0].movedim(-1, 0) @ g).real.amax(-1)
    assert (most < 1.0).any()
    assert (most > 1.0).any()
    found = left_out(scores, errors, bend, g.movedim(0, -1)[None], "classification")
    gap = losses("classification", found, y) - losses("classification", scores, y)
    assert found.isfinite().all()
    assert (gap > 0.0).all()
    turn = torch.tensor([2, 0, 3, 1])
    order = torch.argsort(turn)[y]
    errors, bend = derivatives("classification", scores[:, turn], order)
    other = g[:, turn][:, :, turn].movedim(0, -1)[None]
    turned = left_out(scores[:, turn], errors, bend, other, "classification")
    torch.testing.assert_close(turned, found[:, turn], rtol=1e-6, atol=1e-9)


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


@pytest.mark.parametrize("multiples", [False, True])
def test_clients_of_one_class_and_separable_ones_are_answered(multiples: bool) -> None:
    """Nothing diverges where a client alone has no finite best model."""
    xs, _ = draw(5, "classification")
    ys = [(x[:, 0] > 0).astype(np.int64) for x in xs]
    ys[0][:] = 0
    xs, ys = (
        [x[:3] if k == 1 else x for k, x in enumerate(xs)],
        [y[:3] if k == 1 else y for k, y in enumerate(ys)],
    )
    found = fitted(xs, ys, options={"multiples": multiples}, rounds=20)
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
    first, second = derivatives(kind, scores.mT, y)
    torch.testing.assert_close(losses(kind, scores.mT, y), loss(scores, y))
    for k in range(5):

        def one(s: torch.Tensor, k: int = k) -> torch.Tensor:
            return loss(s[None], y[k : k + 1])[0]

        torch.testing.assert_close(first[:, k], torch.func.grad(one)(scores[k]))
        torch.testing.assert_close(
            second[..., k], torch.func.jacrev(torch.func.grad(one))(scores[k])
        )


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


def central(xs: list[np.ndarray], ys: list[np.ndarray], family: Any) -> Clients:
    """Stack the clients for the solver that has all samples at one place."""
    most, wide = max(map(len, ys)), D + 1
    x = torch.zeros(len(xs), most, wide, dtype=torch.float64)
    y, mask = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0], dtype=torch.bool)
    for k, (rows, targets) in enumerate(zip(xs, ys, strict=True)):
        x[k, : len(rows)] = torch.from_numpy(np.column_stack([rows, np.ones(len(rows))]))
        mask[k, : len(rows)] = True
        y[k, : len(rows)] = torch.from_numpy(targets.astype(np.float64))
    return Clients(x, y, mask, family, max(2, int(max(t.max() for t in ys)) + 1))


def scores_of(found: sartor.Result, client: int, x: np.ndarray) -> np.ndarray:
    """Return the scores of a client's model without their mean, which softmax does not see."""
    flat = coefficients(found, client)
    outputs = len(flat) // (D + 1)
    scores = flat[:outputs] + x @ flat[outputs:].reshape(outputs, D).T
    return scores if outputs == 1 else scores - scores.mean(1, keepdims=True)


@pytest.mark.parametrize("sharing", ["learned", "one", "alone"])
@pytest.mark.parametrize("family", ["linear", "logistic", "softmax"])
def test_rounds_find_what_a_solver_at_one_place_finds(
    family: str, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average over multiples: sums of 25 rounds here, a joint solve of all models there.

    Models, weights, evidence and the loss of samples left out. The solver at one place ends where
    variances change by less than a thousandth, and bounds S by other units; hence 0.02.
    """
    xs, ys = draw(2, "regression" if family == "linear" else "classification", shift=1.0)
    options: dict[str, Any] = {"multiples": True, "sharing": sharing}
    hyper: dict[str, float] = {"pool": 2.0} if sharing == "learned" else {}
    if family == "logistic" and hyper:
        hyper["pool"] = 1.0  # for each of two scores, in place of 2 for their difference
    if family == "softmax":
        ys = [y + (x[:, 1] > 0.7) for x, y in zip(xs, ys, strict=True)]
        if sharing == "learned":  # there a feature has one τ² for all classes; so take none here
            options["groups"], hyper = "layer", {}
            monkeypatch.setattr(learned_prior, "POOL", 1e12)
    clients = central(xs, ys, family)
    there = learned_prior.averaged(clients, one=sharing == "one", alone=sharing == "alone")
    here = fitted(xs, ys, options=options, hyper=hyper, rounds=25, eval_every=25)
    wanted = predict(clients, there.own)
    if family == "softmax":
        wanted = wanted @ basis(3).T
    if family == "logistic":
        wanted = wanted * torch.tensor([-0.5, 0.5], dtype=torch.float64)
    for k, x in enumerate(xs):
        np.testing.assert_allclose(scores_of(here, k, x), wanted[k, : len(x)], atol=2e-2)
    np.testing.assert_allclose(server(here, "weights"), there.weights, atol=1e-2)
    assert float(server(here, "log_evidence")) == pytest.approx(there.evidence, abs=1e-2)
    lost = float(there.losses.sum()) / sum(SIZES)
    assert float(server(here, "left_out")) == pytest.approx(lost, rel=1e-3)


def test_multiples_are_worth_it_where_classes_can_be_separated() -> None:
    """Samples left out are lost less under the average than under the learned prior alone."""
    xs, _ = draw(5, "classification")
    ys = [(x @ np.array([1.0, -0.5, 0.0]) > 0).astype(np.int64) for x in xs]
    one, many = (fitted(xs, ys, options={"multiples": m}, rounds=25) for m in (False, True))
    assert float(server(many, "left_out")) < 0.85 * float(server(one, "left_out"))
    assert 0.999 < server(many, "weights").sum() < 1.001
    assert server(many, "weights")[5] < 0.5  # the learned prior


def test_the_average_is_of_models_under_multiples_of_the_learned_prior() -> None:
    """On a regression: ridge regressions for each multiple in NumPy, with the weights sent."""
    xs, ys = draw(3)
    found = fitted(xs, ys, options={"multiples": True}, rounds=100, eval_every=100)
    t, s, noise = server(found, "spread"), server(found, "width"), float(server(found, "noise"))
    weights = server(found, "weights")
    low = 10**-0.5
    grid = [(a, b) for b in (low, 1.0, 10.0) for a in (low, 1.0, 10.0, 100.0)]
    solved = [joint(xs, ys, a * t, b * s, noise)[1] for a, b in grid]
    for k in range(len(xs)):
        wanted = sum(w * models[k] for w, models in zip(weights, solved, strict=True))
        np.testing.assert_allclose(coefficients(found, k), wanted, atol=1e-8)


@pytest.mark.parametrize("groups", ["layer", "diag", "full"])
def test_em_ends_where_mackay_does_and_a_full_spread_where_nothing_turns_it(groups: str) -> None:
    """Two steps, one fixed point; of a full T no direction can be changed for the better."""
    rng = np.random.default_rng(8)
    mix = np.array([[0.5, 0.0, 0.0], [0.4, 0.5, 0.0], [-0.3, 0.2, 0.6]])
    xs = [rng.normal(size=(60, D)) for _ in range(10)]
    ys = [
        x @ (1.0 + mix @ rng.normal(size=D)) + rng.normal() + 0.5 * rng.normal(size=60) for x in xs
    ]
    settings: dict[str, Any] = {"hyper": {} if groups == "layer" else {"pool": 0.0}, "rounds": 60}
    em = fitted(xs, ys, options={"groups": groups, "update": "em"}, **settings)
    t, s, noise = server(em, "spread"), server(em, "width"), float(server(em, "noise"))
    best = log_marginal(xs, ys, t, s, noise)
    assert float(server(em, "log_evidence")) == pytest.approx(best, abs=1e-4)
    if groups != "full":
        mackay = fitted(xs, ys, options={"groups": groups}, **settings)
        np.testing.assert_allclose(t, server(mackay, "spread"), rtol=2e-3)
        np.testing.assert_allclose(s, server(mackay, "width"), rtol=0.05)
        return
    for _ in range(20):
        turn = np.eye(4) + 0.05 * rng.normal(size=(4, 4))
        assert log_marginal(xs, ys, turn @ t @ turn.T, s, noise) < best
    with pytest.raises(ConfigError, match="64 parameters"):
        build("evidence", Task(nn.Linear(40, 2)), Local(), {"groups": "full"})


def test_pooled_with_many_clients_a_full_spread_is_that_of_its_tensors() -> None:
    """ν → ∞ leaves no freedom to the matrix: ``layer``."""
    xs, ys = draw(2)
    full = fitted(xs, ys, options={"groups": "full"}, hyper={"pool": 1e9}, rounds=60)
    layer = fitted(xs, ys, options={"groups": "layer"}, rounds=60)
    np.testing.assert_allclose(server(full, "spread"), np.diag(server(layer, "spread")), atol=1e-6)
    for k in range(len(xs)):
        np.testing.assert_allclose(coefficients(full, k), coefficients(layer, k), atol=1e-6)


def test_the_ends_are_ridge_regressions_of_the_ridge_that_is_learned() -> None:
    """One model: all samples in one; alone: each client by itself, with one ridge for all."""
    xs, ys = draw(2, shift=1.0)
    settings: dict[str, Any] = {"rounds": 60}
    one = fitted(xs, ys, options={"sharing": "one"}, **settings)
    alone = fitted(xs, ys, options={"sharing": "alone"}, **settings)
    x, y = with_one(np.concatenate(xs)), np.concatenate(ys)
    ridge = np.diag(float(server(one, "noise")) / server(one, "width"))
    pooled = np.linalg.solve(x.T @ x + ridge, x.T @ y)
    ridge = np.diag(float(server(alone, "noise")) / server(alone, "spread"))
    for k, (x, y) in enumerate(zip(map(with_one, xs), ys, strict=True)):
        np.testing.assert_allclose(coefficients(one, k), pooled, atol=1e-9)
        own = np.linalg.solve(x.T @ x + ridge, x.T @ y)
        np.testing.assert_allclose(coefficients(alone, k), own, atol=1e-9)
    assert not server(one, "spread").any()
    assert not server(alone, "params").any()
    for found, name, still in ((one, "width", "spread"), (alone, "spread", "width")):
        t, s, noise = (server(found, "spread"), server(found, "width"), server(found, "noise"))
        best = log_marginal(xs, ys, t, s, float(noise))
        assert float(server(found, "log_evidence")) == pytest.approx(best, abs=1e-5)
        assert not server(found, still).any() or name == "width"
        for factor in (0.9, 1.1):
            for part in (np.arange(4) == 0, np.arange(4) > 0):
                scale = np.where(part, factor, 1.0)
                moved = (t, s * scale) if name == "width" else (t * scale, s)
                assert log_marginal(xs, ys, *moved, float(noise)) <= best + 1e-4


def test_options_that_do_not_go_together_are_refused() -> None:
    """Each error says what to leave out."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for module, options, words in (
        (net, {"multiples": True}, "linear models"),
        (net, {"sharing": "alone"}, "linear models"),
        (nn.Linear(3, 2), {"sharing": "one", "groups": "layer"}, "groups has no effect"),
        (nn.Linear(3, 2), {"multiples": True, "learn": False}, "learned prior"),
    ):
        with pytest.raises(ConfigError, match=words):
            build("evidence", Task(module), Local(), options)


def test_a_newcomer_has_the_average_of_one_solve_under_each_prior() -> None:
    """On a regression: a ridge regression towards each w̄ in NumPy; without samples w̄ itself."""
    xs, ys = draw(3)
    found = fitted(xs, ys, options={"multiples": True}, rounds=30)
    t, noise = server(found, "spread"), float(server(found, "noise"))
    centres, weights = server(found, "centres"), server(found, "weights")
    x, y = xs[4][:6] + 0.3, ys[4][:6]
    model = found.onboard(federated([x], [y], "new"), rounds=1).model("new0")
    own = np.concatenate([p.detach().numpy().ravel() for _, p in sorted(model.named_parameters())])
    wanted, wide = np.zeros(D + 1), with_one(x)
    levels = [10**-0.5, 1.0, 10.0, 100.0] * 3
    for a, w, centre in zip(levels, weights, centres, strict=True):
        pull = np.diag(1.0 / (a * t))
        right = wide.T @ y / noise + pull @ centre
        wanted += w * np.linalg.solve(wide.T @ wide / noise + pull, right)
    np.testing.assert_allclose(own, wanted, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"sharing": "one"}, {"sharing": "alone"}])
def test_a_round_without_anybody_changes_nothing(options: dict[str, Any]) -> None:
    """Whatever the absent would have sent."""
    task = Task(nn.Linear(2, 2))
    method = build("evidence", task, Local(), options)
    hyper = {k: torch.tensor(v.default, dtype=torch.float64) for k, v in method.hyper.items()}
    key, ids = torch.zeros(2, dtype=torch.int64), torch.arange(3)
    ctx = ServerContext(hyper, key, torch.tensor(3), torch.full((3,), 9), ids, ids < 0)
    server = method.init_server({k: v.double() for k, v in task.init(0).items()}, ctx)
    many = len(server["weights"])
    shapes: dict[str, tuple[int, ...]] = {"slope": (many, 6), "curvature": (many, 6, 6)}
    shapes |= {"squares": (6,), "sure": (6,), "evidence": (many,), "left_out": (many,)}
    uploads = {k: torch.full((3, *shapes.get(k, ())), torch.nan).double() for k in SUMS}
    assert many > 1
    torch.testing.assert_close(method.aggregate(server, uploads, ctx), server)


def test_every_option_moves_the_result() -> None:
    """Models after six rounds differ from those of the defaults."""
    xs, ys = draw(2, "classification")
    first = {"rounds": 6, "eval_every": 6, "options": {"multiples": "auto"}}
    plain = coefficients(fitted(xs, ys, **first), 3)
    for option, value in (
        ("groups", "scalar"),
        ("groups", "layer"),
        ("groups", "full"),
        ("sharing", "one"),
        ("sharing", "alone"),
        ("multiples", False),
        ("update", "em"),
        ("learn", False),
        ("newton_steps", 1),
    ):
        other = fitted(xs, ys, **{**first, "options": {"multiples": "auto", option: value}})
        assert np.abs(coefficients(other, 3) - plain).max() > 1e-4, (option, value)


def test_a_large_model_has_fewer_multiples() -> None:
    """Twelve up to 128 parameters, five beyond, so that what travels stays small."""
    for inputs, wanted in ((127, 12), (128, 5)):
        task = Task(nn.Linear(inputs, 1), kind="regression", criterion=squared_error)
        method = build("evidence", task, Local(), {})
        hyper = {k: torch.tensor(v.default) for k, v in method.hyper.items()}
        key, ids = torch.zeros(2, dtype=torch.int64), torch.arange(3)
        ctx = ServerContext(hyper, key, torch.tensor(0), torch.full((3,), 9), ids, ids >= 0)
        assert len(method.init_server(task.init(0), ctx)["weights"]) == wanted


@pytest.mark.parametrize(
    ("module", "head", "name"),
    [
        (nn.Linear(4, 2), None, ""),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), None, "1"),
        (sartor.models.mclr(input_shape=(4,), num_classes=2), "fc", "fc"),
        (sartor.models.pretrained(Net(), train=["fc"]), "fc", "fc"),
        (Net(), "fc", None),
        (nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), None, None),
        (nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(-1)), None, None),
    ],
)
def test_linear_models_are_known_by_what_is_trained(module: Any, head: Any, name: Any) -> None:
    """One linear layer that gives the scores: the scores are those of its inputs."""
    task = Task(module, head)
    found = task.linear_layer
    assert (None if found is None else found[0]) == name
    if found is None:
        return
    x, params = torch.randn(6, 4), task.init(0)
    batch = Batch(
        x, torch.zeros(6).long(), torch.ones(6).bool(), torch.arange(6), torch.tensor(True)
    )
    weight, bias = (params[f"{name}.{leaf}" if name else leaf] for leaf in ("weight", "bias"))
    seen = task.inputs(params, batch).flatten(1)
    torch.testing.assert_close(seen @ weight.T + bias, task.logits(params, x))
