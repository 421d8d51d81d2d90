"""Lane forms of layers, losses and updates give the numbers of the plain ones, to any order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.task import masked_mean
from sartor.core.torch_private import differentiating
from sartor.core.tree import Tree
from sartor.engines.lanes import dense, leaves, losses, pooling, recurrence
from sartor.engines.lanes.operations import LaneOperations
from sartor.engines.lanes.shapes import kernels
from sartor.engines.parts import Arena
from sartor.engines.plan import BatchPlan


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put plain torch in the place of the kernels; returns what was launched."""
    calls: list[str] = []

    def product(a: Tensor, b: Tensor, bias: Tensor | None, sums: bool) -> tuple[Tensor, Tensor]:
        calls.append("sums" if sums else "product")
        return a @ b if bias is None else a @ b + bias[:, None, :], a.sum(2)

    def entropy(s: Tensor, y: Tensor, g: Tensor | None) -> Tensor:
        calls.append("losses")
        rows, labels = s.reshape(-1, s.shape[-1]), y.reshape(-1)
        if g is None:
            return F.cross_entropy(rows, labels, reduction="none").reshape(y.shape)
        kept = (labels >= 0).to(s.dtype)[:, None]
        hot = F.one_hot(labels.clamp(min=0), s.shape[-1]).to(s.dtype)
        slopes = (rows.softmax(-1) - hot) * kept * g.reshape(-1, 1)
        return slopes.reshape(s.shape)

    def pool(x: Tensor, g: Tensor | None, kernel: Any) -> Tensor:
        calls.append("pool")
        planes = x.reshape(1, -1, *x.shape[-2:])
        found, where = F.max_pool2d(planes, tuple(kernel), return_indices=True)
        if g is None:
            return found.reshape(*x.shape[:-2], *found.shape[-2:])
        g = g.reshape(found.shape)
        spread = torch.zeros_like(planes).flatten(2)
        spread.scatter_(2, where.flatten(2), g.flatten(2))
        return spread.reshape(x.shape)

    def mean(v: Tensor, m: Tensor, g: Tensor | None) -> Tensor:
        calls.append("mean")
        weight = m.to(v.dtype)
        count = weight.sum(1).clamp(min=1)
        return (v * weight).sum(1) / count if g is None else g[:, None] * weight / count[:, None]

    def update(kernel: str, lists: list[list[Tensor]], factors: list[Tensor]) -> list[Tensor]:
        calls.append(kernel)
        plain = getattr(tree, f"{kernel}_leaves")
        rows = [[x.reshape(len(x), -1) for x in leaf] for leaf in lists]
        found = plain(*rows, *(f[:, None] for f in factors))
        return [y.reshape(x.shape) for x, y in zip(lists[0], found, strict=True)]

    for room in (dense, losses, pooling):
        monkeypatch.setattr(room, "usable", lambda *tensors: True)
    monkeypatch.setattr(losses, "takes_mean", lambda values, mask: values.dim() == 1)
    monkeypatch.setattr(leaves, "takes_update", lambda lists, f: not differentiating())
    monkeypatch.setattr(dense, "_launch_product", product)
    monkeypatch.setattr(losses, "_launch_losses", entropy)
    monkeypatch.setattr(pooling, "_launch_pool", pool)
    monkeypatch.setattr(losses, "_launch_mean", mean)
    monkeypatch.setattr(leaves, "_launch_update", update)
    return calls


def _loss(p: Tree, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    hidden = F.linear(F.max_pool2d(x, (2, 3)).flatten(1), p["w1"], p["b1"]).tanh()
    scores = F.linear(hidden, p["w2"])
    return masked_mean(F.cross_entropy(scores, y, reduction="none"), mask)


def _step(p: Tree, x: Tensor, y: Tensor, mask: Tensor, rate: Tensor) -> tuple[Tree, Tensor]:
    slope = grad(_loss)(p, x, y, mask)
    return tree.addcmul(p, slope, -rate), _loss(p, x, y, mask)


def _drawn(*lead: int) -> tuple[Any, ...]:
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn((*lead, *shape), generator=rng, dtype=torch.float64)

    y = torch.randint(0, 4, (*lead, 5), generator=rng)
    y[..., 2] = -100  # torch leaves such labels out
    mask = torch.rand(*lead, 5, generator=rng) > 0.3
    # A pooling by (2, 3) leaves a row and two columns of (5, 8) out.
    params = {"w1": normal(7, 8), "b1": normal(7), "w2": normal(4, 7)}
    return params, normal(5, 2, 5, 8), y, mask, normal().abs()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_a_step_is_the_same(launched: list[str], lead: tuple[int, ...]) -> None:
    given = _drawn(*lead)
    step: Any = _step
    for _ in lead:
        step = vmap(step)
    plain = step(*given)
    assert not launched
    with LaneOperations():
        found = step(*given)
    assert set(launched) == {"product", "sums", "losses", "pool", "mean", "addcmul"}
    assert launched.count("addcmul") == 1
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_second_derivatives(launched: list[str]) -> None:
    params, x, y, mask, _ = _drawn()

    def curved(p: Tree) -> Tensor:
        slope = grad(_loss)(p, x, y, mask)
        return tree.dot(slope, tree.map(torch.sin, p))

    plain = grad(curved)(params)
    with LaneOperations():
        found = grad(curved)(params)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)


def test_weights_shared_by_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all samples of the inner lanes are rows of one product."""
    shapes: list[tuple[int, ...]] = []
    plainly = torch.baddbmm

    def watched(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        shapes.append(a.shape)
        return plainly(bias, a, b)

    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    params = tree.map(lambda leaf: leaf[:2, 0], _drawn(2, 3)[0])

    def runs(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return vmap(lambda one: dense.linear(one, w, b))(x)

    plain = torch.einsum("rlni,roi->rlno", x, params["w1"]) + params["b1"][:, None, None]
    monkeypatch.setattr(torch, "baddbmm", watched)
    found = vmap(runs)(x, params["w1"], params["b1"])
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    assert shapes == [(2, 15, 8)]


def test_an_update_that_is_differentiated_stays_plain(launched: list[str]) -> None:
    """Exact meta-gradients go through a step; the kernel of the update has no derivative."""

    def through(w: Tensor) -> Tensor:
        moved = tree.addcmul({"a": w, "b": 2 * w}, {"a": w * w, "b": w}, torch.tensor(0.5))
        return (moved["a"] * moved["b"]).sum()

    w = torch.tensor([1.0, 2.0])
    with LaneOperations():
        found = grad(through)(w)
    assert "addcmul" not in launched
    torch.testing.assert_close(found, grad(through)(w))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_updates_of_trees(launched: list[str], lead: tuple[int, ...]) -> None:
    a = _drawn(*lead)[0]
    b, c = tree.map(torch.sin, a), tree.map(torch.cos, a)
    rate, pull = (_drawn(*lead)[4] * factor for factor in (0.3, 2.0))

    def formulas(a: Tree, b: Tree, c: Tree, rate: Tensor, pull: Tensor) -> tuple[Tree, ...]:
        return (
            tree.map(lambda x, y: x + rate * y, a, b),
            tree.map(lambda x, y, z: x + rate * (y - z), a, b, c),
            tree.map(lambda x, y, z: x - rate * (y + pull * (x - z)), a, b, c),
        )

    def updates(a: Tree, b: Tree, c: Tree, rate: Tensor, pull: Tensor) -> tuple[Tree, ...]:
        return (
            tree.addcmul(a, b, rate),
            tree.add_difference(a, b, c, rate),
            tree.pulled_step(a, b, c, rate, pull),
        )

    for _ in lead:
        formulas, updates = vmap(formulas), vmap(updates)
    wanted = formulas(a, b, c, rate, pull)
    torch.testing.assert_close(updates(a, b, c, rate, pull), wanted, rtol=1e-12, atol=1e-12)
    assert not launched
    with LaneOperations():
        found = updates(a, b, c, rate, pull)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert launched == ["addcmul", "add_difference", "pulled_step"]


@pytest.mark.parametrize(
    "settings",
    [
        {"stride": 1},
        {"padding": 1},
        {"ceil_mode": True},
        {"kernel_size": (2, 3), "stride": (2, 3)},
    ],
)
def test_other_poolings_stay_plain(launched: list[str], settings: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    given = {"kernel_size": 2, **settings}
    with LaneOperations():
        found = F.max_pool2d(x, **given)
    torch.testing.assert_close(found, F.max_pool2d(x, **given))
    assert bool(launched) == (given.get("stride") == (2, 3))


@pytest.mark.parametrize(
    "settings",
    [
        {"reduction": "mean"},
        {"label_smoothing": 0.1},
        {"ignore_index": 1},
        {"weight": torch.ones(4)},
    ],
)
def test_other_losses_stay_plain(launched: list[str], settings: dict[str, Any]) -> None:
    scores, y = torch.randn(6, 4), torch.randint(0, 4, (6,))
    given = {"reduction": "none", **settings}
    with LaneOperations():
        found = F.cross_entropy(scores, y, **given)
    assert not launched
    torch.testing.assert_close(found, F.cross_entropy(scores, y, **given))


def test_every_kernel_that_is_launched_exists() -> None:
    """Launches name their module in words, which no import checks before a GPU is used."""
    folder = Path(losses.__file__).parents[1]
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    named = set(re.findall(r'launch\(\s*"(\w+_kernels)",\s*"(\w+)"', text))
    for room, module in ((leaves, "leaf_kernels"), (recurrence, "recurrent_kernels")):
        by_name = re.findall(r'_launch\("(\w+)"', Path(room.__file__).read_text())
        assert by_name
        named |= {(module, kernel) for kernel in by_name}
    assert len(named) > 15
    for module, kernel in sorted(named):
        assert hasattr(kernels(module), kernel), f"{module}.{kernel}"


def test_kernels_are_for_cuda() -> None:
    x = torch.randn(3, 4)
    assert not dense.takes_linear(x, x, None)
    assert not losses.takes_cross_entropy(x, torch.zeros(3, dtype=torch.int64))
    assert not pooling.takes_pool(x[None, None], (2, 2))
    assert not losses.takes_mean(x[0], x[0] > 0)
    assert not leaves.takes_update([[x, x], [x, x]], [torch.tensor(1.0)])
    assert not leaves.takes_settle([x[None], x[None]], [x[None], x[None]])


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_kernels(lead: tuple[int, ...]) -> None:
    params, x, y, mask, rate = (
        tree.map(lambda leaf: leaf.cuda(), part) if isinstance(part, dict) else part.cuda()
        for part in _drawn(*lead)
    )
    step: Any = _step
    for _ in lead:
        step = vmap(step)
    plain = step(params, x, y, mask, rate)
    single = tree.map(lambda leaf: leaf.float(), params)
    with LaneOperations():
        found = step(single, x.float(), y, mask, rate.float())
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.gpu
def test_kernels_of_updates() -> None:
    """All leaves in one launch; a centre that all lanes share is not copied."""
    now = tree.map(lambda leaf: leaf.float().cuda(), _drawn(3)[0])
    slope = tree.map(torch.sin, now)
    centre = tree.map(lambda leaf: leaf[0], now)
    rate, pull = torch.rand(2, 3, device=DEVICE)

    def updates(a: Tree, b: Tree, c: Tree, rate: Tensor, pull: Tensor) -> tuple[Tree, ...]:
        near = tree.add_difference(a, b, c, rate)
        return near, tree.pulled_step(a, b, c, rate, pull)

    every = vmap(updates, in_dims=(0, 0, None, 0, 0))
    plain = every(now, slope, centre, rate, pull)
    with LaneOperations():
        found = every(now, slope, centre, rate, pull)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)


DEVICE = "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 16, 20])
def test_kernels_of_a_large_layer(rows: int) -> None:
    """Few rows and a long sum, which many programs share; more rows are the library's."""
    drawn = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(2, *shape, generator=drawn, dtype=torch.float64)
        for shape in ((rows, 9000), (130, 9000), (130,))
    )

    def objective(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, w, b)).square().sum() / 9000

    every = vmap(grad(objective, argnums=(0, 1, 2)))
    plain = every(weight, bias, x)
    with LaneOperations():
        found = every(*(part.float().cuda() for part in (weight, bias, x)))
    for one, wanted in zip(found, plain, strict=True):
        torch.testing.assert_close(one.cpu(), wanted, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.gpu
def test_settling_changes_the_lanes_that_are_active() -> None:
    shapes, dtypes = ((3, 2), (), (1500,), ()), (torch.float32, torch.float32, torch.float64)
    kinds = [*dtypes, torch.int64]
    into = [
        torch.zeros((1, 4, *s), dtype=d, device=DEVICE) for s, d in zip(shapes, kinds, strict=True)
    ]
    values = [torch.ones((1, 3, *leaf.shape[2:]), device=DEVICE).to(leaf.dtype) for leaf in into]
    limit = torch.tensor([[5, 2, 4]], device=DEVICE)
    leaves.settle([x[:, :3] for x in into], values, limit, torch.tensor([3], device=DEVICE))
    for leaf in into:
        assert [bool(lane.any()) for lane in leaf[0]] == [True, False, True, False]
        assert (leaf[0, 0] == 1).all()
        assert (leaf[0, 2] == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("coded", [False, True])
def test_a_batch_is_the_gathered_one(shared: bool, coded: bool) -> None:
    """For runs that differ in their labels alone, features are found through ``row``."""
    rng = torch.Generator().manual_seed(0)
    ends = ((0, 50, 4), (-1, 6, 4), (0, 2, 1))
    parts = [torch.randint(a, b, (1, 5, 3, width), generator=rng) for a, b, width in ends]
    table = torch.cat(parts, -1).to(DEVICE)
    none = np.zeros((1, 5), dtype=np.int64)
    plan = BatchPlan(table, table, none, none, 4, 1, 6, np.stack([none, none]))
    x = torch.randint(0, 256, (50, 5, 7), generator=rng, dtype=torch.uint8).to(DEVICE)
    palette = torch.randn(256, generator=rng).to(DEVICE)
    arena = Arena(
        x=x if coded else palette[x.int()],
        y=torch.randint(0, 9, (50,), generator=rng).to(DEVICE),
        splits={},
        num_runs=1,
        num_clients=5,
        device=torch.device(DEVICE),
        row=torch.randperm(50, generator=rng).to(DEVICE) if shared else None,
        palette=palette if coded else None,
    )
    period = torch.tensor([3], device=DEVICE)
    for step in (1, 5):
        found = leaves.fetch(plan, arena, torch.tensor([step], device=DEVICE), period, 3)
        wanted = plan.batches(arena, table[:, :3, step % 3])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
