"""Everything that this package uses of PyTorch without PyTorch promising to keep it.

No other module may use a private name of ``torch`` (a test looks). A name that a version of PyTorch
does not have is replaced by a class that cannot be made: the package can be imported, and only the
feature beside the name fails or is switched off.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

USED = {
    "torch.fx.experimental.proxy_tensor.make_fx": (
        "traced steps on a CPU: vmap and grad are recorded as plain operations, which "
        "torch.export refuses; without it steps run untraced"
    ),
    "torch._guards.TracingContext": "quick traces: one fake mode for all operations of a trace",
    "torch._guards.tracing": "quick traces: enters that context",
    "torch._subclasses.fake_tensor.FakeTensorMode": "quick traces: the mode itself",
    "torch.ops.aten._unsafe_view.default": "thinned traces: a view that can be skipped",
    "torch.ops.aten._reshape_alias.default": "thinned traces: a view that can be skipped",
    "torch.ops.aten._to_copy.default": "thinned traces: a copy to the same type can be skipped",
    "torch.ops.aten.add.Tensor._schema": (
        "thinned traces and CUDA graphs of functions: says which arguments an operation changes"
    ),
    "torch._C._functorch.get_interpreter_stack": (
        "updates of all leaves in one call: they have no derivative, so a gradient that is being "
        "taken must be noticed, also inside vmap"
    ),
    "torch._C._functorch.TransformType": (
        "updates of all leaves in one call: vmap is not a gradient"
    ),
    "torch.autograd.forward_ad._current_level": (
        "compiled layers and LSTM loops: they have no forward-mode rule, so it must be noticed"
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "CUDA graphs of functions: watches which arguments a function reads"
    ),
    "torch.nn.modules.batchnorm._NormBase": (
        "the check of a model, and fedbn: finds normalisation layers, a user's own included"
    ),
    "torch.nn.modules.batchnorm._BatchNorm": "the check of a model: finds layers that mix samples",
    "torch.nn.modules.conv._ConvNd": "the check of a model: finds initial values of convolutions",
    "torch.nn.modules.dropout._DropoutNd": "the check of a model: finds layers that draw",
    "torch._foreach_copy_": "CUDA graphs: copies all buffers in one launch",
}
"""For every private name: the feature that needs it, and why."""


def find(path: str) -> Any:
    """Return the object of a dotted path in PyTorch.

    Raises:
        AttributeError: there is none.
    """
    words = path.split(".")
    found: Any = torch
    for number, word in enumerate(words[1:], 2):
        if not hasattr(found, word):
            with suppress(ImportError):
                importlib.import_module(".".join(words[:number]))
        found = getattr(found, word)
    return found


def _or_missing(path: str) -> Any:
    try:
        return find(path)
    except AttributeError:

        class Missing:
            def __init__(self, *_: Any, **__: Any) -> None:
                raise RuntimeError(
                    f"PyTorch {torch.__version__} has no {path}. It is needed for {USED[path]}."
                )

        return Missing


make_fx = _or_missing("torch.fx.experimental.proxy_tensor.make_fx")
TorchDispatchMode = _or_missing("torch.utils._python_dispatch.TorchDispatchMode")
NormBase = _or_missing("torch.nn.modules.batchnorm._NormBase")
BatchNorm = _or_missing("torch.nn.modules.batchnorm._BatchNorm")
DropoutNd = _or_missing("torch.nn.modules.dropout._DropoutNd")
ConvNd = _or_missing("torch.nn.modules.conv._ConvNd")
foreach_copy_ = _or_missing("torch._foreach_copy_")
UNSAFE_VIEW = _or_missing("torch.ops.aten._unsafe_view.default")
RESHAPE_ALIAS = _or_missing("torch.ops.aten._reshape_alias.default")
TO_COPY = _or_missing("torch.ops.aten._to_copy.default")
_tracing = _or_missing("torch._guards.tracing")
_TracingContext = _or_missing("torch._guards.TracingContext")
_FakeTensorMode = _or_missing("torch._subclasses.fake_tensor.FakeTensorMode")
_transforms = _or_missing("torch._C._functorch.get_interpreter_stack")
_TransformType = _or_missing("torch._C._functorch.TransformType")


@contextmanager
def one_fake_mode() -> Iterator[None]:
    """Share one fake mode in a trace, which takes twice as long if each operation makes its own."""
    with _tracing(_TracingContext(_FakeTensorMode())):
        yield


def differentiating() -> bool:
    """Say whether a gradient is being taken through what is computed now."""
    return any(level.key() != _TransformType.Vmap for level in _transforms() or ())


def differentiating_forwards() -> bool:
    """Say whether a forward-mode derivative is being taken."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


def is_mutating(operation: Any) -> bool:
    """Say whether an operation changes one of its arguments."""
    return bool(operation._schema.is_mutable)


def changed_arguments(operation: Any) -> list[tuple[int, str]]:
    """Return the position and name of every argument that an operation changes."""
    return [
        (position, argument.name)
        for position, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
