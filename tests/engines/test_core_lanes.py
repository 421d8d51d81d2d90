"""Layers with few outputs and losses over few classes on a CPU: the numbers of PyTorch's."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.local import Local
from sartor.core.task import Task, masked_mean
from sartor.core.tree import Tree
from sartor.engines.cpu import compiler as cpp
from sartor.engines.cpu import native
from sartor.engines.cpu import traces as traced
from sartor.engines.cpu.thinned import thin
from sartor.engines.lanes import losses
from sartor.engines.lanes.operations import CoreLanes
from sartor.methods import build
from tests.toys import assert_same, federation, outcome, run, simulation

compiled = pytest.mark.skipif(cpp.library() is None, reason=cpp.status())
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def _drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype)


# ---- a dense layer -----------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(
    lanes=st.integers(1, 4),
    rows=st.integers(1, 9),
    inputs=st.integers(16, 70),
    outputs=st.integers(1, 16),
    gap=st.integers(0, 3),
    biased=st.booleans(),
)
def test_a_product_with_few_columns(
    dtype: torch.dtype, lanes: int, rows: int, inputs: int, outputs: int, gap: int, biased: bool
) -> None:
    """Whatever the sizes leave over for the last vector and the last block; rows may lie apart."""
    x = _drawn(lanes, rows, inputs + gap, dtype=dtype)[..., :inputs]
    w = _drawn(lanes, outputs, inputs + gap, dtype=dtype, seed=1)[..., gap:]
    bias = _drawn(lanes, outputs, dtype=dtype, seed=2) if biased else None
    wanted = x.double() @ w.double().mT
    wanted = wanted if bias is None else wanted + bias.double()[:, None]
    found = native.dense(x, w, bias)
    assert found.dtype == dtype
    near = TOLERANCE[dtype] * math.sqrt(inputs)
    torch.testing.assert_close(found.double(), wanted, rtol=near, atol=near)


@compiled
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(
    lanes=st.integers(1, 4),
    rows=st.integers(1, 15),
    depth=st.integers(1, 22),
    columns=st.integers(16, 150),
    gap=st.integers(0, 3),
    turned=st.booleans(),
)
def test_a_product_with_a_short_sum(
    dtype: torch.dtype, lanes: int, rows: int, depth: int, columns: int, gap: int, turned: bool
) -> None:
    """As the gradient of weights; and with a step along it the bits of one after the other."""
    a = (
        _drawn(lanes, depth, rows, dtype=dtype).mT
        if turned
        else _drawn(lanes, rows, depth).to(dtype)
    )
    b = _drawn(lanes, depth, columns + gap, dtype=dtype, seed=1)[..., gap:]
    found = native.outer(a, b)
    near = TOLERANCE[dtype] * math.sqrt(depth)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=near, atol=near)
    now = _drawn(lanes, rows, columns, 2, dtype=dtype, seed=2)[..., 0]
    factor = _drawn(lanes, dtype=dtype, seed=3)
    moved = native.outer(a, b, now, factor)
    assert torch.equal(moved, native.updated([now], [found], factor)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_LARGE", 0)  # written past the caches
        assert torch.equal(native.outer(a, b, now, factor), moved)


@compiled
def test_lanes_and_threads_do_not_change_a_bit() -> None:
    x, w = _drawn(7, 20, 784, dtype=torch.float32), _drawn(7, 10, 784, dtype=torch.float32, seed=1)
    scores, y = _drawn(7, 20, 10, dtype=torch.float32), torch.arange(140).reshape(7, 20) % 10
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            slopes = native.entropy(scores, y, torch.ones(7, 20), -100)
            losses_of = native.entropy(scores, y, None, -100)
            outer = native.outer(scores.mT, x)
            found.append((native.dense(x, w, None), losses_of, slopes, outer))
    finally:
        torch.set_num_threads(before)
    alone = [native.dense(x[k : k + 1], w[k : k + 1], None) for k in range(7)]
    assert torch.equal(torch.cat(alone), found[0][0])
    alone = [native.outer(scores[k : k + 1].mT, x[k : k + 1]) for k in range(7)]
    assert torch.equal(torch.cat(alone), found[0][3])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


# ---- losses ------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@given(rows=st.integers(1, 9), classes=st.integers(1, 32), seed=st.integers(0, 99))
def test_losses_and_their_slopes(dtype: torch.dtype, rows: int, classes: int, seed: int) -> None:
    """Also of scores that are far apart, and of labels that torch leaves out."""
    scores = 30 * _drawn(rows, classes, seed=seed)
    y = torch.arange(rows) * 7 % classes
    y[-1] = -100
    along = _drawn(rows, seed=seed + 1)
    exact = scores.clone().requires_grad_()
    wanted = F.cross_entropy(exact, y, reduction="none")
    (slope,) = torch.autograd.grad(wanted, exact, along)
    near = {"rtol": TOLERANCE[dtype], "atol": 30 * TOLERANCE[dtype]}
    found = native.entropy(scores.to(dtype), y, None, -100)
    torch.testing.assert_close(found.double(), wanted, **near)
    found = native.entropy(scores.to(dtype), y, along.to(dtype), -100)
    torch.testing.assert_close(found.double(), slope, **near)


@compiled
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers(value: float) -> None:
    """They are seen where torch sees them: a diverged run must not look sound."""
    scores, y = torch.zeros(4, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    scores[1, 0] = scores[2] = value
    exact = scores.clone().requires_grad_()
    wanted = F.cross_entropy(exact, y, reduction="none")
    torch.testing.assert_close(losses.row_losses(scores, y), wanted, equal_nan=True)
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    found = losses.row_slopes(torch.ones(4, dtype=torch.float64), scores, y)
    torch.testing.assert_close(found, slope, equal_nan=True)


@compiled
@pytest.mark.parametrize("label", [-1, 3, 2**40])
def test_a_label_that_is_no_class(label: int) -> None:
    with pytest.raises(IndexError, match="not one of the 3 classes"):
        losses.row_losses(torch.zeros(2, 3), torch.tensor([0, label]))


# ---- the update --------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_updates(dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of leaves of any length; lanes may lie apart, or be one. Past the caches the same bits."""
    sizes = [(), (1,), (17,), (3, 41), (40_001,)]
    whole = [_drawn(3, *size, 2, dtype=dtype) for size in sizes]
    now = [leaf[..., 0] for leaf in whole] + [_drawn(1, 50, dtype=dtype).expand(3, 50)]
    slope = [_drawn(3, *leaf.shape[1:], dtype=dtype, seed=1) for leaf in now]
    factor = _drawn(3, dtype=dtype, seed=2)
    monkeypatch.setattr(native, "_LARGE", 1 << 60 if large else 0)
    plain = native.updated(now, slope, factor)
    monkeypatch.setattr(native, "_LARGE", 0 if large else 1 << 60)
    found = native.updated(now, slope, factor)
    for a, b, new, same in zip(now, slope, found, plain, strict=True):
        wanted = a + factor.reshape(-1, *(1,) * (a.dim() - 1)) * b
        torch.testing.assert_close(new, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(new, same)


@compiled
def test_updates_of_lanes(called: list[str]) -> None:
    """All lanes in one call for each leaf; not where the update itself is derived."""
    now, slope = (
        {"a": _drawn(4, 9), "b": _drawn(4, 2, 3)},
        {"a": _drawn(4, 9), "b": _drawn(4, 2, 3)},
    )
    rate = _drawn(4, seed=3)
    plain = vmap(tree.addcmul)(now, slope, rate)
    with CoreLanes():
        found = vmap(tree.addcmul)(now, slope, rate)
        assert called == ["update"]
        grad(lambda r: tree.addcmul({"a": now["a"]}, {"a": now["a"]}, r)["a"].sum())(rate[0])
    assert called == ["update"]
    torch.testing.assert_close(found, plain, rtol=1e-14, atol=1e-14)


# ---- both in a step ----------------------------------------------------------------------------


def _loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
    rows = F.cross_entropy(F.linear(x, p["w"], p["b"]), y, reduction="none")
    return masked_mean(rows, y > 0)


def _given(*lead: int) -> tuple[Tree, Tensor, Tensor]:
    y = torch.arange(math.prod(lead) * 30).reshape(*lead, 30) % 6
    return {"w": _drawn(*lead, 6, 200), "b": _drawn(*lead, 6, seed=1)}, _drawn(*lead, 30, 200), y


@compiled
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_slopes_are_the_same(called: list[str], lead: tuple[int, ...]) -> None:
    slopes: Any = grad(_loss)
    for _ in lead:
        slopes = vmap(slopes)
    plain = slopes(*_given(*lead))
    assert not called
    with CoreLanes():
        found = slopes(*_given(*lead))
    assert called == ["dense", "entropy", "entropy", "outer"]
    torch.testing.assert_close(found, plain, rtol=1e-11, atol=1e-12)


def _plain_step(p: Tree, slopes: Callable[[Tree], Tree], rate: Tensor) -> Tree:
    return tree.addcmul(p, slopes(p), rate)


def _with_momentum(p: Tree, slopes: Callable[[Tree], Tree], rate: Tensor) -> Tree:
    """Read the gradient of the weights twice."""
    moved = tree.addcmul(p, slopes(p), rate)
    return {**moved, "w": moved["w"] + 0.9 * slopes(p)["w"]}


def _twice(p: Tree, slopes: Callable[[Tree], Tree], rate: Tensor) -> Tree:
    one, other = (tree.addcmul(p, slopes(p), scale * rate) for scale in (1.0, 2.0))
    return {**one, "w": one["w"] - other["w"]}


def _bias_first(p: Tree, slopes: Callable[[Tree], Tree], rate: Tensor) -> Tree:
    """Read the sums of the gradient before the step."""
    found = slopes(p)
    return tree.addcmul(p, {**found, "b": found["b"] + 0.1 * p["b"]}, rate)


@compiled
@pytest.mark.parametrize(
    ("step", "outputs", "batch", "joins"),
    [
        (_plain_step, 6, 30, True),
        (_plain_step, 6, 70, True),  # too many samples: joined, and done one after the other
        (_plain_step, 129, 30, False),
        (_with_momentum, 6, 30, False),
        (_twice, 6, 30, False),
        (_bias_first, 6, 30, True),
    ],
)
def test_a_trace_joins_a_gradient_and_the_step_along_it(
    called: list[str], step: Any, outputs: int, batch: int, joins: bool
) -> None:
    """Of layers that are computed here, if nobody else reads it; the bits of a mapped step."""
    shapes = {"a": (5, 2), "b": (outputs,), "w": (outputs, 200)}
    p = {name: _drawn(3, *shape) for name, shape in shapes.items()}
    x, y = _drawn(3, batch, 200), torch.arange(3 * batch).reshape(3, batch) % 6

    def one(p: Tree, x: Tensor, y: Tensor, rate: Tensor) -> Tree:
        def loss(q: Tree) -> Tensor:
            return _loss(q, x, y) + q["a"].square().sum()

        found: Tree = step(p, grad(loss), rate)
        return found

    def steps(*given: Tensor) -> list[Tensor]:
        with CoreLanes():
            found = vmap(one)(dict(zip(shapes, given[:3], strict=True)), *given[3:])
        return [found[name] for name in shapes]

    given = [*p.values(), x, y, _drawn(3)]
    wanted = steps(*given)
    thin_steps = thin(make_fx(steps)(*given))
    names = [getattr(node.target, "__name__", "") for node in thin_steps.graph.nodes]
    assert names.count("moved_on_core") == joins
    called.clear()
    found = thin_steps(*given)
    assert ("outer" in called) == (outputs == 6 and batch == 30)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@compiled
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_second_derivatives(called: list[str]) -> None:
    """Hessians are taken forwards over backwards; torch's own operations serve them."""
    p, x, y = _given()

    def of_bias(b: Tensor) -> Tensor:
        return _loss({**p, "b": b}, x, y)

    def curved(b: Tensor) -> Tensor:
        return grad(of_bias)(b).square().sum()

    plain = hessian(of_bias)(p["b"]), grad(curved)(p["b"])
    with CoreLanes():
        found = hessian(of_bias)(p["b"]), grad(curved)(p["b"])
        jvp(of_bias, (p["b"],), (p["b"],))
    assert called
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)


@compiled
def test_what_is_left_to_torch(called: list[str]) -> None:
    """Many outputs or classes, few inputs, small layers, other types, autocast, other losses."""
    p, x, y = _given()
    with CoreLanes():
        F.linear(x, _drawn(129, 200))
        F.linear(_drawn(400, 15), _drawn(6, 15))
        F.linear(x[:2], p["w"])
        F.linear(x.bfloat16(), p["w"].bfloat16())
        F.linear(_drawn(9000), _drawn(6, 9000))
        F.cross_entropy(_drawn(30, 33), y, reduction="none")
        F.cross_entropy(_drawn(30, 6), y)
        F.cross_entropy(_drawn(30, 6), F.one_hot(y, 6).double(), reduction="none")
        F.cross_entropy(_drawn(30, 6), y, reduction="none", label_smoothing=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(x.float(), p["w"].float())
        with pytest.raises(RuntimeError):
            F.linear(x, p["w"][:, :9])
    assert not called


@compiled
@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
@pytest.mark.parametrize(("sizes", "served"), [((40, 40, 39), True), ((45, 20, 41), False)])
def test_traced_and_mapped_steps_give_the_same_bits(
    called: list[str],
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    served: bool,
    name: str,
) -> None:
    """A run that continues after a crash maps its first steps, which were traced before.

    Steps of unequal clients have ever other widths; they are seldom traced, and go the plain way.
    """
    task = Task(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(400, 5)), head="1")
    method = build(name, task, Local(epochs=2, batch=20, lr=0.05), {})
    clients = [federation(0, sizes=sizes, shape=(20, 20))]
    found = []
    one: Any
    for worth_it in (2, 10**6):
        monkeypatch.setattr(traced.Traces, "worth_it", worth_it)
        one = run(simulation(method, task, clients, engine="vectorised", rounds=3, points=()))
        assert bool(one.context.engine.traces.made) == (worth_it == 2)
        assert ({"dense", "entropy", "outer"} <= set(called)) == served
        assert ("update" in called) == (served and name == "fedavg")
        called.clear()
        found.append(outcome(one))
    assert_same(found[0], found[1])


def test_switched_off_torch_does_it() -> None:
    code = """if True:
        import torch
        from torch.nn import functional as F
        from sartor.engines.lanes.operations import CoreLanes
        from sartor.engines.cpu import compiler as cpp, native
        assert cpp.library() is None
        x, w, y = torch.randn(30, 200), torch.randn(6, 200), torch.zeros(30).long()
        with CoreLanes():
            found = F.cross_entropy(F.linear(x, w), y, reduction="none")
        assert torch.equal(found, F.cross_entropy(F.linear(x, w), y, reduction="none"))
    """
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"SARTOR_ACCELERATE": "none", "PATH": ""}
    )
