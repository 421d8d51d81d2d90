"""Scores: every client's own model on its own samples, each counted once and padding never."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.engines.parts import Tally
from sartor.local import Local
from sartor.methods import build
from sartor.simulation import Simulation
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


def _plain(sim: Simulation, r: int, i: int) -> tuple[int, float]:
    """Count what client i of run r gets right, and add up its losses, sample by sample."""
    params = {k: leaf[r, i] for k, leaf in sim.store.gather(sim.rounds.everybody)["params"].items()}
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
    rounds = trained.rounds
    rounds._score_phases.clear()
    rounds._score_plans.clear()
    rounds.eval_batch, rounds.engine.lanes = batch, chunk or 1 << 20
    for _ in range(2):  # the second time with the plans of the first
        tally = rounds.evaluate(trained.server, trained.store, 1)[0]["test"]
        for r, sizes in enumerate(SIZES):
            for i, size in enumerate(sizes):
                right, loss = _plain(trained, r, i) if size else (0, 0.0)
                assert tally.correct[r, i] == right
                assert tally.loss[r, i] == pytest.approx(loss, rel=1e-12)
    assert len({float(tally.loss[r, i]) for r in range(2) for i in range(5)}) == 8 + 1


def test_a_shared_model_is_scored_as_one(
    trained: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients of a run have one model: its parameters have no axis of clients in a step."""
    rounds = trained.rounds
    rounds._score_phases.clear()
    rounds.eval_batch, rounds.engine.lanes = 2, 1 << 20
    seen: list[int] = []
    logits = rounds.task.logits
    monkeypatch.setattr(
        type(rounds.task),
        "logits",
        lambda self, params, x: (seen.append(_maps(params["fc.weight"])), logits(params, x))[1],
    )
    first = rounds.evaluate(trained.server, trained.store, 1)[0]["test"]
    assert set(seen) == {2}
    seen.clear()
    gathered = trained.store.gather(rounds.everybody)["params"]
    common = {k: leaf[:, 0] for k, leaf in gathered.items()}
    tally = rounds.evaluate_common(common, 1)["test"]
    assert set(seen) == {1}
    for r in range(2):
        assert tally.loss[r, 0] == pytest.approx(first.loss[r, 0], rel=1e-12)
        for i, size in enumerate(SIZES[r]):
            fed = _federations()[r]
            rows = fed.test.of(i)
            params = {k: leaf[r] for k, leaf in common.items()}
            scores = logits(params, fed.x[rows])
            loss = float(F.cross_entropy(scores, fed.y[rows], reduction="sum")) if size else 0.0
            assert tally.loss[r, i] == pytest.approx(loss, rel=1e-12)


def _maps(leaf: Tensor) -> int:
    """Count the axes over which a tensor is mapped."""
    depth = 0
    while torch._C._functorch.is_batchedtensor(leaf):
        leaf, depth = torch._C._functorch.get_unwrapped(leaf), depth + 1
    return depth


def test_who_is_not_there_is_not_scored(trained: Simulation) -> None:
    """Absent lanes keep what the tally had; the others are written under their own number."""
    rounds, ids = trained.rounds, np.array([[3, 0, 4]])
    whole = rounds.evaluate(trained.server, trained.store, 1)[0]["test"]
    method = rounds.record(1)
    site, keys = rounds.letters_to({}, 1, ids, 1)
    model, _ = rounds.use(method, trained.store, site, keys, ids, 1)
    tally = Tally(np.full((2, 5), -1.0), np.full((2, 5), -2.0))
    present = np.array([[True, False, True]])
    rounds._score_plans.clear()
    rounds._score(method, model, site, ids, present, 1, "test", tally)
    wanted = np.full((2, 5), -1.0)
    wanted[1, [3, 4]] = whole.correct[1, [3, 4]]
    np.testing.assert_array_equal(tally.correct, wanted)
    wanted = np.full((2, 5), -2.0)
    wanted[1, [3, 4]] = whole.loss[1, [3, 4]]
    np.testing.assert_allclose(tally.loss, wanted, rtol=1e-12)
    (plan,) = rounds._score_plans.values()
    assert plan.samples.tolist() == [[3, 0, 0]]  # the most first, so that lanes can be left out
    assert not rounds._phase_once(method, "test").shuffle  # a sum needs no order


def test_plans_are_made_once_and_not_kept_without_end(trained: Simulation) -> None:
    """The same clients again take the plan that is there; after 65 different ones all are new."""
    rounds, ids = trained.rounds, trained.rounds.everybody
    rounds._score_plans.clear()
    rounds.evaluate(trained.server, trained.store, 1)
    made = dict(rounds._score_plans)
    assert made
    rounds.evaluate(trained.server, trained.store, 1)
    assert {k: id(v) for k, v in rounds._score_plans.items()} == {k: id(v) for k, v in made.items()}
    assert ids.shape == (2, 5)
    spare = next(iter(made.values()))
    for limit, kept in ((64, 65), (65, 1)):
        rounds._score_plans.clear()
        rounds._score_plans.update({("other", k, b"", b""): spare for k in range(limit)})
        rounds.engine.lanes = 1 << 20
        rounds.evaluate(trained.server, trained.store, 1)
        assert len(rounds._score_plans) == kept
