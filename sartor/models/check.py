"""The check that a network can be trained over lanes."""

from __future__ import annotations

from torch import nn

from sartor.errors import ModelError, did_you_mean
from sartor.loops import loop_fault


def check_module(module: nn.Module, head: str | None = None) -> None:
    """Raise a ModelError that names every layer that cannot be trained over lanes.

    Args:
        module: the network.
        head: the dotted name of its head, or None if no part is private.
    """
    faults = _layer_faults(module) + _buffer_faults(module) + _parameter_faults(module)
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
    if len(faults) == 1:
        raise ModelError(faults[0])
    if faults:
        listed = "\n".join(f"  {i}. {fault}" for i, fault in enumerate(faults, 1))
        raise ModelError(f"{len(faults)} faults in the model:\n{listed}")


def _layer_faults(module: nn.Module) -> list[str]:
    faults = []
    for name, layer in module.named_modules():
        where = f"{type(layer).__name__} at {name!r}" if name else f"{type(layer).__name__}"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            faults.append(
                f"Model has BatchNorm ({where}): running statistics cannot be mapped over "
                "clients; use nn.GroupNorm instead."
            )
        elif isinstance(layer, nn.RNNBase):
            fault = loop_fault(layer)
            if fault is not None:
                faults.append(f"Model has {where}: {fault}")
        elif layer.training and (
            (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0)
            or (isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0)
            or isinstance(layer, nn.RReLU)
        ):
            faults.append(
                f"Model has {where}: random layers are not supported in training; set p=0, "
                "remove it, or put the layer in evaluation mode with .eval()."
            )
    return faults


def _buffer_faults(module: nn.Module) -> list[str]:
    faults = []
    for name, layer in module.named_modules():
        held = [key for key, value in layer._buffers.items() if value is not None]
        if held and not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            where = f"{type(layer).__name__} at {name!r}" if name else type(layer).__name__
            faults.append(
                f"Model has buffers ({', '.join(held)}) in {where}: state outside the parameters "
                "cannot be mapped over clients; make constants inside forward, or use a layer "
                "without buffers (InstanceNorm with track_running_stats=False, GroupNorm)."
            )
    return faults


def _parameter_faults(module: nn.Module) -> list[str]:
    seen: dict[int, str] = {}
    faults = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if isinstance(parameter, nn.UninitializedParameter):
            faults.append(
                f"Parameter {name!r} has no shape yet (a lazy layer); run one batch through the "
                "model first."
            )
            continue
        if id(parameter) in seen:
            faults.append(
                f"Parameters {seen[id(parameter)]!r} and {name!r} are one tensor: tied weights "
                "cannot be split by name; use the same submodule twice in forward, or untie them."
            )
        seen.setdefault(id(parameter), name)
    if not seen and not faults:
        faults.append(f"Model {type(module).__name__} has no parameters; nothing can be trained.")
    return faults
