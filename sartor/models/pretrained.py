"""Start training from the weights of a network that was trained elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from sartor.core.errors import ModelError, did_you_mean
from sartor.core.task import Task, head_of
from sartor.models.check import check_module

if TYPE_CHECKING:
    from sartor.data.federation import Federation


def pretrained(
    module: nn.Module, *, head: str | None = None, train: Sequence[str] | None = None
) -> nn.Module:
    """Return a copy of a network, from whose weights every client starts.

    Frozen parameters and buffers are the same for all clients, so they are stored once and never
    sent, and ``Result.model`` has them unchanged. The copy is in evaluation mode, so that BatchNorm
    keeps its statistics and dropout does nothing.

    Args:
        module: a trained network.
        head: the dotted name of the layer that methods may keep private; ``module.head`` if None.
        train: dotted names of the parts (submodules or parameters) to train; the rest is frozen.
            With None, frozen parameters stay frozen and the others are trained.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [name for name, p in pretrained(net, train=["2"]).named_parameters() if p.requires_grad]
    ['2.weight', '2.bias']
    """
    found = copy.deepcopy(module).cpu().eval()
    if head is not None:
        found.sartor_head = head  # type: ignore[assignment]  # a string, not a layer
    found.sartor_pretrained = True  # type: ignore[assignment]
    if train is not None:
        names = {**dict(found.named_modules()), **dict(found.named_parameters())}
        if isinstance(train, str):
            raise ModelError(f"train must be a list of parts, such as [{train!r}].")
        unknown = [name for name in train if name not in names]
        if unknown:
            raise ModelError(
                f"The network has no part {unknown[0]!r} to train{did_you_mean(unknown[0], names)}"
            )
        for name, parameter in found.named_parameters():
            inside = any(part in ("", name) or name.startswith(f"{part}.") for part in train)
            parameter.requires_grad_(inside)
    return found


def features(module: nn.Module, federation: Federation, batch: int = 256) -> Federation:
    """Return a federation whose samples are replaced by the inputs of a network's head.

    If only the head is trained, these inputs never change, and training the head is training a
    linear model on them.

    Args:
        module: a network that ends with a linear head and names it (see :func:`pretrained`).
        federation: the clients; in a real federation each computes its own features.
        batch: the number of samples at a time.

    Raises:
        ModelError: the network cannot be trained, or does not end with its head.

    >>> from sartor.data.federation import Federation
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> fed = Federation.from_arrays(torch.randn(20, 4), [0, 1] * 10, client=["a", "b"] * 10)
    >>> features(pretrained(net, head="2"), fed).input_shape
    (3,)
    """
    head = head_of(module)
    check_module(module, head)
    task = Task(module, head)
    if task.norms:
        raise ModelError(
            f"BatchNorm at {task.norms[0]!r} is in training mode, so features would depend on the "
            "other samples of a batch; put the network in evaluation mode, as pretrained() does."
        )
    params = {k: task.module.get_parameter(k).detach() for k in task.leaf_names}
    kind = next(iter(params.values())).dtype
    x = federation.x.to(kind) if federation.x.is_floating_point() else federation.x
    with torch.no_grad():
        found = torch.cat([task.features(params, part) for part in x.split(batch)])
        few = task.classify(params, found[:2])
        if not torch.allclose(few, task.logits(params, x[:2]), rtol=1e-4, atol=1e-5):
            raise ModelError(
                f"The network does not return the output of its head {head!r} as it is, so its "
                "predictions do not follow from the features alone; give the network itself to fit."
            )
    made = {k: v for k, v in federation.info.items() if k != "preprocessing"}
    target = federation.info.get("preprocessing", {}).get("target")
    if target is not None:  # predictions are in the unit of the target
        made["preprocessing"] = {"kind": "given", "target": target}
    words = f"{found.shape[1]} features of a {type(module).__name__}"
    return replace(federation, x=found, info={**made, "features": words})


def trains_head_alone(module: nn.Module) -> bool:
    """Return whether a network trains the whole of a linear head and nothing else."""
    head = head_of(module)
    layer = dict(module.named_modules()).get(head or "")
    if head is None or not isinstance(layer, nn.Linear):
        return False
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    inside = {f"{head}.{name}" for name, _ in layer.named_parameters()}
    return trained == inside and any(not p.requires_grad for p in module.parameters())
