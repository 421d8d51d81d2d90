"""From a federation to the samples of a convex model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sartor
from sartor.adviser.features import view
from sartor.core.errors import ConfigError, FederationError
from sartor.theory.exact_fits import fit_each
from sartor.theory.linear_models import predict


def federation(classes: int = 2, d: int = 4, constant: bool = False) -> sartor.Federation:
    """Three clients of 20, 30 and 40 samples with shifted, stretched features."""
    draw = np.random.default_rng(0)
    xs, ys = [], []
    for n in (20, 30, 40):
        x = draw.normal(3.0, np.arange(1, d + 1), size=(n, d)).astype("float32")
        if constant:
            x[:, 1] = 7.0
        xs.append(x)
        y = draw.normal(size=n).astype("float32") if classes == 0 else draw.integers(0, classes, n)
        ys.append(y)
    client = np.repeat([0, 1, 2], (20, 30, 40))
    return sartor.Federation.from_arrays(
        np.concatenate(xs), np.concatenate(ys), client=client, num_classes=classes
    )


def test_scaled_features_have_mean_0_and_deviation_1_over_all_training_samples() -> None:
    """And an intercept, 1 everywhere; the model sees the training samples of every client."""
    fed = federation()
    found = view(fed)
    x = found.federation.x[fed.train.rows]
    torch.testing.assert_close(x[:, :4].mean(0), torch.zeros(4).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(x[:, :4].std(0), torch.ones(4).double())
    assert (x[:, 4] == 1).all()
    assert found.kept == "4 scaled features and an intercept"
    clients = found.clients()
    assert clients.sizes.tolist() == fed.train.sizes.tolist()
    for i in range(3):
        rows = fed.train.rows[fed.train.owner == i]
        torch.testing.assert_close(clients.x[i][clients.mask[i]], found.federation.x[rows])
        assert clients.y[i][clients.mask[i]].tolist() == fed.y[rows].tolist()
    assert (clients.x[~clients.mask] == 0).all()


def test_constant_features_are_left_out() -> None:
    """The words say how many; features that are all constant are refused."""
    found = view(federation(constant=True))
    assert found.kept == "3 scaled features (1 constant ones left out) and an intercept"
    assert found.clients().x.shape[-1] == 4
    fed = federation(d=2)
    flat = sartor.Federation.from_arrays(
        np.ones((90, 2), "float32"), fed.y.numpy(), client=np.repeat([0, 1, 2], (20, 30, 40))
    )
    with pytest.raises(FederationError, match="No feature varies"):
        view(flat)


def test_principal_components_are_white_and_sorted() -> None:
    """K columns, uncorrelated, variance 1 over the training samples; all of them are 100 %."""
    fed = federation()
    found = view(fed, "pca:2")
    x = found.federation.x[fed.train.rows]
    torch.testing.assert_close(
        x[:, :2].T @ x[:, :2] / len(x), torch.eye(2).double(), rtol=0, atol=1e-10
    )
    assert x.shape[1] == 3
    assert found.kept.startswith("2 principal components (")
    assert "(100% of the variance)" in view(fed, "pca:4").kept
    full = view(fed, "pca:4").federation.x
    torch.testing.assert_close(full[:, :2], found.federation.x[:, :2])


@pytest.mark.parametrize(("classes", "family"), [(0, "linear"), (2, "logistic"), (3, "softmax")])
def test_the_network_of_a_view_has_the_scores_of_the_model(classes: int, family: str) -> None:
    """``tree`` puts a flat model into ``network``: the same function of x."""
    found = view(federation(classes), ridge=0.1)
    assert found.family == family
    clients = found.clients()
    w = fit_each(clients).w[1]
    net = found.network().double()
    net.load_state_dict({k: v.contiguous() for k, v in found.tree(w).items()})
    got = net(clients.x[1]).detach()
    wanted = predict(clients, w.expand(3, -1))[1]
    if family == "softmax":
        from sartor.theory.linear_models import basis

        wanted = wanted @ basis(3).T
    if family == "logistic" and got.shape[-1] == 2:
        got = got[:, 1:] - got[:, :1]
    torch.testing.assert_close(got.reshape(wanted.shape), wanted)


def test_what_is_refused() -> None:
    """Unknown names, bad K, negative ridge, too many parameters: with the fix."""
    fed = federation()
    for features in ("pca", "pca:9", "pca:x", "scaled:2", "other"):
        with pytest.raises(ConfigError, match="features"):
            view(fed, features)
    with pytest.raises(ConfigError, match="ridge must be >= 0, got -1"):
        view(fed, ridge=-1.0)
    with pytest.raises(ConfigError, match=r"has 1301 parameters.*pca:50"):
        view(federation(d=1300))
    assert view(fed, "raw").federation.x.shape[1] == 4
