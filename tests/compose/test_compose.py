"""Methods made of methods: fine-tuned, in parallel, inside groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sartor.compose import fine_tuned, within_groups
from sartor.compose.parallel import in_parallel
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import changed
from sartor.methods import METHODS, build
from tests.laws import FOR_VARIANTS, HEAVY, LAWS, SGD, Case, check_method
from tests.toys import assert_same, federation, net_task, outcome, run, simulation, states

GD = Local(steps=1, batch=None, lr=0.1)


# ---- fine-tuning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
def test_any_method_can_be_fine_tuned_and_trains_as_before(name: str) -> None:
    """Fine-tuning changes what is used, and nothing that is trained."""
    task, fed = net_task(), federation()
    plain = run(simulation(build(name, task, SGD, {}), task, [fed]))
    tuned = run(simulation(build(name, task, SGD, {"finetune_steps": 2}), task, [fed]))
    found, wanted = states(tuned), states(plain)
    for key in found:  # a method whose headline moved to "pre" keeps no trained models
        np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)
    a, b = (sim.scores()["pre", "test"].loss for sim in (tuned, plain))
    assert np.abs(a - b).max() > 1e-6
    assert tuned.method.use.headline == "pre"
    extra = tuned.ledger().setup_gradients - plain.ledger().setup_gradients
    sizes = fed.train.sizes.numpy()
    steps = [min(4, n) + min(4, max(n - 4, 0) or n) for n in sizes]  # two batches of four
    assert extra[0] == sum(steps)


def test_one_more_step_is_one_more_step_of_the_plain_loss() -> None:
    """θ − ft_lr·∇f_i(θ) on the personal model, with no pull, on training data."""
    task, fed = net_task(), federation()
    plain = run(simulation(build("pfedme", task, GD, {}), task, [fed]))
    options = {"finetune_steps": 1}
    tuned = run(simulation(build("pfedme", task, GD, options), task, [fed], hyper={"ft_lr": 0.3}))
    for client in range(5):
        rows = fed.train.of(client)
        theta = plain.params(client)
        losses = lambda p, rows=rows: torch.nn.functional.cross_entropy(  # noqa: E731
            task.logits(p, fed.x[rows]), fed.y[rows]
        )
        slope = torch.func.grad(losses)(theta)
        for name, leaf in tuned.params(client).items():
            torch.testing.assert_close(leaf, theta[name] - 0.3 * slope[name], rtol=0, atol=1e-12)


def test_no_steps_of_fine_tuning_is_the_method_itself() -> None:
    """Zero steps or zero epochs give back the record unchanged."""
    task = net_task()
    method = build("fedavg", task, SGD, {})
    assert fine_tuned(method, task, SGD, steps=0) is method
    assert fine_tuned(method, task, SGD, epochs=0) is method
    with pytest.raises(ConfigError, match="0 leaves it out"):
        fine_tuned(method, task, SGD, steps=-1)


def test_fedavg_with_finetune_steps_is_fedavg_ft() -> None:
    """The wrapper and the named baseline are one thing."""
    task, fed = net_task(), federation()
    a = run(simulation(build("fedavg", task, SGD, {"finetune_steps": 3}), task, [fed]))
    b = run(simulation(build("fedavg-ft", task, SGD, {"ft_steps": 3}), task, [fed]))
    assert_same(outcome(a), outcome(b))


_TUNED = Case("ditto", {"finetune_epochs": 1}, local=HEAVY)


@pytest.mark.parametrize(
    ("case", "laws"),
    [
        pytest.param(Case("pfedme", {"finetune_steps": 2}), tuple(LAWS), id="pfedme"),
        pytest.param(_TUNED, FOR_VARIANTS, id="ditto"),
        pytest.param(_TUNED, tuple(LAWS), id="ditto-all", marks=pytest.mark.slow),
    ],
)
def test_fine_tuned_methods_honour_the_laws(
    case: Case, laws: tuple[str, ...], tmp_path: Any
) -> None:
    """The wrapper is a method like any other."""
    check_method(case, tmp_path, laws)


# ---- in parallel ---------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", ["all", "at_least:0.6"])
def test_methods_in_parallel_are_the_methods_alone(participation: str) -> None:
    """Each slot holds the states of the method alone, whoever else trains beside it."""
    task, fed = net_task(), federation()
    parts = {name: build(name, task, HEAVY, {}) for name in ("fedavg", "local", "fedprox")}
    both = changed(in_parallel("three", **parts), model=lambda work, ctx: work["fedavg"]["params"])
    found = states(run(simulation(both, task, [fed], participation=participation)))
    for name, method in parts.items():
        alone = states(run(simulation(method, task, [fed], participation=participation)))
        for key, value in alone.items():
            where, leaf = key.split("/", 1)
            # Cohorts among all clients are added up in another order.
            np.testing.assert_allclose(
                found[f"{where}/{name}/{leaf}"], value, rtol=0, atol=1e-13, err_msg=key
            )


def test_methods_in_parallel_cost_the_sum_of_their_parts() -> None:
    """Gradients and bytes are those of the methods alone, also where only some are sampled."""
    task, fed = net_task(), federation()
    parts = {name: build(name, task, SGD, {}) for name in ("fedavg", "local")}
    both = changed(in_parallel("two", **parts), model=lambda work, ctx: work["local"]["params"])
    found = run(simulation(both, task, [fed])).ledger()
    alone = [run(simulation(m, task, [fed])).ledger() for m in parts.values()]
    for counter in ("gradient_evaluations", "bytes_up", "bytes_down"):
        wanted = sum(getattr(ledger, counter) for ledger in alone)
        assert getattr(found, counter).tolist() == wanted.tolist()


# ---- inside groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", ["all", "at_least:0.6"])
def test_inside_one_group_a_method_is_itself(participation: str) -> None:
    """With all clients in one group nothing changes but where the message is."""
    task, fed = net_task(), federation()
    method = build("fedavg", task, SGD, {})
    a = run(simulation(within_groups(method), task, [fed], participation=participation))
    b = run(simulation(method, task, [fed], participation=participation))
    for key, leaf in tree.items(b.server):
        rows = dict(tree.items(a.server["rows"]))[key]
        for i in range(5):
            torch.testing.assert_close(rows[:, i], leaf, rtol=0, atol=1e-14)
    assert a.ledger().bytes_down.tolist() == b.ledger().bytes_down.tolist()


def test_groups_do_not_notice_one_another() -> None:
    """FedAvg inside {0, 1} and {2, 3, 4} is FedAvg of each group alone."""
    task, fed = net_task(), federation()
    method = within_groups(build("fedavg", task, GD, {}))
    group = torch.tensor([0, 0, 2, 2, 2])
    grouped = changed(
        method,
        init_server=lambda params, ctx: {**method.init_server(params, ctx), "group": group},
    )
    sim = run(simulation(grouped, task, [fed], participation="all"))
    for members in ([0, 1], [2, 3, 4]):
        alone = run(
            simulation(
                build("fedavg", task, GD, {}),
                task,
                [fed.without(*(i for i in range(5) if i not in members))],
                participation="all",
            )
        )
        for key, leaf in tree.items(alone.server):
            rows = dict(tree.items(sim.server["rows"]))[key]
            for i in members:
                torch.testing.assert_close(rows[:, i], leaf, rtol=0, atol=1e-14)
