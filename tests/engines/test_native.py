"""Operations for one core: the numbers of PyTorch's, to any derivative, or PyTorch's themselves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from sartor.engines.cpu import compiler as cpp
from sartor.engines.cpu import native
from sartor.engines.cpu.thinned import thin
from sartor.engines.lanes.operations import CoreOperations

compiled = pytest.mark.skipif(cpp.library() is None, reason=cpp.status())


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the shapes of a convolution; batches that fill vectors, and others."""
    kernel = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    return {
        "batch": draw(st.sampled_from([8, 9, 15, 16, 20, 24, 33])),
        "channels": draw(st.sampled_from([(1, 1), (1, 6), (3, 9), (6, 16), (2, 3)])),
        "size": tuple(draw(st.integers(k, k + 5)) for k in kernel),
        "kernel": kernel,
        "padding": tuple(draw(st.integers(0, k - 1)) for k in kernel),
        "bias": draw(st.booleans()),
        "double": draw(st.booleans()),
    }


def _drawn(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    rng = torch.Generator().manual_seed(0)
    into, out = case["channels"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    x, weight = draw(case["batch"], into, *case["size"]), draw(out, into, *case["kernel"])
    return x, weight, draw(out) if case["bias"] else None


def _slopes(inputs: tuple[Tensor | None, ...], padding: Any, order: int) -> list[Tensor]:
    """Return the output and its gradients; of order 2 the gradients of a function of those."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
    wanted = [t for t in leaves if t is not None]
    x, weight, bias = leaves
    assert x is not None
    assert weight is not None
    out = F.conv2d(x, weight, bias, padding=padding)
    slopes = torch.autograd.grad((out.sin() * out).sum(), wanted, create_graph=order == 2)
    if order == 2:
        slopes = torch.autograd.grad(sum((s * s.cos()).sum() for s in slopes), wanted)
    return [out.detach(), *slopes]


@compiled
@given(case=cases())
def test_convolutions_and_gradients_are_those_of_torch(case: dict[str, Any]) -> None:
    """Every output and gradient to 1e-11 in double, to 1e-5 of the largest in single precision."""
    inputs = _drawn(case)
    dtype = torch.float64 if case["double"] else torch.float32
    wanted = _slopes(inputs, case["padding"], 1)
    with CoreOperations():
        found = _slopes(
            tuple(None if t is None else t.to(dtype) for t in inputs), case["padding"], 1
        )
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        scale = float(b.abs().max())
        tolerance = 1e-11 if case["double"] else 1e-5
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance * max(scale, 1.0))


@compiled
@pytest.mark.parametrize(
    ("batch", "size", "kernel", "channels"),
    [
        (33, (21, 38), (2, 5), (2, 6)),  # tiles of three rows, the last of two
        (64, (21, 38), (5, 3), (1, 9)),
        (200, (4, 47), (2, 4), (1, 5)),  # tiles of part of a row
    ],
)
def test_gradients_of_large_images_are_summed_by_tiles(
    batch: int, size: Any, kernel: Any, channels: Any
) -> None:
    case = {"batch": batch, "channels": channels, "size": size, "kernel": kernel, "bias": True}
    inputs = _drawn(case)
    wanted = _slopes(inputs, 0, 1)
    with CoreOperations():
        found = _slopes(inputs, 0, 1)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@compiled
def test_data_are_laid_out_once_for_a_step() -> None:
    """The gradient of the weights reads the images as the convolution did."""
    x = torch.randn(16, 1, 12, 12)
    weight = torch.randn(6, 1, 5, 5, requires_grad=True)
    copied: list[Tensor] = []
    whole = native._batch_last

    def watched(images: Tensor) -> Tensor:
        found = whole(images)
        copied.extend([images] * (found.data_ptr() != images.data_ptr()))
        return found

    with pytest.MonkeyPatch.context() as patch, CoreOperations():
        patch.setattr(native, "_batch_last", watched)
        (found,) = torch.autograd.grad(F.conv2d(x, weight).sin().sum(), weight)
    assert not copied
    (wanted,) = torch.autograd.grad(F.conv2d(x, weight).sin().sum(), weight)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@compiled
def test_the_compiled_operations_are_used_and_know_second_derivatives(called: list[str]) -> None:
    case = {"batch": 10, "channels": (2, 5), "size": (6, 7), "kernel": (3, 2), "bias": True}
    inputs, padding = _drawn(case), (1, 0)
    wanted = _slopes(inputs, padding, 2)
    assert not called
    with CoreOperations():
        found = _slopes(inputs, padding, 2)
    assert {"convolve", "kernel_gradient"} == set(called)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@compiled
@given(
    batch=st.sampled_from([8, 11, 16]),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    rest=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    levels=st.integers(1, 4),
    double=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pooling_is_that_of_torch_with_all_ties(
    batch: int, kernel: Any, rest: Any, levels: int, double: bool, seed: int
) -> None:
    """To the bit; few levels make windows full of equal numbers, and some are not numbers."""
    rng = torch.Generator().manual_seed(seed)
    size = [2 * k + min(r, k - 1) for k, r in zip(kernel, rest, strict=True)]
    x = torch.randint(0, levels, (batch, 3, *size), generator=rng).to(
        torch.float64 if double else torch.float32
    )
    x[0, 0, 0, 0] = torch.nan
    x[1, 0, -1, -1] = torch.nan
    x.requires_grad_()
    wanted = F.max_pool2d(x, kernel)
    grad = torch.randn(wanted.shape, generator=rng, dtype=x.dtype)
    with CoreOperations():
        found = F.max_pool2d(x, kernel)
    assert torch.equal(found.nan_to_num(-1.0), wanted.nan_to_num(-1.0))
    pair = [torch.autograd.grad(out, x, grad)[0] for out in (found, wanted)]
    assert torch.equal(*pair)


@compiled
@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.max_pool2d(x, (2, 2), stride=(2, 2)),
        lambda x: F.max_pool2d(input=x, kernel_size=[2, 2], padding=(0, 0)),
        lambda x: torch.max_pool2d(x, 2, 2),
        lambda x: torch.max_pool2d(input=x, kernel_size=2),
        nn.MaxPool2d(2),
    ],
)
def test_every_way_to_say_two_by_two_is_understood(
    call: Callable[[Tensor], Tensor], called: list[str]
) -> None:
    """By position, by name, as a layer."""
    x = torch.randn(8, 3, 16, 18)
    with CoreOperations():
        found = call(x)
    assert called == ["pool"]
    assert torch.equal(found, call(x))


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 2, "stride": 1},
        {"kernel_size": 2, "padding": 1},
        {"kernel_size": 2, "dilation": 2},
        {"kernel_size": 2, "ceil_mode": True},
        {"kernel_size": 2, "return_indices": True},
    ],
)
def test_other_windows_are_left_to_the_library(settings: dict[str, Any], called: list[str]) -> None:
    x = torch.randn(8, 3, 18, 18)
    with CoreOperations():
        found = F.max_pool2d(x, **settings)
    assert not called
    wanted = F.max_pool2d(x, **settings)
    for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (found, wanted)), strict=True):
        assert torch.equal(a, b)


@compiled
def test_the_layout_stays_between_operations(called: list[str]) -> None:
    """The images of a convolution, rectified and pooled, are never laid out anew."""
    x, weight = torch.randn(16, 1, 12, 12), torch.randn(6, 1, 5, 5)
    with CoreOperations():
        out = F.max_pool2d(F.relu(F.conv2d(x, weight)), 2)
    assert called == ["convolve", "pool"]
    assert out.permute(1, 2, 3, 0).is_contiguous()
    torch.testing.assert_close(out, F.max_pool2d(F.relu(F.conv2d(x, weight)), 2))


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((7, 1, 9, 9), {}),
        ((8, 1, 9, 9), {"stride": 2}),
        ((8, 1, 9, 9), {"dilation": 2}),
        ((8, 1, 9, 9), {"padding": "same"}),
        ((8, 1, 9, 9), {"padding": 3}),
        ((1, 9, 9), {}),
    ],
)
def test_what_has_no_compiled_form_is_left_to_torch(
    shape: tuple[int, ...], settings: dict[str, Any], called: list[str]
) -> None:
    x, weight = torch.randn(shape), torch.randn(4, 1, 3, 3)
    with CoreOperations():
        found = F.conv2d(x, weight, **settings)
    assert not called
    assert torch.equal(found, F.conv2d(x, weight, **settings))


def test_many_channels_and_other_numbers_are_left_to_torch(called: list[str]) -> None:
    for channels, dtype in ((13, torch.float32), (2, torch.bfloat16)):
        x = torch.randn(8, channels, 6, 6).to(dtype)
        weight = torch.randn(8, channels, 3, 3).to(dtype)
        with CoreOperations():
            F.conv2d(x, weight)
    assert not called


@compiled
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_derivatives_forwards(called: list[str]) -> None:
    """Forward-mode derivatives, first and mixed with backward ones, are those of torch."""
    rng = torch.Generator().manual_seed(2)
    shapes = ((9, 2, 6, 6), (3, 2, 3, 3), (3,))
    x, w, b = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    along = tuple(torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)

    def score(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.max_pool2d(F.conv2d(x, w, b), 2).sin().sum()

    def both() -> list[Tensor]:
        slopes = torch.func.grad(score, argnums=(0, 1, 2))
        value, change = torch.func.jvp(score, (x, w, b), along)
        _, bend = torch.func.jvp(slopes, (x, w, b), along)
        return [value, change, *bend]

    wanted = both()
    with CoreOperations():
        found = both()
    assert called
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@compiled
@pytest.mark.parametrize(
    ("weight", "bias", "settings"),
    [
        ((4, 2, 3, 3), None, {}),
        ((4, 1, 3, 3), torch.zeros(4, dtype=torch.float64), {}),
        ((4, 1, 3, 3), torch.zeros(3), {}),
        ((4, 1, 3, 3), None, {"padding": -1}),
    ],
)
def test_what_does_not_fit_together_is_an_error(
    weight: tuple[int, ...], bias: Tensor | None, settings: dict[str, Any], called: list[str]
) -> None:
    with CoreOperations(), pytest.raises((RuntimeError, ValueError)):
        F.conv2d(torch.randn(8, 1, 9, 9), torch.randn(weight), bias, **settings)
    assert not called
    x, g = torch.randn(1, 8, 1, 9, 9), torch.randn(1, 8, 4, 7, 7)
    with pytest.raises(ValueError, match="fit together"):
        native.convolved(x, torch.randn(1, 4, 2, 3, 3), None, (1, 1), (0, 0))
    with pytest.raises(ValueError, match="fit together"):
        native.kernel_gradient(x, g, (5, 5), (1, 1), (0, 0))


@compiled
def test_a_batch_that_fills_no_vector_is_refused_by_the_operator() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        native.convolved(
            torch.randn(1, 7, 1, 5, 5), torch.randn(1, 2, 1, 3, 3), None, (1, 1), (0, 0)
        )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"CXX": "/no/such/compiler"}, "/no/such/compiler failed"),
        ({"CXX": "false"}, "false failed"),
    ],
)
def test_without_a_compiler_the_reason_is_reported(
    setting: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**setting, "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    library, status = cpp._found.__wrapped__()
    assert library is None
    assert said in status


def test_nothing_is_compiled_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is not even looked for."""
    monkeypatch.setenv("SARTOR_ACCELERATE", "allocator")
    monkeypatch.setattr(cpp, "_found", _never)
    assert cpp.library() is None
    assert "sartor.accelerate" in cpp.status()


def _never() -> Any:
    raise AssertionError("this must not be called")


@compiled
def test_the_library_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, for this process and later ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp, "_FLAGS", ("-O0", *cpp._FLAGS[1:]))  # it compiles sooner
    kept = tmp_path / "sartor"
    status = cpp._found.__wrapped__()[1]
    (made,) = kept.iterdir()
    assert str(made) in status
    written = made.stat().st_mtime_ns
    assert cpp._found.__wrapped__()[0] is not None
    assert made.stat().st_mtime_ns == written


def test_without_the_library_torch_does_the_work(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    x, w = torch.randn(8, 1, 16, 16), torch.randn(2, 1, 5, 5)
    with CoreOperations():
        out = F.max_pool2d(F.conv2d(x, w), 2)
    assert not called
    assert torch.equal(out, F.max_pool2d(F.conv2d(x, w), 2))


def _step(w: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    """Take a step through convolution and pooling."""
    with torch.enable_grad():
        w, b = w.detach().requires_grad_(), b.detach().requires_grad_()
        with CoreOperations():
            loss = (F.relu(F.max_pool2d(F.conv2d(x, w, b), 2)) ** 2).sum()
        slopes = torch.autograd.grad(loss, (w, b))
        return [p.detach() - 0.1 * g for p, g in zip((w, b), slopes, strict=True)]


@compiled
def test_a_trace_calls_the_operators_directly(called: list[str]) -> None:
    rng = torch.Generator().manual_seed(1)
    x, w, b = (torch.randn(s, generator=rng) for s in ((9, 1, 8, 8), (4, 1, 3, 3), (4,)))
    wanted = _step(w, b, x)
    traced = thin(make_fx(_step)(w, b, x))
    called.clear()
    found = traced(w, b, x)
    assert called == ["convolve", "pool", "pool", "kernel_gradient"]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    targets = {str(node.target) for node in traced.graph.nodes}
    assert not any(target.startswith("sartor.") for target in targets), "the registry is spared"


@compiled
def test_a_compiler_without_openmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one thread then, and the next start does not try again what has failed."""
    said = tmp_path / "said"
    compiler = tmp_path / "c++"
    real = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >> {said}\n'
        'case "$*" in *-fopenmp*) echo no OpenMP here >&2; exit 1;; esac\n'
        f'exec {real} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpp, "_FLAGS", ("-O0", *cpp._FLAGS[1:]))  # it compiles sooner
    for _ in range(2):
        found, status = cpp._found.__wrapped__()
        assert found is not None
        assert status.startswith("compiled")
    made = [line for line in said.read_text().splitlines() if "-o" in line.split()]
    assert ["-fopenmp" in line for line in made] == [True, False]


@compiled
def test_layers_that_do_not_fit_together_are_an_error() -> None:
    x, w = torch.randn(2, 3, 20), torch.randn(2, 4, 20)
    with pytest.raises(ValueError, match="fit together"):
        native.dense(x, w[:, :, :19], None)
    with pytest.raises(ValueError, match="fit together"):
        native.dense(x, w, torch.randn(2, 5))
    with pytest.raises(ValueError, match="fit together"):
        native.entropy(x, torch.zeros(2, 2).long(), None, -100)
    with pytest.raises(ValueError, match="fit together"):
        native.updated([x], [w], torch.ones(2))
    with pytest.raises(ValueError, match="fit together"):
        native.outer(x, w)
    with pytest.raises(ValueError, match="fit together"):
        native.outer(x.mT, x, torch.randn(2, 20, 19), torch.ones(2))
    with pytest.raises(ValueError, match="fit together"):
        native.outer(x.mT, x, torch.randn(2, 20, 20), torch.ones(3))
    with pytest.raises(ValueError, match="fit together"):
        native.outer(x.mT, x.mT.contiguous().mT)
    with pytest.raises(ValueError, match="fit together"):
        native.outer(x.mT, x.double())
    with pytest.raises(ValueError, match="fit together"):
        native.outer(x.mT, x, torch.randn(2, 20, 20).double(), torch.ones(2))
    assert not native.takes_outer(x.mT, x.double())
