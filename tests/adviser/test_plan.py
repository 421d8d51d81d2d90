"""Predicted rounds against rounds that were run, and the shapes that the theory gives."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from sartor.adviser.plan import CostPlan, make_plan
from sartor.data.synthetic import logistic
from sartor.theory.exact_fits import fit_coupled, fit_each, fit_pooled
from sartor.theory.linear_models import Clients, hessians, look

PULLS = (0.01, 0.1, 1.0, 10.0)


def problem(ridge: float, spread: float = 0.3) -> Clients:
    fed, _ = logistic(spread=spread, clients=6, samples=80, dim=5, seed=3)
    x = fed.x[fed.train.rows].double().reshape(6, 80, 5)
    y = fed.y[fed.train.rows].double().reshape(6, 80)
    return Clients(x, y, torch.ones(6, 80, dtype=torch.bool), "logistic", ridge=ridge)


def plan_of(clients: Clients, pull: float, start: float, accuracy: float) -> CostPlan:
    fits = fit_each(clients)
    curve = torch.linalg.eigvalsh(hessians(clients, look(clients, fits.w)))
    gram = clients.x.mT @ clients.x / clients.sizes[:, None, None]
    return make_plan(
        pull,
        smoothness=float(torch.linalg.eigvalsh(gram)[:, -1].max()) / 4.0 + clients.ridge,
        curvatures=curve[:, 0],
        weights=torch.full((6,), 1.0 / 6.0, dtype=torch.float64),
        sizes=clients.sizes,
        num_params=5,
        start=start,
        accuracy=accuracy,
    )


@pytest.mark.parametrize("ridge", [0.01, 0.1])
@pytest.mark.parametrize("pull", PULLS)
def test_predicted_rounds_are_an_upper_bound_within_a_factor_two(ridge: float, pull: float) -> None:
    clients = problem(ridge)
    weights = torch.full((6,), 1.0 / 6.0, dtype=torch.float64)
    exact = fit_coupled(clients, weights, torch.tensor(pull), tolerance=1e-12).centre
    start = float(exact.square().sum())
    plan = plan_of(clients, pull, start, 1e-6 * start)
    centre, own = torch.zeros(5, dtype=torch.float64), torch.zeros(6, 5, dtype=torch.float64)
    errors = [start]
    while errors[-1] > plan.accuracy:
        for _ in range(plan.num_local_steps):
            own = own - plan.local_lr * (look(clients, own).slope + pull * (own - centre))
        centre = centre - plan.server_lr * pull * (centre - own.mean(0))
        errors.append(float((centre - exact).square().sum()))
    measured = len(errors) - 1
    assert measured <= plan.rounds <= 2 * measured
    assert plan.rounds <= plan.guaranteed_rounds
    rates = [after / before for before, after in itertools.pairwise(errors)]
    assert max(rates) <= plan.guaranteed_rate


def test_one_model_needs_no_more_rounds_than_predicted() -> None:
    clients = problem(0.05)
    weights = torch.full((6,), 1.0 / 6.0, dtype=torch.float64)
    exact = fit_pooled(clients, weights, tolerance=1e-12).w
    start = float(exact.square().sum())
    plan = plan_of(clients, math.inf, start, 1e-6 * start)
    w, measured = torch.zeros(5, dtype=torch.float64), 0
    while float((w - exact).square().sum()) > plan.accuracy:
        w, measured = w - plan.local_lr * look(clients, w.expand(6, -1)).slope.mean(0), measured + 1
    assert measured <= plan.rounds <= 2 * measured
    assert plan.strategy == "global"


def test_alone_sends_nothing() -> None:
    plan = plan_of(problem(0.05), 0.0, 1.0, 1e-4)
    assert (plan.strategy, plan.bytes_total, plan.server_lr) == ("local", 0, 0.0)


def test_costs_are_rounds_times_their_parts() -> None:
    plan = plan_of(problem(0.05), 0.5, 1.0, 1e-4)
    assert plan.bytes_total == plan.rounds * (2 * 5 + 1) * 4 * 6  # models, and K
    one = plan_of(problem(0.05), math.inf, 1.0, 1e-4)
    assert one.bytes_total == one.rounds * 2 * 5 * 4 * 6
    assert plan.gradients == plan.rounds * plan.num_local_steps * 480


def test_rounds_grow_and_local_steps_fall_with_the_pull() -> None:
    plans = [plan_of(problem(0.05), pull, 1.0, 1e-6) for pull in PULLS]
    assert sorted(p.rounds for p in plans) == [p.rounds for p in plans]
    assert plans[0].num_local_steps > plans[-1].num_local_steps


def test_left_reaches_the_accuracy_after_the_predicted_rounds() -> None:
    plan = plan_of(problem(0.05), 0.5, 1.0, 1e-4)
    assert plan.left(plan.rounds) <= plan.accuracy < plan.left(plan.rounds - 1)
    assert replace(plan, start=2.0).left(0) == 2.0
