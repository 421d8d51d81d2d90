"""Draws in one operation are the numbers of ``rng.normal``, wherever a step draws."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from sartor.core import rng
from sartor.core.errors import ContractError
from sartor.core.local import Local
from sartor.engines.cpu import compiler as cpp
from sartor.engines.cpu import native
from sartor.engines.cpu import traces as traced
from sartor.engines.cpu.thinned import thin
from sartor.engines.cuda.draw_kernels import philox as _philox
from sartor.engines.cuda.jit import jit, tl  # type: ignore[attr-defined]
from sartor.engines.lanes import draws
from sartor.engines.lanes.operations import DrawOperations, LaneOperations
from sartor.engines.lanes.rules import DIRECT
from sartor.methods import build
from tests.core.test_rng import VECTORS
from tests.toys import assert_same, federation, net_task, outcome, run, simulation

compiled = pytest.mark.skipif(cpp.library() is None, reason=cpp.status())
DEVICE = "cuda"
TYPES = (torch.float32, torch.float64, torch.bfloat16)


def _keys(device: str = "cpu") -> Tensor:
    """Return five keys, the least and the largest among them."""
    ends = torch.tensor([[0, 0], [2**32 - 1, 2**32 - 1], [2**31, 2**31 - 1]])
    return torch.cat([ends, rng.fold(rng.key(5), torch.arange(2))]).to(device)


def _plain(keys: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([rng.normal(key, (num,), dtype) for key in keys])


def _assert_drawn(found: Tensor, keys: Tensor, num: int, dtype: torch.dtype) -> None:
    """Check numbers; two libraries may round one in 10⁸ differently, and no other may differ."""
    wanted = _plain(keys, num, dtype)
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    if dtype != torch.float64:
        assert int((found != wanted).sum()) <= found.numel() * 1e-7 + 0.99
    torch.testing.assert_close(
        found.double(),
        wanted.double(),
        rtol=4e-15 if dtype == torch.float64 else torch.finfo(dtype).eps,
        atol=0.0,
    )


# ---- the numbers ---------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("dtype", TYPES)
def test_compiled_draws_are_the_plain_ones(dtype: torch.dtype) -> None:
    """In all lanes, on 200,000 numbers; bfloat16 is left to torch."""
    keys = _keys()
    _assert_drawn(draws.lane_normal(keys, 40_001, dtype), keys, 40_001, dtype)


@compiled
@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_what_dropout_keeps_is_the_same(p: float) -> None:
    """Compiled, mapped over lanes or not: every boolean, for every length and number of a draw."""
    keys, low = _keys(), rng.lowest_kept(p)
    for number, num in ((0, 1), (7, 5), (7, 33), (123_456, 40_001)):
        wanted = torch.stack([rng.keep_words(key, number, num) for key in keys]) >= low
        assert torch.equal(draws.lane_kept(keys, number, num, low), wanted)
    with DrawOperations():
        found = vmap(lambda key: rng.kept(key, 3, (2, 9), p))(keys)
    assert torch.equal(found, torch.stack([rng.kept(key, 3, (2, 9), p) for key in keys]))


@compiled
def test_every_length_is_the_beginning_of_a_longer_one() -> None:
    """Nothing depends on where a block of counters or a vector of them ends."""
    keys = _keys()
    every = _plain(keys, 150, torch.float64)
    for num in (*range(1, 70), 127, 128, 129):
        found = native.drawn(keys, num, torch.float64)
        torch.testing.assert_close(found, every[:, :num], rtol=1e-13, atol=0.0)


def _words(pairs: Tensor) -> list[int]:
    """Undo the rule of Box and Muller: the words that (2j, 2j+1) were made of."""
    x, y = pairs.reshape(-1, 2).unbind(-1)
    u = torch.exp(-0.5 * (x.square() + y.square()))
    v = torch.atan2(y, x) / (2 * math.pi) % 1.0
    return (torch.stack((u, v), -1) * 2.0**32 - 0.5).round().long().flatten().tolist()


@compiled
def test_known_answers_of_compiled_draws() -> None:
    """The published words of key and counter 0, from the numbers that were made of them."""
    zero = torch.zeros(1, 2, dtype=torch.int64)
    assert _words(native.drawn(zero, 4, torch.float64)) == list(VECTORS[0][2])


def test_keys_must_be_pairs_of_integers() -> None:
    for keys in (torch.zeros(2, dtype=torch.int64), torch.zeros(3, 2), torch.zeros(3, 1).long()):
        with pytest.raises(ValueError, match="fit together"):
            native.drawn(keys, 3, torch.float32)


@pytest.mark.parametrize("lead", [(5,), (1, 5), (5, 1)])
def test_lanes_are_merged(lead: tuple[int, ...]) -> None:
    keys = _keys()
    draw: Any = lambda key: rng.normal(key, (3, 2), torch.float64)  # noqa: E731
    for _ in lead:
        draw = vmap(draw)
    with DrawOperations():
        found = draw(keys.reshape(*lead, 2))
    wanted = _plain(keys, 6, torch.float64).reshape(*lead, 3, 2)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=0.0)
    turned = vmap(partial(draws.lane_normal, num=6, dtype=torch.float64), in_dims=2)
    both = turned(torch.stack((keys, keys.flip(0)), -1))
    torch.testing.assert_close(both[1], found.reshape(5, 6).flip(0))


def test_draws_inside_a_derivative_are_constants() -> None:
    """As plain ones: mapped inside a gradient, around it, and without a map."""
    keys, w = _keys(), torch.randn(5, 3, dtype=torch.float64)

    def loss(w: Tensor, key: Tensor) -> Tensor:
        return (w.square() * rng.normal(key, (3,), torch.float64)).sum()

    def slopes() -> list[Tensor]:
        inside = grad(lambda w: vmap(loss)(w, keys).sum())(w)
        return [vmap(grad(loss))(w, keys), inside, grad(loss)(w[0], keys[0])]

    wanted = slopes()
    with DrawOperations():
        found = slopes()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)


def test_the_operator_knows_its_shape() -> None:
    with FakeTensorMode():
        found = draws.lane_normal(torch.zeros(4, 2, dtype=torch.int64), 7, torch.float64)
    assert (tuple(found.shape), found.dtype) == ((4, 7), torch.float64)
    assert draws.lane_normal(torch.zeros(0, 2, dtype=torch.int64), 7, torch.float32).shape == (0, 7)


def test_without_the_library_torch_draws(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    keys = _keys()
    with DrawOperations():
        found = vmap(lambda key: rng.normal(key, (9,)))(keys)
    assert torch.equal(found, _plain(keys, 9, torch.float32))
    assert torch.equal(found, draws.lane_normal(keys, 9, torch.float32))
    assert not called


# ---- who draws so --------------------------------------------------------------------------------


class _Counted(TorchDispatchMode):
    """Counts operations, as a device would be asked to launch them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@compiled
def test_a_draw_is_one_operation() -> None:
    draw, keys = vmap(lambda key: rng.normal(key, (9, 7))), _keys()
    with _Counted() as plain:
        draw(keys)
    with _Counted() as one, DrawOperations():
        draw(keys)
    assert len(plain.names) > 100
    assert one.names == ["sartor::lane_normal"]


def test_lanes_on_a_gpu_are_drawn_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []

    def launch(keys: Tensor, num: int, dtype: torch.dtype) -> Tensor:
        launched.append((*keys.shape, num, dtype))
        return _plain(keys, num, dtype)

    monkeypatch.setattr(draws, "_launches", lambda keys, dtype: True)
    monkeypatch.setattr(draws, "_launch", launch)
    keys = _keys()
    with LaneOperations():
        found = vmap(lambda key: rng.normal(key, (2, 4), torch.bfloat16))(keys)
    assert torch.equal(found, _plain(keys, 8, torch.bfloat16).reshape(5, 2, 4))
    assert launched == [(5, 2, 8, torch.bfloat16)]


def test_what_cannot_be_served_is_left_to_torch(called: list[str]) -> None:
    """Empty draws, other types, and keys that a phase did not ask for."""
    key = rng.key(3)
    with DrawOperations():
        assert rng.normal(key, (0, 4)).shape == (0, 4)
        half = rng.normal(key, (4,), torch.bfloat16)
        with pytest.raises(ContractError, match="random=True"):
            rng.normal(key[:0], (3,))
    assert torch.equal(half, rng.normal(key, (4,), torch.bfloat16))
    assert not called
    rng.normal(key, (3,))
    assert not called, "outside of an engine nothing changes"


@compiled
def test_a_trace_draws_from_the_keys_it_is_given(called: list[str]) -> None:
    """Each key is drawn from once, when the trace is called, and never kept."""

    def step(key: Tensor, other: Tensor) -> Tensor:
        twice = rng.normal(key, (5,)) + rng.normal(key, (5,))
        return twice - rng.normal(other, (5,))

    def mapped(keys: Tensor, others: Tensor) -> Tensor:
        with DrawOperations():
            return vmap(step)(keys, others)

    keys = _keys()
    traced = thin(make_fx(mapped)(keys, keys.flip(0)))
    called.clear()
    for here in (keys, rng.fold(keys, 1)):
        wanted = vmap(step)(here, here.flip(0))
        called.clear()
        assert torch.equal(traced(here, here.flip(0)), wanted)
        assert called == ["normals", "normals"]
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    direct = DIRECT[torch.ops.sartor.lane_normal.default]
    assert targets.count(direct) == 2, "the registry is spared"
    assert not any("bitwise" in str(target) for target in targets)


def _bayes(engine: str, chunk: int | None = None) -> Any:
    task = net_task()
    method = build("pfedbayes", task, Local(epochs=2, batch=2, lr=0.05), {})
    clients = [federation(sizes=(14, 13))]
    return simulation(method, task, clients, engine=engine, chunk=chunk, rounds=2, eval_every=2)


@compiled
def test_engines_agree(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane without vmap, and all lanes; mapped in the first round, traced in the second.

    The sequential engine draws by tensors.
    """
    monkeypatch.setattr(traced.Traces, "worth_it", 14)  # the steps of a round
    wanted = outcome(run(_bayes("sequential")))
    assert not called
    for chunk in (1, None):
        found: Any = run(_bayes("vectorised", chunk))
        assert "normals" in called
        assert found.context.engine.traces.made
        assert_same(outcome(found), wanted, atol=1e-10)
        called.clear()


# ---- the kernel ----------------------------------------------------------------------------------


@jit()
def _answer(given, out):
    from_key = tl.load(given).to(tl.uint32), tl.load(given + 1).to(tl.uint32)
    c0 = tl.load(given + 2).to(tl.uint32)
    c1 = tl.load(given + 3).to(tl.uint32)
    c2 = tl.load(given + 4).to(tl.uint32)
    c3 = tl.load(given + 5).to(tl.uint32)
    w0, w1, w2, w3 = _philox(from_key[0], from_key[1], c0, c1, c2, c3)
    tl.store(out, w0.to(tl.int64))
    tl.store(out + 1, w1.to(tl.int64))
    tl.store(out + 2, w2.to(tl.int64))
    tl.store(out + 3, w3.to(tl.int64))


@pytest.mark.gpu
@pytest.mark.parametrize(("counter", "key", "wanted"), VECTORS)
def test_known_answers_of_the_kernel(counter: Any, key: Any, wanted: Any) -> None:
    given = torch.tensor([*key, *counter], device=DEVICE)
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    _answer[(1,)](given, out)
    assert out.tolist() == list(wanted)
    zero = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    assert _words(draws._launch(zero, 4, torch.float64).cpu()) == list(VECTORS[0][2])


@pytest.mark.gpu
def test_words_of_the_kernel() -> None:
    """Those of the host, at any length; keys may be columns of a table."""
    for num in (1, 127, 129, 3000):
        keys = rng.fold(rng.key(5), torch.arange(num))
        blocks = torch.arange(num) % 700
        table = keys.T.contiguous().to(DEVICE)
        found = draws.words_at(table.T, blocks.to(DEVICE))
        assert torch.equal(found.cpu(), rng.words_at(keys, blocks))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_draws_of_the_kernel(dtype: torch.dtype) -> None:
    """Against the host's, from keys that do not lie side by side, and at any length."""
    keys = _keys()
    apart = torch.stack((keys, keys + 1), -1).to(DEVICE)[..., 0]
    for num in (1, 3, 511, 512, 513, 40_001):
        with LaneOperations():
            found = vmap(lambda key: rng.normal(key, (num,), dtype))(apart)  # noqa: B023
        _assert_drawn(found.cpu(), keys, num, dtype)
