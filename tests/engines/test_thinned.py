"""Thin traces: fewer operations, the same numbers, and nobody sees a tensor that was kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.engines.cpu.thinned import thin
from sartor.engines.cpu.traces import Traces


def thinned(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, list[str]]:
    """Trace and thin a function; returns it and the names of its operations."""
    traced = thin(make_fx(fn)(*args))
    calls = [n for n in traced.graph.nodes if n.op == "call_function"]
    return traced.forward, [str(n.target).removeprefix("aten.") for n in calls]


X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x: x.t().t() + 1, ["add.Tensor"]),
        (lambda x: x.view(3, 4).expand(3, 4) + 1, ["add.Tensor"]),
        (lambda x: x.unsqueeze(0).select(0, 0) + 1, ["add.Tensor"]),
        (lambda x: x.view(12).view(3, 4) + 1, ["add.Tensor"]),
        (lambda x: x.detach() + 1, ["add.Tensor"]),
        (lambda x: torch.mul(x, 1) + 1, ["add.Tensor"]),
        (lambda x: x.clone() + 1, ["add.Tensor"]),
        (lambda x: x * torch.zeros_like(x), ["mul.Tensor"]),
        (lambda x: x * torch.full((4,), 3.0), ["mul.Tensor"]),
        (lambda x: x.neg() * x.neg(), ["neg.default", "mul.Tensor"]),
        (lambda x: torch.ones_like(x.exp().sum()) / x, ["div.Tensor"]),  # nobody reads the sum
        # and what must stay
        (lambda x: x.t() + 1, ["t.default", "add.Tensor"]),
        (lambda x: x.view(4, 3) + 1, ["view.default", "add.Tensor"]),
        (lambda x: x[:, :1].expand(3, 4) + 1, None),
        (lambda x: x[1:2].select(0, 0) + x[2:3].select(0, 0), None),
        (lambda x: x.double() + x, None),
        (lambda x: x[1:].as_strided((2, 4), (4, 1), 0) + 1, None),
        (lambda x: torch.view_as_real(torch.complex(x, x).conj() * (1 + 2j)), None),
        (lambda x: x * 2 + x * 3, None),
    ],
)
def test_what_changes_nothing_goes_and_the_numbers_stay(
    fn: Callable[[Tensor], Tensor], left: list[str] | None
) -> None:
    """The whole list of operations, where it shrinks; the same bits always."""
    run, names = thinned(fn, X)
    if left is not None:
        assert names == left
    for x in (X, -3 * X - 1):
        (found,) = [run(x)]
        assert torch.equal(found, fn(x))


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_step_of_a_network_is_half_as_long_and_the_same_to_the_bit(lanes: int) -> None:
    """Linear layers, a loss with a mask, a gradient, an update, over lanes."""
    torch.manual_seed(0)
    w, v = torch.randn(lanes, 5, 8), torch.randn(lanes, 4, 5)
    x, y = torch.randn(lanes, 6, 8), torch.randint(0, 4, (lanes, 6))
    mask = torch.arange(6).expand(lanes, 6) < 5

    def loss(params: tuple[Tensor, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        hidden = F.leaky_relu(F.linear(x, params[0]), 0.1)
        values = F.cross_entropy(F.linear(hidden, params[1]), y, reduction="none")
        return (values * mask).sum() / mask.sum().clamp(min=1)

    def step(w: Tensor, v: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> list[Tensor]:
        slopes = vmap(grad(loss))((w, v), x, y, mask)
        return [w - 0.1 * slopes[0], v - 0.1 * slopes[1]]

    plain = make_fx(step)(w, v, x, y, mask)
    before = sum(n.op == "call_function" for n in plain.graph.nodes)
    run, names = thinned(step, w, v, x, y, mask)
    assert len(names) < 0.65 * before
    for found, wanted in zip(run(w, v, x, y, mask), step(w, v, x, y, mask), strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_draws_are_not_merged() -> None:
    """Two draws are two draws."""
    run, names = thinned(lambda x: torch.rand_like(x) - torch.rand_like(x), X)
    assert names.count("rand_like.default") == 2
    assert run(X).abs().max() > 0


def test_a_trace_that_changes_tensors_is_left_as_it_is() -> None:
    """A filled tensor that is written to must be new in every call, and so must a copy."""

    def count(x: Tensor) -> Tensor:
        sums = torch.zeros_like(x)
        sums.add_(x)
        copy = x.clone()
        copy.mul_(2)
        return sums + copy + x

    run, _ = thinned(count, X)
    x = X.clone()
    for _ in range(2):
        assert torch.equal(run(x), count(X))
    assert torch.equal(x, X)


def test_what_is_returned_is_new() -> None:
    """Whoever changes a result changes neither an argument nor what the trace keeps."""

    def fn(x: Tensor) -> list[Tensor]:
        return [torch.zeros_like(x), torch.ones_like(x).view(12), x.clone(), x + 1, x + 1]

    run, _ = thinned(fn, X)
    x = X.clone()
    for found in (run(x), run(x)):
        assert all(torch.equal(one, other) for one, other in zip(found, fn(X), strict=True))
        for one in found:
            one.add_(5)
    assert torch.equal(x, X)


def test_a_traced_function_takes_and_returns_trees_as_before() -> None:
    """Dicts in any order, tuples in them; another structure or shape is another trace."""
    traces = Traces()
    traces.worth_it = 2
    calls = [0]

    def fn(tree: Any, pair: Any) -> Any:
        calls[0] += 1
        return {"b": tree["z"] + pair[0], "a": (tree["a"]["k"] - pair[1], {"c": pair[0] * 2})}

    def ask(z: float, rows: int = 2) -> Any:
        tree = {"z": torch.full((rows,), z), "a": {"k": torch.ones(rows)}}
        return traces.call(fn, fn, tree, (torch.ones(rows), torch.zeros(rows)))

    for _ in range(3):
        ask(1.0)
    traces.prepare()
    made = calls[0]
    found = ask(4.0)
    assert calls[0] == made
    assert found["b"].tolist() == [5.0, 5.0]
    assert found["a"][0].tolist() == [1.0, 1.0]
    assert found["a"][1]["c"].tolist() == [2.0, 2.0]
    assert ask(4.0, rows=3)["b"].shape == (3,)
    assert calls[0] == made + 1
