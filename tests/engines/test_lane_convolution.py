"""Lane convolutions give the numbers of ``F.conv2d``, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from sartor.engines.cuda import conv_launches, triton_conv
from sartor.engines.cuda.triton_conv import available, convolve
from sartor.engines.lanes import operations
from sartor.engines.lanes.operations import LaneOperations

Pair = tuple[int, int]
Conv = Callable[[Tensor, Tensor, Tensor | None, Pair, Pair], Tensor]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Put plain torch in the place of the kernels; returns what was launched, with its lanes."""
    calls: list[tuple[str, int]] = []

    def forward(x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any) -> Tensor:
        calls.append(("forward", len(x)))
        biases = [None] * len(x) if b is None else b
        each = zip(x, w, biases, strict=True)
        return torch.stack([F.conv2d(x, w, b, stride, padding) for x, w, b in each])

    def input_grad(g: Tensor, w: Tensor, size: Any, stride: Any, padding: Any) -> Tensor:
        calls.append(("input", len(g)))
        shape = (g.shape[1], w.shape[2], *size)
        each = zip(g, w, strict=True)
        found = [conv2d_input(shape, w, g, stride, padding) for g, w in each]
        return torch.stack(found)

    def weight_grad(
        x: Tensor, g: Tensor, kernel: Any, stride: Any, padding: Any
    ) -> tuple[Tensor, Tensor]:
        calls.append(("weight", len(x)))
        shape = (g.shape[2], x.shape[2], *kernel)
        each = zip(x, g, strict=True)
        found = [conv2d_weight(x, shape, g, stride, padding) for x, g in each]
        return torch.stack(found), g.sum((1, 3, 4))

    monkeypatch.setattr(triton_conv, "launch_forward", forward)
    monkeypatch.setattr(triton_conv, "launch_input_grad", input_grad)
    monkeypatch.setattr(triton_conv, "launch_weight_grad", weight_grad)
    return calls


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the shapes of one client's convolution."""
    small = st.integers(1, 3)
    kernel = draw(st.tuples(small, small))
    return {
        "batch": draw(small),
        "channels": (draw(small), draw(st.integers(1, 5))),
        "size": tuple(draw(st.integers(k, 7)) for k in kernel),
        "kernel": kernel,
        "stride": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "padding": draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        "bias": draw(st.booleans()),
    }


def _tensors(
    case: dict[str, Any], lead: Sequence[int] = (), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw input, kernel and bias, with leading axes."""
    rng = torch.Generator().manual_seed(0)
    into, out = case["channels"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=rng, dtype=torch.float64).to(dtype)

    x, weight = draw(case["batch"], into, *case["size"]), draw(out, into, *case["kernel"])
    return x, weight, draw(out) if case["bias"] else None


def _slopes(conv: Conv, case: dict[str, Any], inputs: Sequence[Tensor | None], maps: int) -> Any:
    """Return the output and the gradients of a function of it, mapped over leading axes."""

    def loss(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        x, weight, *bias = tensors
        out = conv(x, weight, bias[0] if bias else None, case["stride"], case["padding"])
        return (out.sin() * out).sum(), out

    function: Callable[..., Any] = grad(loss, has_aux=True)
    for _ in range(maps):
        function = vmap(function)
    slopes, out = function(tuple(t for t in inputs if t is not None))
    return [out, *slopes]


def _plain(x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    return F.conv2d(x, w, b, stride, padding)


def _assert_close(found: Sequence[Tensor], wanted: Sequence[Tensor], rtol: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        scale = float(b.abs().max().clamp_min(1.0))
        torch.testing.assert_close(a.to(b.dtype), b, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("maps", [0, 1, 2])
def test_wrapping(launched: list[tuple[str, int]], maps: int) -> None:
    @given(case=cases())
    def check(case: dict[str, Any]) -> None:
        launched.clear()
        inputs = _tensors(case, (2, 3)[:maps])
        found = _slopes(convolve, case, inputs, maps)
        lanes = (1, 2, 6)[maps]
        assert sorted(launched) == [("forward", lanes), ("input", lanes), ("weight", lanes)]
        _assert_close(found, _slopes(_plain, case, inputs, maps), 1e-11)

    check()


CASE = {
    "batch": 2,
    "channels": (2, 3),
    "size": (6, 5),
    "kernel": (3, 2),
    "stride": (2, 1),
    "padding": (1, 0),
    "bias": True,
}


def test_an_operand_shared_by_the_lanes(launched: list[tuple[str, int]]) -> None:
    x, _, _ = _tensors(CASE)
    _, weight, bias = _tensors(CASE, (2, 3))
    stride, padding = CASE["stride"], CASE["padding"]

    def over(conv: Conv) -> Tensor:
        def one(w: Tensor, b: Tensor) -> Tensor:
            return conv(x, w, b, stride, padding)

        return vmap(vmap(one))(weight, bias)

    _assert_close([over(convolve)], [over(_plain)], 1e-11)
    assert launched == [("forward", 6)]


def test_weights_shared_by_the_lanes(launched: list[tuple[str, int]]) -> None:
    """Then all samples of the inner lanes are one batch, whose gradients are right too."""
    x, weight, bias = _tensors(CASE, (2, 3))
    assert bias is not None
    weight, bias = weight[:, 0], bias[:, 0]
    stride, padding = CASE["stride"], CASE["padding"]

    def over(conv: Conv) -> list[Tensor]:
        def runs(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return vmap(lambda one: conv(one, w, b, stride, padding))(x)

        def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return runs(x, w, b).square().sum()

        return [vmap(runs)(x, weight, bias), *vmap(grad(loss, (0, 1, 2)))(x, weight, bias)]

    wanted = over(_plain)
    assert not launched
    _assert_close(over(convolve), wanted, 1e-11)
    assert launched[0] == ("forward", 2)


def test_many_images_of_one_lane() -> None:
    """A library's form of the kernel: numbers, and the layout of lanes."""
    x, w, b = _tensors(CASE, (1,))
    for bias in (b, None):
        found = conv_launches._library_forward(x, w, bias, CASE["stride"], CASE["padding"])
        one = None if bias is None else bias[0]
        _assert_close([found], [_plain(x[0], w[0], one, CASE["stride"], CASE["padding"])[None]], 0)
    assert torch.backends.cudnn.allow_tf32


def test_no_gradient_for_an_input_that_needs_none(launched: list[tuple[str, int]]) -> None:
    x, weight, bias = _tensors(CASE, (3,))

    def loss(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return convolve(x, w, b, CASE["stride"], CASE["padding"]).square().sum()

    vmap(grad(loss, argnums=(0, 1)))(weight, bias, x)
    assert launched == [("forward", 3), ("weight", 3)]


def test_gradients_of_gradients(launched: list[tuple[str, int]]) -> None:
    x, weight, bias = (t for t in _tensors(CASE) if t is not None)

    def out(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convolve(x, w, b, CASE["stride"], CASE["padding"])

    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(out, inputs)
    assert torch.autograd.gradgradcheck(out, inputs)


def test_operators_keep_their_promises(launched: list[tuple[str, int]]) -> None:
    """The fake forms have the shapes of the real ones, and no operator changes its arguments."""
    x, weight, bias = _tensors(CASE, (3,))
    stride, padding = CASE["stride"], CASE["padding"]
    g = triton_conv.lane_conv(x, weight, bias, stride, padding)
    size, kernel = tuple(x.shape[3:]), tuple(weight.shape[3:])
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (triton_conv.lane_conv, (x, weight, bias, stride, padding)),
        (triton_conv.lane_conv, (x, weight, None, stride, padding)),
        (triton_conv.lane_conv_input_grad, (g, weight, size, stride, padding)),
        (triton_conv.lane_conv_weight_grad, (x, g, kernel, stride, padding)),
    ]
    for operator, arguments in calls:
        tests = ("test_schema", "test_faketensor")
        found = torch.library.opcheck(operator, arguments, test_utils=tests)
        assert found == dict.fromkeys(tests, "SUCCESS")


def test_the_mode_catches_what_it_can(
    launched: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "available", lambda x, weight: True)
    x, weight, bias = _tensors({**CASE, "kernel": (3, 3)})
    caught: list[dict[str, Any]] = [{}, {"padding": 1}, {"stride": [2]}]
    for settings in (*caught, {"dilation": 2}, {"padding": "same"}):
        launched.clear()
        with LaneOperations():
            found = F.conv2d(x, weight, bias, **settings)
        assert bool(launched) == (settings in caught)
        _assert_close([found], [F.conv2d(x, weight, bias, **settings)], 1e-11)


def test_kernels_are_for_cuda() -> None:
    x, weight, _ = _tensors(CASE, dtype=torch.float32)
    assert not available(x, weight)


@given(
    channels=st.integers(1, 300),
    positions=st.integers(1, 10**6),
    lanes=st.integers(1, 100),
)
def test_block_sizes(channels: int, positions: int, lanes: int) -> None:
    """Blocks are powers of two; the shares of a sum cover it, and none is empty."""
    for number in conv_launches._tile(channels, positions, lanes):
        assert number & (number - 1) == 0
    share, splits = conv_launches._shares(positions, lanes, 64)
    assert share % 64 == 0
    assert splits <= conv_launches._MOST_SPLITS
    assert (splits - 1) * share < positions <= splits * share


def test_rows_are_for_large_kernels_on_few_channels() -> None:
    """Their tile is chosen where it needs fewer products than patches, and the stride allows it."""
    names = ("C", "H", "W", "O", "KH", "KW", "SH", "SW", "PH", "PW", "HO", "WO")
    first = dict(zip(names, (3, 32, 32, 6, 5, 5, 1, 1, 0, 0, 28, 28), strict=True))
    assert conv_launches._rows_tile(first, 128 * 8) == (16, 32)
    assert conv_launches._rows_tile({**first, "SW": 2}, 128 * 8) is None
    second = {**first, "C": 6, "O": 16, "H": 14, "W": 14, "HO": 10, "WO": 10}
    assert conv_launches._rows_tile(second, 192 * 16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("maps", [0, 1, 2])
@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
def test_kernels_by_rows(padding: Pair, maps: int) -> None:
    case = {"batch": 3, "channels": (3, 6), "size": (8, 11), "kernel": (5, 5), "bias": True}
    _check_kernels({**case, "stride": (1, 1), "padding": padding}, maps)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [(32, 64), (16, 20)])
@pytest.mark.parametrize(("stride", "padding"), [((1, 1), (0, 0)), ((2, 1), (1, 2))])
def test_kernels_by_taps(channels: Pair, stride: Pair, padding: Pair) -> None:
    """Whole blocks of channels, and as many positions as the largest tiles ask for."""
    case = {"batch": 70, "channels": channels, "size": (30, 30), "kernel": (3, 3), "bias": True}
    _check_kernels({**case, "stride": stride, "padding": padding}, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("maps", [0, 1, 2])
@given(case=cases())
def test_kernels(case: dict[str, Any], maps: int) -> None:
    _check_kernels(case, maps)


def _check_kernels(case: dict[str, Any], maps: int) -> None:
    inputs = [None if t is None else t.cuda() for t in _tensors(case, (2, 3)[:maps], torch.float32)]
    assert inputs[0] is not None
    assert inputs[1] is not None
    assert available(inputs[0][(0,) * maps], inputs[1][(0,) * maps])
    exact = [None if t is None else t.double() for t in inputs]
    found = _slopes(convolve, case, inputs, maps)
    _assert_close(found, _slopes(_plain, case, exact, maps), 1e-4)
    again = _slopes(convolve, case, inputs, maps)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
