"""Scores: every client's own model on its own samples, each counted once and padding never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.local import Local
from sartor.core.method import FirstRounds, Phase, changed
from sartor.core.task import (
    Task,
    all_labels,
    binary_cross_entropy,
    never,
    next_tokens,
    squared_error,
    token_cross_entropy,
)
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.engines import evaluate as evaluation
from sartor.engines.parts import Tally
from sartor.engines.plan import BatchPlan
from sartor.engines.work import InProcess
from sartor.methods import build
from sartor.training.simulation import Simulation
from tests.toys import federation, net_task, run, simulation

SIZES = ([5, 0, 1, 3, 4], [2, 5, 5, 0, 3])
"""Test samples of the clients of two runs."""


def _federations() -> list[Federation]:
    """Cut the test samples of two allocations to unequal lists, some empty."""
    first = federation(0)
    feds = [first, federation(1, sizes=(5, 3, 8, 4, 7), data=(first.x, first.y))]
    lists = [[f.test.of(i)[:n] for i, n in enumerate(s)] for f, s in zip(feds, SIZES, strict=True)]
    both = zip(feds, lists, strict=True)
    return [replace(fed, test=Ragged.from_lists(rows)) for fed, rows in both]


@pytest.fixture(scope="module")
def trained() -> Simulation:
    """Train every client for a round on its own, so that no two models are the same."""
    task = net_task()
    method = build("local", task, Local(epochs=3, batch=3, lr=0.5), {})
    return run(simulation(method, task, _federations(), rounds=1, participation="all"))


def _evaluator(sim: Simulation) -> evaluation.Evaluator:
    assert isinstance(sim.clients, InProcess)
    return sim.clients.evaluator


def _plain(sim: Simulation, r: int, i: int) -> tuple[int, float]:
    """Count what client i of run r gets right, and add up its losses, sample by sample."""
    params = {
        k: leaf[r, i] for k, leaf in sim.store.gather(sim.context.everybody)["params"].items()
    }
    fed = _federations()[r]
    rows = fed.test.of(i)
    scores = net_task().logits(params, fed.x[rows])
    right = int((scores.argmax(-1) == fed.y[rows]).sum())
    return right, float(F.cross_entropy(scores, fed.y[rows], reduction="sum"))


@pytest.mark.parametrize(("batch", "chunk"), [(64, None), (2, None), (3, 1), (2, 4), (1, 3)])
def test_scores_are_sums_over_the_real_samples(
    trained: Simulation, batch: int, chunk: int | None
) -> None:
    """Whatever the batch and the block of lanes: a plain loop over samples finds the same."""
    scorer = _evaluator(trained)
    scorer._phases.clear()
    scorer._plans.clear()
    scorer.eval_batch, scorer.context.engine.lanes = batch, chunk or 1 << 20
    for _ in range(2):  # the second time with the plans of the first
        tally = scorer.evaluate(trained.server, trained.store, 1)[0]["test"]
        for r, sizes in enumerate(SIZES):
            for i, size in enumerate(sizes):
                right, loss = _plain(trained, r, i) if size else (0, 0.0)
                assert tally.correct[r, i] == right
                assert tally.loss[r, i] == pytest.approx(loss, rel=1e-12)
    assert len({float(tally.loss[r, i]) for r in range(2) for i in range(5)}) == 8 + 1


def test_an_absent_client_is_not_scored(trained: Simulation) -> None:
    """Absent lanes keep what the tally had; the others are written under their own number."""
    scorer, ids = _evaluator(trained), np.array([[3, 0, 4]])
    whole = scorer.evaluate(trained.server, trained.store, 1)[0]["test"]
    method = scorer.context.record(1)
    group = scorer.messages_to({}, 1, ids, 1)
    model, _ = scorer.use(method, trained.store, group)
    tally = Tally(np.full((2, 5), -1.0), np.full((2, 5), -2.0))
    present = np.array([[True, False, True]])
    scorer._plans.clear()
    scorer.score(method, model, replace(group, present=present), {"test": tally})
    wanted = np.full((2, 5), -1.0)
    wanted[1, [3, 4]] = whole.correct[1, [3, 4]]
    np.testing.assert_array_equal(tally.correct, wanted)
    wanted = np.full((2, 5), -2.0)
    wanted[1, [3, 4]] = whole.loss[1, [3, 4]]
    np.testing.assert_allclose(tally.loss, wanted, rtol=1e-12)
    (plan,) = scorer._plans.values()
    assert plan.samples.tolist() == [[3, 0, 0]]  # the most first, so that lanes can be left out
    assert not scorer.phase(method, "test").shuffle  # a sum needs no order


def test_plans_are_made_once_and_not_kept_without_end(
    trained: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same clients again take the plan that is there; where they grow too large all are new."""
    scorer, ids = _evaluator(trained), trained.context.everybody
    scorer.context.engine.lanes = 1
    scorer._plans.clear()
    scorer.evaluate(trained.server, trained.store, 1)
    made = dict(scorer._plans)
    assert len(made) > 2
    scorer.evaluate(trained.server, trained.store, 1)
    assert {k: id(v) for k, v in scorer._plans.items()} == {k: id(v) for k, v in made.items()}
    assert ids.shape == (2, 5)
    monkeypatch.setattr(evaluation, "_KEPT", 1)
    scorer._plans.clear()
    scorer.evaluate(trained.server, trained.store, 1)
    assert len(scorer._plans) == 1


@pytest.mark.parametrize("group", [1, 2, 32])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_a_shared_model_is_scored_on_all_samples_of_a_group_at_once(
    trained: Simulation, monkeypatch: pytest.MonkeyPatch, group: int, batch: int
) -> None:
    """One lane at a time, samples of many clients fill the batches; sums are still each one's."""
    scorer = _evaluator(trained)
    scorer._phases.clear()
    scorer._plans.clear()
    monkeypatch.setattr(evaluation, "GROUP", group)
    scorer.eval_batch, scorer.context.engine.lanes = batch, 1
    models = tree.map(
        lambda leaf: leaf[:, 2], trained.store.gather(scorer.context.everybody)["params"]
    )
    tally = scorer.evaluate_common(models, 1)["test"]
    for r, (sizes, fed) in enumerate(zip(SIZES, _federations(), strict=True)):
        params = {name: leaf[r] for name, leaf in models.items()}
        for i, size in enumerate(sizes):
            scores, y = net_task().logits(params, fed.x[fed.test.of(i)]), fed.y[fed.test.of(i)]
            assert tally.correct[r, i] == int((scores.argmax(-1) == y).sum())
            loss = float(F.cross_entropy(scores, y, reduction="sum")) if size else 0.0
            assert tally.loss[r, i] == pytest.approx(loss, rel=1e-12)


def test_a_group_of_clients_is_one_list_for_a_shared_model_and_none_for_others(
    trained: Simulation,
) -> None:
    """What the pooled phase is for: few steps."""
    scorer = _evaluator(trained)
    scorer.eval_batch, scorer.context.engine.lanes = 64, 1
    seen: list[tuple[int, int]] = []
    phase = scorer.context.engine.phase

    def watched(what: Phase, work: Any, ctx: Any, plan: BatchPlan) -> Any:
        seen.append((plan.num_steps, int(plan.samples.sum())))
        return phase(what, work, ctx, plan)

    scorer.context.engine.phase = watched  # type: ignore[assignment, method-assign]
    try:
        models = tree.map(
            lambda leaf: leaf[:, 2], trained.store.gather(scorer.context.everybody)["params"]
        )
        ids = np.arange(5)[None]
        tallies = {"test": Tally(np.zeros((2, 5)), np.zeros((2, 5)))}
        scorer.score_centre(tree.map(lambda leaf: leaf[:1], models), 1, ids, 0, tallies)
        assert seen == [(1, sum(SIZES[0]))]
        seen.clear()
        group = scorer.messages_to({}, 1, ids, 0)
        model, _ = scorer.use(scorer.context.record(1), trained.store, group)
        scorer.score(scorer.context.record(1), model, group, tallies)
        assert [samples for _, samples in seen] == sorted(SIZES[0], reverse=True)
    finally:
        del scorer.context.engine.phase


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=90))
def test_groups_have_everybody_once_and_about_equal_work(
    trained: Simulation, sizes: list[int]
) -> None:
    """No group is longer than allowed, or has more than a share of the work beyond one client."""
    scorer = _evaluator(trained)
    size = np.array(sizes)
    order = np.argsort(-size, kind="stable")
    scorer.eval_batch = 64
    groups = scorer._grouped(order, size)
    np.testing.assert_array_equal(np.concatenate(groups), order)
    batches = -(-size // 64)
    share = -(-int(batches.sum()) // (evaluation._SHARES * scorer.context.engine.workers))
    for ids in groups:
        assert 0 < len(ids) <= evaluation.GROUP
        assert batches[ids].sum() <= max(share, 1) + batches[ids].max()


class Texts(nn.Module):
    """Four tokens of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(-1, 4, 3)


@pytest.mark.parametrize(
    ("task", "labels", "classes"),
    [
        (Task(Texts(), None, token_cross_entropy, next_tokens, kind="next-token"), (4,), 3),
        (Task(nn.Linear(4, 1), None, squared_error, never, kind="regression"), (1,), 0),
        (Task(nn.Linear(4, 3), None, binary_cross_entropy, all_labels, kind="multilabel"), (3,), 3),
    ],
    ids=lambda given: getattr(given, "kind", None),
)
def test_a_shared_model_is_scored_alike_whatever_the_task(
    monkeypatch: pytest.MonkeyPatch, task: Task, labels: tuple[int, ...], classes: int
) -> None:
    """Samples of many clients in a batch, against one client after the other."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=drawn, dtype=torch.float64)
    if task.kind == "next-token":
        y = torch.randint(0, 3, (400, *labels), generator=drawn)
    else:
        y = torch.rand(400, *labels, generator=drawn).double().round()
    plain = federation(sizes=(3,) * 40, data=(x, torch.zeros(400).long()))
    fed = replace(plain, y=y, task=task.kind, num_classes=classes)
    pooled: list[int] = []
    whole = evaluation.Evaluator._pooled
    monkeypatch.setattr(
        evaluation.Evaluator,
        "_pooled",
        lambda self, method, ctx, ids, *rest: (
            pooled.append(ids.size) or whole(self, method, ctx, ids, *rest)  # type: ignore[func-returns-value]
        ),
    )
    found = []
    for engine, chunk in (("sequential", None), ("vectorised", 1)):
        method = build("fedavg", task, Local(lr=0.1, batch=3), {})
        sim = run(simulation(method, task, [fed], engine=engine, chunk=chunk, rounds=1))
        pooled.clear()
        found.append(sim.clients.evaluate(sim.server, sim.store, 1)[0]["test"])
        assert (sum(pooled) == 40) == (chunk == 1)
    np.testing.assert_allclose(found[1].correct, found[0].correct)
    np.testing.assert_allclose(found[1].loss, found[0].loss, rtol=1e-11)


def test_groups_of_large_models_are_small(
    trained: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a group holds beside the clients' own models is bounded."""
    scorer = _evaluator(trained)
    each = sum(p.nbytes for p in scorer.context.task.module.parameters())
    for room, most in ((3 * each, 3), (0, 1), (1 << 40, evaluation.GROUP)):
        monkeypatch.setattr(evaluation, "_GROUP_BYTES", room)
        groups = scorer._grouped(np.arange(200), np.zeros(200, dtype=np.int64))
        assert max(len(ids) for ids in groups) == most


def test_clients_that_adapt_are_not_grouped(trained: Simulation) -> None:
    """Also those that do so while the method warms up."""
    scorer, method = _evaluator(trained), trained.method
    adapts = changed(method, adapt=method.phases)
    try:
        assert scorer._groups(1)
        for other in (adapts, changed(method, first=FirstRounds(3, adapts, adapts))):
            scorer.context.method = other
            assert not scorer._groups(1)
    finally:
        scorer.context.method = method
    assert not scorer._groups(2)
