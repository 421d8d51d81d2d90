"""Describe a network of this library by name and arguments, to rebuild it from JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from sartor.core.errors import ModelError
from sartor.models.convolutional import CNN2, CNN3, CNN5, LeNet5, cnn2, cnn3, cnn5, lenet5
from sartor.models.plain import DNN, MCLR, dnn, mclr
from sartor.models.recurrent import LSTM, LanguageLSTM, language_lstm, lstm
from sartor.models.residual import ResNet8, resnet8

MAKERS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    CNN2: cnn2,
    CNN3: cnn3,
    CNN5: cnn5,
    DNN: dnn,
    LanguageLSTM: language_lstm,
    LeNet5: lenet5,
    LSTM: lstm,
    MCLR: mclr,
    ResNet8: resnet8,
}
"""Class -> the function that makes it; the name of the function is the name of the network."""


def describe_model(
    module: nn.Module, input_shape: tuple[int, ...], num_classes: int
) -> dict[str, Any] | None:
    """Return name and arguments of a network of this library, or None for any other.

    ``num_classes`` is that of the federation: 0 for regression.

    >>> from sartor.models import dnn
    >>> describe_model(dnn(input_shape=(4,), num_classes=3, hidden=7), (4,), 3)["name"]
    'dnn'
    """
    maker = MAKERS.get(type(module))
    if maker is None:
        return None
    sizes = {"input_shape": list(input_shape), "num_classes": num_classes}
    described = {"name": maker.__name__, "arguments": sizes | _own(module)}
    try:
        again = rebuild_model(described)
    except ModelError:
        return None
    shapes = [{k: tuple(p.shape) for k, p in net.named_parameters()} for net in (module, again)]
    return described if shapes[0] == shapes[1] else None  # built by hand with other sizes


def rebuild_model(described: Mapping[str, Any]) -> nn.Module:
    """Make the network that :func:`describe_model` described, with new parameters."""
    makers = {maker.__name__: maker for maker in MAKERS.values()}
    if described.get("name") not in makers:
        raise ModelError(
            f"There is no network {described.get('name')!r} in this release; use the release that "
            "trained it, or give the network: sartor.load(path, model=YourNetwork())."
        )
    arguments = dict(described["arguments"])
    arguments["input_shape"] = tuple(arguments["input_shape"])
    return makers[described["name"]](**arguments)


def _own(module: nn.Module) -> dict[str, Any]:
    """Return the arguments that differ between networks of one class."""
    if isinstance(module, DNN):
        return {"hidden": module.fc1.out_features}
    if isinstance(module, LSTM | LanguageLSTM):
        first: Any = module.layers[0]
        found = {
            "vocabulary": module.embedding.weight.shape[0],
            "embedding": module.embedding.weight.shape[1],
            "hidden": first.forwards.weight_hh.shape[1],
            "layers": len(module.layers),
        }
        if isinstance(module, LSTM):
            found["classifier"] = module.fc1.out_features
            found["bidirectional"] = first.backwards is not None
        return found
    return {}
