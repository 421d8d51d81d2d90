"""Averaged predictions: exact for a Gaussian model, and near what sampling in NumPy finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

import sartor
from sartor.core.errors import ConfigError
from sartor.results.uncertainty import averaged
from tests.methods.test_evidence import D, draw, fitted, server, with_one


def posterior(xs: Any, ys: Any, t: Any, s: Any, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return mean (m, p) and covariance (m, p, p) of the models in one joint Gaussian."""
    m, p = len(xs), D + 1
    t, s = np.broadcast_to(t, p), np.broadcast_to(s, p)
    a, b = np.zeros(((m + 1) * p, (m + 1) * p)), np.zeros((m + 1) * p)
    a[:p, :p] = np.diag(1 / s) + m * np.diag(1 / t)
    for k, (x, y) in enumerate(zip(map(with_one, xs), ys, strict=True), 1):
        own = slice(k * p, (k + 1) * p)
        a[own, own] = x.T @ x / noise + np.diag(1 / t)
        a[own, :p] = a[:p, own] = -np.diag(1 / t)
        b[own] = x.T @ y / noise
    whole = np.linalg.inv(a)
    blocks = whole.reshape(m + 1, p, m + 1, p)[range(1, m + 1), :, range(1, m + 1)]
    return (whole @ b).reshape(m + 1, p)[1:], blocks


def test_a_target_has_the_deviation_of_the_joint_gaussian() -> None:
    """With a given prior: that of w_i, of w̄ beside it, and of the noise."""
    xs, ys = draw(0)
    options = {"learn": False, "posterior": True}
    found = fitted(xs, ys, options=options, hyper={"spread": 0.3, "width": 5.0}, rounds=3)
    _, blocks = posterior(xs, ys, 0.3, 5.0, 1.0)
    for k, block in enumerate(blocks):
        answer = found.predict(k, xs[0], uncertainty=True)
        wide = with_one(xs[0])
        variance = np.einsum("np,pq,nq->n", wide, block, wide) + 1.0
        np.testing.assert_allclose(answer.deviation, np.sqrt(variance), rtol=1e-9)
        np.testing.assert_allclose(answer.scores, found.predict(k, xs[0]).scores, rtol=1e-12)


def test_the_spread_between_priors_counts() -> None:
    """Over multiples: the mean of the covariances, and the covariance of the means."""
    xs, ys = draw(3)
    options = {"multiples": True, "posterior": True}
    found = fitted(xs, ys, options=options, rounds=100, eval_every=100)
    t, s, noise = server(found, "spread"), server(found, "width"), float(server(found, "noise"))
    low = 10**-0.5
    grid = [(a, b) for b in (low, 1.0, 10.0) for a in (low, 1.0, 10.0, 100.0)]
    each = [posterior(xs, ys, a * t, b * s, noise) for a, b in grid]
    weights, wide = server(found, "weights"), with_one(xs[1])
    for k in range(len(xs)):
        means = np.stack([means[k] for means, _ in each])
        off = means - weights @ means
        inside = sum(w * blocks[k] for w, (_, blocks) in zip(weights, each, strict=True))
        whole = inside + np.einsum("k,kp,kq->pq", weights, off, off)
        variance = np.einsum("np,pq,nq->n", wide, whole, wide) + noise
        answer = found.predict(k, xs[1], uncertainty=True)
        np.testing.assert_allclose(answer.deviation, np.sqrt(variance), rtol=1e-6)


def test_units_of_the_target_are_those_of_the_deviation() -> None:
    """A table's target is standardised for training; answers are in its own units."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 2))
    rows = {"a": x[:, 0], "b": x[:, 1], "y": 500.0 + 100.0 * x[:, 0] + 20.0 * rng.normal(size=60)}
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({**rows, "site": ["n", "s"] * 30})
    fed = sartor.Federation.from_dataframe(table, client="site", label="y", task="regression")
    options = {"posterior": True}
    model = sartor.models.mclr(fed)
    found = sartor.fit("evidence", fed, model=model, rounds=10, options=options, progress=False)
    answer = found.predict("n", {"a": [0.0], "b": [0.0]}, uncertainty=True)
    assert answer.deviation is not None
    assert 15.0 < answer.deviation[0] < 30.0
    assert 480.0 < answer.scores[0] < 520.0


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_probabilities_are_near_those_of_sampling(classes: int) -> None:
    """Of a softmax over Gaussian scores; the deviation where they vary little."""
    rng = np.random.default_rng(classes)
    scores = 1.5 * rng.normal(size=(40, classes))
    root = rng.normal(size=(40, classes, classes)) * rng.uniform(0.1, 1.0, size=(40, 1, 1))
    spread = root @ root.transpose(0, 2, 1)
    z = np.einsum("nab,snb->sna", root, rng.normal(size=(20000, 40, classes)))
    mean = special.softmax(scores + z, -1).mean(0)
    ours, deviation = averaged("classification", torch.from_numpy(scores), torch.from_numpy(spread))
    assert np.abs(special.softmax(scores, -1) - mean).max() > 0.1  # what the mean model says
    np.testing.assert_allclose(ours, mean, atol=0.015)
    np.testing.assert_allclose(deviation, special.softmax(scores + z, -1).std(0), atol=0.015)
    np.testing.assert_allclose(ours.sum(-1), 1.0, rtol=1e-12)


def test_two_classes_are_near_mackays_formula() -> None:
    """σ(κ d) of the difference d of the scores; without spread it is the probability itself."""
    scores = torch.tensor([[0.3, 1.7]], dtype=torch.float64)
    spread = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]], dtype=torch.float64)
    kappa = (1.0 + np.pi / 8.0 * 2.0) ** -0.5
    found, _ = averaged("classification", scores, spread)
    assert float(found[0, 1]) == pytest.approx(special.expit(kappa * 1.4), abs=0.01)
    found, _ = averaged("multilabel", scores, spread)
    assert float(found[0, 0]) == pytest.approx(special.expit(kappa * 0.3), abs=0.01)
    found, deviation = averaged("multilabel", scores, 0.0 * spread)
    torch.testing.assert_close(found, torch.sigmoid(scores))
    assert float(deviation.max()) < 1e-12


def test_it_is_asked_for_and_survives_a_file(tmp_path: Path) -> None:
    """Plain predictions stay those of the mean model; a saved result answers alike."""
    xs, ys = draw(4, "classification")
    settings: dict[str, Any] = {"rounds": 8, "eval_every": 8}
    settings["model"] = sartor.models.mclr(input_shape=(D,), num_classes=2)
    plain = fitted(xs, ys, options={"multiples": True}, **settings)
    with pytest.raises(ConfigError, match="posterior"):
        plain.predict(0, xs[0], uncertainty=True)
    found = fitted(xs, ys, options={"multiples": True, "posterior": True}, **settings)
    wanted = plain.predict(0, xs[0]).scores
    np.testing.assert_allclose(found.predict(0, xs[0]).scores, wanted, rtol=1e-12)
    assert found.predict(0, xs[0]).deviation is None
    later = sartor.load(found.save(tmp_path / "run"))
    here, there = (one.predict(0, xs[0], uncertainty=True) for one in (found, later))
    np.testing.assert_allclose(there.scores, here.scores, rtol=1e-12)
    np.testing.assert_allclose(there.deviation, here.deviation, rtol=1e-12)
    # Averaging moves every probability towards one half.
    assert (np.abs(here.scores - 0.5) < np.abs(wanted - 0.5)).all()
    joined = later.onboard((xs[2], ys[2]))
    answer = joined.predict("newcomer", xs[0], uncertainty=True)
    assert answer.deviation is not None
    assert (answer.deviation > 0).all()
