"""ReLUs are computed by their neighbours only where that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.tree import Tree
from sartor.engines.lanes.fusion import Fusion, _agree
from sartor.engines.lanes.operations import LaneOperations
from tests.engines.test_lane_layers import launched  # noqa: F401

LANES = 3


def _params() -> Tree:
    rng = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn((LANES, *shape), generator=rng, dtype=torch.float64)

    return {"w1": normal(6, 12), "b1": normal(6), "w2": normal(4, 6), "x": normal(5, 2, 4, 6)}


def _proven(network: Callable[[Tree], Tensor]) -> tuple[Fusion, Any, Any]:
    """Prove a fusion on the gradient of a network, and return it with both gradients."""
    fusion, given = Fusion(), _params()
    slope = vmap(grad(lambda p: network(p).square().sum()))

    def step() -> Any:
        with LaneOperations(fusion):
            return _as_one_run(slope(given))

    fusion.prove(_as_one_run(given), step)
    return fusion, step(), _as_one_run(slope(given))


def _as_one_run(lanes: Tree) -> Tree:
    found: Tree = tree.map(lambda leaf: leaf[None], lanes)
    return found


def _as_in_lenet(p: Tree) -> Tensor:
    x = F.relu(F.max_pool2d(p["x"], 2))  # calls 0 and 1
    x = F.linear(x.flatten(1), p["w1"], p["b1"]).relu()  # 2 and 3
    return F.linear(x, p["w2"])  # 4


def _relu_first(p: Tree) -> Tensor:
    x = F.max_pool2d(F.relu(p["x"] * 2), 2)  # 0 and 1
    return nn.Sequential(nn.Flatten(), nn.ReLU())(x)  # 2: of what the pooling gave


def _read_twice(p: Tree) -> Tensor:
    x = F.linear(p["x"].flatten(1)[:, :12], p["w1"], p["b1"])
    return F.relu(x) + 0.1 * x


def _in_place(p: Tree) -> Tensor:
    return F.relu(F.linear(p["x"].flatten(1)[:, :12], p["w1"], p["b1"]), inplace=True)


def _shape_asked(p: Tree) -> Tensor:
    x = F.linear(p["x"].flatten(1)[:, :12], p["w1"], p["b1"])
    assert x.shape[0] == x.size(0) == 5
    return torch.relu(x)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("network", "rectify", "skip"),
    [
        (_as_in_lenet, {0, 2}, {1, 3}),
        (_relu_first, {1}, {0}),
        (_read_twice, set(), set()),
        (_in_place, set(), set()),
        (_shape_asked, {0}, {1}),
    ],
)
def test_what_is_joined(network: Any, rectify: Any, skip: Any) -> None:
    fusion, found, plain = _proven(network)
    assert (fusion.rectify, fusion.skip) == (rectify, skip)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def _hidden(scale: float) -> Callable[[Tree], Tensor]:
    """Use what a ReLU is taken of once more, where no function of torch is seen to be given it."""

    def network(p: Tree) -> Tensor:
        x = F.linear(p["x"].flatten(1)[:, :12], p["w1"], p["b1"])
        return F.relu(x) + scale * vmap(lambda row: row * row.norm())(x)

    return network


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_a_use_that_was_not_seen_is_found_by_the_numbers(scale: float) -> None:
    """Even one that counts nothing yet, such as a gate that begins at zero."""
    fusion, found, plain = _proven(_hidden(scale))
    assert not fusion.pairs
    assert not fusion.rectify
    assert not fusion.skip
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("launched")
def test_layers_that_change_between_passes_are_left_alone() -> None:
    passes = []

    def network(p: Tree) -> Tensor:
        passes.append(1)
        flat = p["x"].flatten(1)[:, :12]
        if len(passes) == 1:  # as a module that makes something when it is first called
            return F.relu(F.linear(flat, p["w1"], p["b1"]))
        return F.relu(F.max_pool2d(p["x"], 2).flatten(1) + F.linear(flat, p["w1"], p["b1"]).sum())

    fusion, found, plain = _proven(network)
    assert not fusion.pairs
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("launched")
def test_second_derivatives_of_joined_layers() -> None:
    fusion, given = Fusion(), _params()

    def curved(p: Tree) -> Tensor:
        slope = grad(lambda q: _as_in_lenet({**p, **q}).square().sum())({"w1": p["w1"]})
        return (slope["w1"] * p["w1"].sin()).sum()

    def step() -> Any:
        with LaneOperations(fusion):
            return _as_one_run(vmap(grad(curved))(given))

    fusion.prove(_as_one_run(given), step)
    assert fusion.rectify
    plain = _as_one_run(vmap(grad(curved))(given))
    torch.testing.assert_close(step(), plain, rtol=1e-10, atol=1e-10)


def test_agreement_is_lane_by_lane() -> None:
    """No number twice is the same; a lane with large steps does not hide a wrong small one."""
    before = torch.zeros(1, 2, 3)
    plain = torch.tensor([[[1e6, 1e6, torch.nan], [1.0, 2.0, 3.0]]])
    assert _agree(before, plain, plain.clone())
    near = plain.clone()
    near[0, 1, 0] += 1e-5
    assert _agree(before, plain, near)
    wrong = plain.clone()
    wrong[0, 1, 0] += 0.01
    assert not _agree(before, plain, wrong)
    lost = plain.clone()
    lost[0, 1, 0] = torch.nan
    assert not _agree(before, plain, lost)
