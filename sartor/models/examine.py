"""Try a network on a few samples before anything is trained, and say what does not fit.

Three questions: does it take the samples of the federation, does it answer in the form that the
loss needs, and can it be mapped over clients?
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sartor.core import layers, rng, tree
from sartor.core.errors import ModelError
from sartor.core.loops import looped
from sartor.core.method import Batch
from sartor.core.task import Task, alone, grad, unmetered
from sartor.core.torch_private import ConvNd, NormBase
from sartor.core.tree import Tree

LANES = 2
"""Clients of the trial, and samples of each: enough for an operation to fail under ``vmap``."""


class _Trail:
    """The layers that a pass has entered, with what each was given."""

    def __init__(self, module: nn.Module) -> None:
        self.last: tuple[str, nn.Module, tuple[int, ...]] | None = None
        for name, layer in module.named_modules():
            if next(layer.children(), None) is None:
                layer.register_forward_pre_hook(self._note(name))

    def _note(self, name: str) -> Callable[[nn.Module, Any], None]:
        def note(layer: nn.Module, given: Any) -> None:
            shape = tuple(given[0].shape) if given and isinstance(given[0], Tensor) else ()
            self.last = name, layer, shape

        return note

    def place(self) -> str:
        """Name the layer that was entered last."""
        if self.last is None:
            return ""
        return _called(*self.last[:2])


def _called(name: str, layer: nn.Module) -> str:
    return type(layer).__name__ + (f" at {name!r}" if name else "")


def examine(module: nn.Module, x: Tensor, y: Tensor, kind: str, num_classes: int) -> bool:
    """Try a network on samples; return whether it draws in training, as dropout does.

    Args:
        module: the network; it is not changed.
        x: samples of the federation, one at least.
        y: their labels.
        kind: what there is to learn, or "given" for a network that gives its own loss.
        num_classes: those of the federation.

    Raises:
        ModelError: it does not take the samples, its answers do not fit the labels, or it draws
            random numbers in a way that could not be repeated.
    """
    x, y = (torch.cat([part, part])[:LANES] for part in (x, y))
    # Recurrent layers as they train: those of torch would draw their dropout by themselves.
    tried = looped(copy.deepcopy(module, {id(p): p for p in module.parameters()}))
    like = next((p for p in tried.parameters() if p.is_floating_point()), x)
    given = x.to(like.device, like.dtype) if x.is_floating_point() else x.to(like.device)
    trail = _Trail(tried)
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        try:
            with layers.noticing() as asked:
                found = tried(given)
                draws = asked()
        except Exception as error:  # a network may raise anything
            raise ModelError(_misfit(module, trail, tuple(x.shape[1:]), error)) from error
        if not torch.equal(before, torch.get_rng_state()):
            raise ModelError(
                f"{type(module).__name__} draws random numbers by itself, which could be neither "
                "repeated nor resumed; draw by nn.Dropout or F.dropout alone, which Sartor gives "
                "numbers by seed, round, client and step."
            )
    if (fault := _answer_fault(found, y, kind, num_classes)) is not None:
        where = f" Its last layer is {trail.place()}." if trail.last else ""
        raise ModelError(f"{type(module).__name__} does not fit the labels: {fault}{where}")
    return draws


def _misfit(module: nn.Module, trail: _Trail, shape: tuple[int, ...], error: Exception) -> str:
    """Say where a network fails on samples of a shape, and what it takes there."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    start = f"{type(module).__name__} cannot take the samples of this federation, of shape {shape}"
    if trail.last is None:
        return f"{start}: {said}. Make the network for that shape."
    name, layer, got = trail.last
    takes, axis = _wants(layer)
    if takes is None or len(got) < 2 or got[axis] == takes:
        return f"{start}: {_called(name, layer)}, given {got[1:]}, fails: {said}."
    kind = "channels" if axis == 1 and not isinstance(layer, nn.Linear) else "features"
    return (
        f"{start}: {_called(name, layer)} takes {takes} {kind}, but gets "
        f"{got[axis]} (each sample arrives there as {got[1:]}). Make the layer for {got[axis]} "
        f"{kind}, or give samples of the shape that the network was made for."
    )


def _wants(layer: Any) -> tuple[int | None, int]:
    """Return how many features or channels a layer takes, and on which axis."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, -1
    if isinstance(layer, nn.RNNBase):
        return layer.input_size, -1
    if isinstance(layer, ConvNd):
        return layer.in_channels, 1
    if isinstance(layer, NormBase):
        return layer.num_features, 1
    if isinstance(layer, nn.GroupNorm):
        return layer.num_channels, 1
    return None, 0


def _answer_fault(found: Any, y: Tensor, kind: str, num_classes: int) -> str | None:
    """Say why answers do not fit labels, or return None."""
    if not isinstance(found, Tensor):
        return (
            f"it returns a {type(found).__name__}, but should return one tensor of scores; return "
            "the scores alone."
        )
    shape, number = tuple(found.shape[1:]), y[0].numel()
    if found.dim() == 0 or found.shape[0] != len(y):
        return (
            f"for {len(y)} samples it returns {tuple(found.shape)}; the first axis should be the "
            "samples."
        )
    wrong = f"it returns {shape} for a sample"
    if kind == "classification" and (len(shape) != 1 or shape[0] < num_classes):
        if num_classes == 2 and found[0].numel() == 1:
            return f"{wrong}, but two classes need two scores: make its last layer for 2 outputs."
        return f"{wrong}, but {num_classes} classes need ({num_classes},)."
    if kind == "multilabel" and shape != tuple(y.shape[1:]):
        return f"{wrong}, but {number} labels need ({number},)."
    if kind == "regression" and found[0].numel() != number:
        return f"{wrong}, but {number} target{'s' * (number > 1)} a sample need ({number},)."
    steps = y.shape[1] if y.dim() > 1 else 0
    if kind == "next-token" and (len(shape) != 2 or shape[0] != steps or shape[1] < num_classes):
        return f"{wrong}, but {steps} steps of {num_classes} tokens need ({steps}, {num_classes})."
    if kind == "given" and found.numel() != len(y):
        return f"{wrong}, but a network that gives its own loss returns one number."
    return None


# ---- can it be mapped over clients?


def unmappable(task: Task, x: Tensor, y: Tensor) -> str | None:
    """Say why a network cannot be mapped over clients, if it trains without that; else None."""
    step, params, batch = _trial(task, x, y, torch.float32, LANES)
    wide = tree.map(lambda leaf: leaf.expand(LANES, *leaf.shape), params)
    lanes = Batch(*(leaf.expand(LANES, *leaf.shape) for leaf in batch))
    try:
        torch.func.vmap(step)(wide, lanes)
    except Exception as error:  # vmap raises many kinds
        said = _reason(error)
    else:
        return None
    try:
        with alone():
            step(params, batch)
    except Exception as error:  # no question of lanes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{type(task.module).__name__} cannot be trained on the samples of this federation: "
            f"{reason}"
        ) from error
    return said


def _reason(error: Exception) -> str:
    """Say in a few words what vmap cannot do."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "data-dependent" in said or ".item()" in said:
        return "it branches on values, or calls .item()"
    if "setup_context" in said:
        return "it has a torch.autograd.Function without setup_context"
    return said if len(said) <= 160 else f"{said[:157]}..."


def step_seconds(task: Task, x: Tensor, y: Tensor, batch: int) -> float:
    """Measure a step of one client, without ``vmap``, on a batch of so many samples."""
    step, params, samples = _trial(task, x, y, torch.float32, batch)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        with alone():
            step(params, samples)
        times.append(time.perf_counter() - began)
    return min(times)


def _trial(
    task: Task, x: Tensor, y: Tensor, dtype: torch.dtype, number: int
) -> tuple[Callable[[Tree, Batch], Tree], Tree, Batch]:
    """Return a gradient step on one batch, parameters for it, and the batch."""
    pick = torch.arange(number) % len(x)
    held = x[pick].cpu()
    held = held.to(dtype) if held.is_floating_point() else held
    labels = y[pick].cpu()
    labels = labels.to(dtype) if labels.is_floating_point() else labels
    yes = torch.ones(number, dtype=torch.bool)
    batch = Batch(held, labels, yes, pick, yes[0])
    params: Tree = tree.map(lambda leaf: leaf.to(dtype), task.init(0))

    def step(at: Tree, samples: Batch) -> Tree:
        with layers.working(rng.key(0), samples), unmetered():
            found: Tree = grad(lambda p: task.loss(p, samples))(at)
        return found

    return step, params, batch
