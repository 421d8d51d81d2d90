"""The check of a choice on held-out samples."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
import torch

import sartor
from sartor.adviser.crosscheck import Check, _order, cross_check
from sartor.data.synthetic import logistic
from sartor.theory.exact_fits import fit_each
from sartor.theory.linear_models import Clients


def linear(spread: float, seed: int = 0) -> Clients:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 60, 3, generator=draw, dtype=torch.float64)
    w = spread * torch.randn(6, 3, generator=draw, dtype=torch.float64)
    y = (x @ w[..., None])[..., 0] + torch.randn(6, 60, generator=draw, dtype=torch.float64)
    return Clients(x, y, torch.ones(6, 60, dtype=torch.bool), "linear")


def check(clients: Clients, pull: float) -> Check:
    weights = torch.full((6,), 1.0 / 6.0, dtype=torch.float64)
    return cross_check(clients, weights, pull, fit_each(clients).w)


def test_a_wrong_choice_is_contradicted() -> None:
    assert check(linear(2.0), math.inf).contradicts
    assert check(linear(2.0), math.inf).better_end == 0.0
    assert check(linear(0.0), 0.0).contradicts
    assert check(linear(0.0), 0.0).better_end == math.inf


def test_a_right_choice_stands() -> None:
    assert not check(linear(2.0), 0.01).contradicts
    assert not check(linear(0.0), math.inf).contradicts
    assert check(linear(0.0), math.inf).gap == 0.0


def test_losses_are_those_of_samples_left_out() -> None:
    """Fits on a third less data lose more than the fits that have seen every sample."""
    clients = linear(0.5)
    seen = 0.5 * (clients.y - (clients.x @ fit_each(clients).w[..., None])[..., 0]).square().mean()
    assert check(clients, 0.0).alone > float(seen)


def test_folds_belong_to_a_client_wherever_it_is_listed() -> None:
    """Clients in another order: the same losses; another seed: other folds."""
    clients = linear(0.5)
    turned = replace(clients, x=clients.x.flip(0), y=clients.y.flip(0))
    assert check(turned, 0.1) == pytest.approx(check(clients, 0.1), rel=1e-9)
    rank = _order(clients, 0)
    assert torch.equal(_order(turned, 0), rank.flip(0))
    assert not torch.equal(_order(clients, 1), rank)
    assert torch.equal(rank.sort(-1).values, torch.arange(60).expand(6, 60))
    short = replace(clients, mask=torch.arange(60).expand(6, 60) < 45)
    assert bool((_order(short, 0)[:, 45:] >= 45).all())


def test_the_adviser_says_that_the_theory_does_not_carry_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("sartor.adviser.by_theory")
    fed, _ = logistic(spread=0.4, clients=8, samples=200, dim=4, test_samples=50)
    usual = sartor.advise(fed, features="raw", draws=0, basis="theory")
    assert (usual.strategy, usual.contradicted) == ("personalised", False)
    assert "contradict" not in usual.summary() + str(usual.table())
    against = Check(alone=0.5, chosen=0.6, one_model=0.7, gap=0.1, error=0.01)
    monkeypatch.setattr(module, "cross_check", lambda *_, **__: against)
    advice = sartor.advise(fed, features="raw", draws=0, basis="theory")
    assert (advice.strategy, advice.prox_strength) == ("local", 0.0)
    assert advice.reason.startswith("Held-out samples decide")
    assert "does not carry over" in advice.doubts[0]
    assert advice.contradicted
    assert "held-out samples: 0.5 alone, 0.7 with one model" in advice.summary()
    assert "Expected mean excess loss" not in advice.summary()
    assert "contradict" in str(advice.table())
    assert any("contradict" in note for note in advice.verify().notes)
    wide = Check(alone=0.7, chosen=0.6, one_model=0.5, gap=0.1, error=0.01)
    monkeypatch.setattr(module, "cross_check", lambda *_, **__: wide)
    tight = sartor.advise(fed, features="raw", draws=0, budget_rounds=1, basis="theory")
    assert tight.prox_strength in (0.0, math.inf)
