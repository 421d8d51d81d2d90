"""The loop of an LSTM layer as one operation: the numbers of the loop step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

import sartor
from sartor.core.loops import lstm_loop
from sartor.engines.cpu import compiler as cpp
from sartor.engines.cpu import native
from sartor.engines.lanes import recurrence
from sartor.engines.lanes.operations import CoreLanes, LaneOperations
from sartor.models import lstm

compiled = pytest.mark.skipif(cpp.library() is None, reason=cpp.status())
TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-5}


def _drawn(
    lanes: int, batch: int, steps: int, hidden: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What is given, the weights, where tokens are, the slope of the outputs, the first state."""
    rng = torch.Generator().manual_seed(0)
    draw: Any = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)  # noqa: E731
    lengths = torch.randint(0, steps + 1, (lanes, batch, 1), generator=rng)
    return (
        1.5 * draw(lanes, batch, steps, 4 * hidden),
        draw(lanes, 4 * hidden, hidden) / hidden**0.5,
        torch.arange(steps) < lengths,
        draw(lanes, batch, steps, hidden),
        draw(lanes, 2, batch, hidden),
    )


def _objective(turned: bool) -> Any:
    def objective(
        given: Tensor, weight: Tensor, is_token: Tensor, slope: Tensor, start: Tensor
    ) -> Tensor:
        outputs, last = lstm_loop(given, weight, is_token, turned, (start[0], start[1]))
        return (outputs * slope).sum() + (last * slope[:, 0]).sum()

    return objective


@compiled
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@settings(deadline=None)
@given(
    lanes=st.integers(1, 3),
    batch=st.integers(1, 14),
    steps=st.integers(1, 5),
    hidden=st.integers(1, 40),
    turned=st.booleans(),
)
def test_the_loop_and_its_gradients(
    dtype: torch.dtype, lanes: int, batch: int, steps: int, hidden: int, turned: bool
) -> None:
    """Whatever the sizes leave over for the last vector and the last block; any text length."""
    exact = _drawn(lanes, batch, steps, hidden)
    drawn = tuple(part.to(dtype) if part.is_floating_point() else part for part in exact)
    first = vmap(grad(_objective(turned), argnums=(0, 1, 4)))
    outputs = vmap(lambda x, w, there: lstm_loop(x, w, there, turned))
    with CoreLanes():
        found = (*outputs(*drawn[:3]), *first(*drawn))
    wanted = (*outputs(*exact[:3]), *first(*exact))
    near = TOLERANCE[dtype]
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=near, atol=near * (1 + batch))


@compiled
@pytest.mark.parametrize("turned", [False, True])
def test_second_derivatives(turned: bool) -> None:
    drawn = _drawn(2, 7, 4, 9)

    def second(*given: Tensor) -> Tensor:
        slopes = grad(_objective(turned), argnums=(0, 1, 3, 4))(*given)
        return torch.stack([slope.square().sum() for slope in slopes]).sum()

    every = vmap(grad(second, argnums=(0, 1, 3, 4)))
    wanted = every(*drawn)
    with CoreLanes():
        found = every(*drawn)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@compiled
def test_texts_of_lanes_with_one_model_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    given, weight, is_token, slope, start = _drawn(3, 5, 4, 6)
    seen: list[tuple[int, ...]] = []
    run = native.recurrence

    def watched(*given: Any) -> Any:
        seen.append(tuple(given[0].shape[:2]))
        return run(*given)

    monkeypatch.setattr(native, "recurrence", watched)
    shared = vmap(lambda x, there: lstm_loop(x, weight[0], there)[0])
    wanted = shared(given, is_token)
    slopes = vmap(grad(_objective(False), argnums=1), in_dims=(0, None, 0, 0, 0))
    right = slopes(given, weight[0], is_token, slope, start)
    with CoreLanes():
        torch.testing.assert_close(shared(given, is_token), wanted)
        torch.testing.assert_close(slopes(given, weight[0], is_token, slope, start), right)
    assert seen == [(1, 15), (1, 15)]


@compiled
def test_lanes_and_threads_do_not_change_a_bit() -> None:
    given, weight, is_token, slope, start = _drawn(3, 14, 5, 50, torch.float32)
    hidden, cell = start.unbind(1)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs, gates, cells = native.recurrence(given, weight, is_token, hidden, cell, False)
            last = slope[:, :, 0]
            back = native.recurrence_gradient(
                slope, last, weight, is_token, cell, gates, cells, False
            )
            found.append((outputs, cells, *back))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))
    for lane, text in ((0, 0), (2, 7), (1, 13)):
        one = slice(lane, lane + 1), slice(text, text + 1)
        texts = (given[one], weight[one[0]], is_token[one], hidden[one], cell[one])
        alone = native.recurrence(*texts, False)
        inputs = (slope[one], last[one], weight[one[0]], is_token[one], cell[one], *alone[1:])
        back = native.recurrence_gradient(*inputs, False)
        assert torch.equal(alone[0], found[0][0][one])
        assert all(torch.equal(a, b[one]) for a, b in zip(back, found[0][2:], strict=True))


@compiled
def test_extreme_numbers() -> None:
    """Gates that are shut or open for good, and what is no number."""
    given = torch.tensor([-200.0, -90.0, -1e-4, 0.0, 1e-4, 90.0, 200.0, torch.nan])
    given = given[:, None, None].expand(8, 2, 4).contiguous()
    weight, there = torch.zeros(4, 1), torch.ones(8, 2, dtype=torch.bool)
    with CoreLanes():
        found = lstm_loop(given, weight, there)[0]
    wanted = lstm_loop(given.double(), weight.double(), there)[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-30, equal_nan=True)


@compiled
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_is_not_served() -> None:
    """Forward derivatives, other types and sizes that do not fit go the plain way."""
    given, weight, is_token, _, start = (part[0] for part in _drawn(1, 3, 2, 4))
    assert recurrence.takes(given, weight, is_token, (start[0], start[1]))
    assert not recurrence.takes(given, weight, is_token, (start[0], start[1].float()))
    assert not recurrence.takes(given, weight, is_token, (start[0], start[1, :1]))
    large = torch.zeros(1, 1, 4 * 600), torch.zeros(4 * 600, 600), torch.ones(1, 1).bool()
    assert not recurrence.takes(*large)  # a library multiplies it faster
    assert not recurrence.takes(given.half(), weight.half(), is_token)
    assert not recurrence.takes(given, weight.float(), is_token)
    assert not recurrence.takes(given, weight, is_token.long())
    assert not recurrence.takes(given, weight[:-1], is_token)
    with CoreLanes():
        along = jvp(lambda x: lstm_loop(x, weight, is_token), (given,), (given,))[1]
    wanted = jvp(lambda x: lstm_loop(x, weight, is_token), (given,), (given,))[1]
    torch.testing.assert_close(along, wanted)
    with pytest.raises(ValueError, match="do not fit"):
        native.recurrence(
            given[None], weight[None, :-4], is_token[None], start[:1], start[1:], False
        )
    one = given[None, :, :, :4]
    with pytest.raises(ValueError, match="do not fit"):
        native.recurrence_gradient(
            one,
            one[:, :, 0],
            weight[None],
            is_token[None],
            start[:1],
            given[None],
            one[:, :1],
            False,
        )


@compiled
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("method", ["fedavg", "per-fedavg"])
def test_a_run_is_that_of_the_reference_engine(method: str, chunk: int, called: list[str]) -> None:
    """Traced for one lane and for several, with first and with second derivatives."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(1, 30, (60, 6), generator=rng)
    x[:, 4:] = 0
    y = (x[:, 0] > 15).long()
    fed = sartor.Federation.from_arrays(x, y, client=[i % 3 for i in range(60)], tokens=True)
    model = lstm(fed, embedding=5, hidden=6, classifier=4, bidirectional=True)
    common: Any = {"rounds": 3, "local": sartor.Local(batch=5, steps=4, lr=0.5), "dtype": "float64"}
    plain = sartor.fit(method, fed, model=model, engine="sequential", **common)
    assert "recurrence" not in called
    found = sartor.fit(method, fed, model=model, chunk=chunk, **common)
    assert {"recurrence", "recurrence_gradient"} <= set(called)
    for client in fed.names:
        for a, b in zip(
            found.model(client).parameters(), plain.model(client).parameters(), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@compiled
def test_an_lstm_of_the_user_is_one_operation(called: list[str]) -> None:
    network = nn.Sequential(Outputs(3, 4, batch_first=True), nn.Flatten(), nn.Linear(24, 2))
    x = torch.randn(24, 6, 3)
    fed = sartor.Federation.from_arrays(x, x[:, 0, 0] > 0, client=[i % 2 for i in range(24)])
    local = sartor.Local(batch=5, steps=2)
    sartor.fit("fedavg", fed, model=network, rounds=1, local=local, chunk=2)
    assert {"recurrence", "recurrence_gradient"} <= set(called)


class Outputs(nn.Module):
    """The outputs of an LSTM, without its last state."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(*sizes, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.lstm(x)[0]
        return outputs


def test_kernels_that_fail_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be compiled, or says other things, is not used; it is said once."""
    monkeypatch.setattr(recurrence, "_PROOFS", {})
    like = torch.zeros(1)

    def broken(*given: Any) -> Any:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(recurrence, "lane_recurrence", broken)
    with pytest.warns(UserWarning, match="step by step: no such instruction"):
        assert not recurrence._proven(like, 3)
    assert not recurrence._proven(like, 3)


@compiled
def test_a_proof_sees_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "_PROOFS", {})
    assert recurrence._proven(torch.zeros(1), 3)
    monkeypatch.setattr(recurrence, "_PROOFS", {})
    run = recurrence.lane_recurrence_grad
    monkeypatch.setattr(recurrence, "lane_recurrence_grad", lambda *a: [1.01 * x for x in run(*a)])
    assert not recurrence._proven(torch.zeros(1), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [4, 50, 128])
@pytest.mark.parametrize("turned", [False, True])
def test_kernels(hidden: int, turned: bool) -> None:
    exact = _drawn(3, 21, 6, hidden)
    drawn = [x.float().cuda() if x.is_floating_point() else x.cuda() for x in exact]
    first = vmap(grad(_objective(turned), argnums=(0, 1, 4)))
    outputs = vmap(lambda x, w, there: lstm_loop(x, w, there, turned))
    assert recurrence._proven(drawn[0], hidden)
    with LaneOperations():
        found = (*outputs(*drawn[:3]), *first(*drawn))
    for a, b in zip(found, (*outputs(*exact[:3]), *first(*exact)), strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=1e-4)
