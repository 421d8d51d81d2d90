"""Check that a network can be trained over lanes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from sartor.core.errors import ModelError, did_you_mean
from sartor.core.layers import batch_norms, is_live_norm
from sartor.core.loops import loop_fault
from sartor.core.task import is_pretrained
from sartor.core.torch_private import BatchNorm, ConvNd, NormBase
from sartor.data.checks import raise_faults


def check_module(module: nn.Module, head: str | None = None) -> None:
    """Raise a ModelError that lists every layer that cannot be trained over lanes.

    ``head`` is the dotted name of the network's head, or None if nothing is private.
    """
    faults = _layer_faults(module) + _parameter_faults(module, head)
    if head is not None:
        layers = dict(module.named_modules())
        layers.pop("")
        if head not in layers:
            hint = did_you_mean(head, layers) if layers else "; it has no submodules"
            faults.append(f"Model has no submodule {head!r} to be the head{hint}")
        elif next(layers[head].parameters(), None) is None:
            faults.append(
                f"Head {head!r} ({type(layers[head]).__name__}) has no parameters; name the "
                "layer that maps features to classes."
            )
    raise_faults(faults, "the model", ModelError)


def _layer_faults(module: nn.Module) -> list[str]:
    faults = []
    for name, layer in module.named_modules():
        where = type(layer).__name__ + (f" at {name!r}" if name else "")
        if isinstance(layer, NormBase) and _counts(layer) and not is_live_norm(layer):
            faults.append(f"Model has {where}: {_norm_advice(layer)}")
        elif isinstance(layer, nn.RNNBase) and (fault := loop_fault(layer)) is not None:
            faults.append(f"Model has {where}: {fault}")
    return faults


def _norm_advice(layer: Any) -> str:
    """Say why a layer's statistics of batches are neither those of clients nor constant."""
    frozen = "or, to keep the statistics of a trained network as they are, call .eval() on it"
    if not isinstance(layer, BatchNorm):
        return (
            "running statistics of batches cannot be mapped over clients; set "
            f"track_running_stats=False, use nn.GroupNorm, {frozen}."
        )
    if layer.running_mean is None:
        return (
            "in use it would normalise by whatever is in the batch; set track_running_stats=True, "
            "so that each client has statistics of its own samples, or use nn.GroupNorm."
        )
    return (
        "its forward pass is its own, so it cannot tell samples from padding; use nn.BatchNorm1d, "
        f"2d or 3d itself, use nn.GroupNorm, {frozen}."
    )


def _counts(layer: Any) -> bool:
    """Return whether a layer uses statistics of batches, or updates running ones."""
    if layer.running_mean is None:  # per sample, or per batch even in evaluation mode
        return isinstance(layer, BatchNorm)
    return layer.training


def check_buffers(module: nn.Module, x: Tensor) -> None:
    """Raise a ModelError if the network writes to its buffers, which must be constant.

    A network that cannot take the samples ``x`` is not checked.
    """
    own = tuple(f"{name}." for name in batch_norms(module))  # theirs are no state: see core.layers
    buffers = [pair for pair in module.named_buffers() if not pair[0].startswith(own or ("\0",))]
    before = {name: buffer.detach().clone() for name, buffer in buffers}
    if not before:
        return
    tried = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    like = next((p for p in tried.parameters() if p.is_floating_point()), x)
    x = x.to(like.device, like.dtype) if x.is_floating_point() else x.to(like.device)
    try:
        with torch.no_grad():
            tried(x)
    except Exception:  # any error of the network will be raised again in training
        return
    after = dict(tried.named_buffers())
    written = [name for name in before if not _alike(before[name], after.get(name))]
    if written:
        raise ModelError(
            f"Model writes to its buffers ({', '.join(written)}): state outside the parameters "
            "cannot be mapped over clients; make it a parameter, or keep it constant, as .eval() "
            "does for most layers."
        )


def unlike_a_draw(module: nn.Module) -> str | None:
    """Return the name of a layer whose weights do not come from its ``reset_parameters``, or None.

    Linear layers and convolutions draw weights within ±1/√(inputs), norms start with 1 and 0. Other
    weights were trained, or drawn by another rule.

    >>> layer = nn.Linear(4, 2)
    >>> unlike_a_draw(layer)
    >>> _ = nn.init.ones_(layer.weight)
    >>> unlike_a_draw(nn.Sequential(layer))
    'Linear at 0'
    """
    for name, layer in module.named_modules():
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        if not isinstance(weight, Tensor) or not weight.numel():
            continue
        if getattr(type(layer), "reset_parameters", None) in _BOUNDED:
            bound = (weight[0].numel() ** -0.5) * (1 + 1e-5)
            odd = any(bool((p.abs() > bound).any()) for p in (weight, bias) if p is not None)
        elif isinstance(layer, _NORMS):
            odd = bool((weight != 1).any()) or (bias is not None and bool((bias != 0).any()))
        else:
            continue
        if odd:
            return f"{type(layer).__name__} at {name}" if name else type(layer).__name__
    return None


_BOUNDED = (nn.Linear.reset_parameters, ConvNd.reset_parameters)
_NORMS = (NormBase, nn.GroupNorm, nn.LayerNorm)


def _alike(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _parameter_faults(module: nn.Module, head: str | None) -> list[str]:
    seen: dict[int, str] = {}
    faults = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, nn.UninitializedParameter):
            faults.append(
                f"Parameter {name!r} has no shape yet (a lazy layer); run one batch through the "
                "model first."
            )
            continue
        first = seen.get(id(parameter), name)
        if head is not None and first.startswith(f"{head}.") != name.startswith(f"{head}."):
            faults.append(
                f"Parameters {first!r} and {name!r} are the same tensor, but only one of them is "
                f"in the head {head!r}: it cannot be both private and shared; untie them, or "
                "name no head."
            )
        seen.setdefault(id(parameter), name)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    by_design = {
        f"{name}.{key}"
        for name, layer in module.named_modules()
        if getattr(layer, "is_fixed", False) is True
        for key, _ in layer.named_parameters(recurse=False)
    }
    open_ = [name for name in frozen if name not in by_design]
    if open_ and len(frozen) < len(seen) and is_pretrained(module) is None:
        faults.append(
            f"Model has frozen parameters ({_few(open_)}) but does not say where the others "
            "start: set module.pretrained = True to start from the current weights, or False "
            "to draw the others anew for every seed."
        )
    if seen and len(frozen) == len(seen):
        faults.append(
            "Every parameter of the model is frozen; nothing can be trained. Unfreeze some, such "
            "as those of its head: module.fc.requires_grad_(True)."
        )
    if not seen and not faults:
        faults.append(f"Model {type(module).__name__} has no parameters; nothing can be trained.")
    return faults


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
