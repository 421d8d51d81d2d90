"""Provide networks without buffers, and check that a network can be trained over lanes.

A network here is a plain ``nn.Module`` with an attribute ``head``: the dotted name of the
submodule that maps features to classes, which personalised methods may keep private.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from sartor.models.check import check_buffers, check_module, unlike_a_draw
from sartor.models.convolutional import CNN2, CNN3, CNN5, LeNet5, cnn2, cnn3, cnn5, lenet5
from sartor.models.describe import MAKERS, describe_model, rebuild_model
from sartor.models.examine import examine, step_seconds, unmappable
from sartor.models.plain import DNN, MCLR, dnn, mclr
from sartor.models.pretrained import features, pretrained, trains_head_alone
from sartor.models.recurrent import LSTM, LanguageLSTM, language_lstm, lstm
from sartor.models.residual import ResidualBlock, ResNet8, resnet8

if TYPE_CHECKING:
    from sartor.data.federation import Federation

__all__ = [
    "CNN2",
    "CNN3",
    "CNN5",
    "DNN",
    "LSTM",
    "MAKERS",
    "MCLR",
    "MODELS",
    "LanguageLSTM",
    "LeNet5",
    "ResNet8",
    "ResidualBlock",
    "check_buffers",
    "check_module",
    "cifarnet",
    "cnn2",
    "cnn3",
    "cnn5",
    "default",
    "describe_model",
    "dnn",
    "examine",
    "features",
    "language_lstm",
    "lenet5",
    "lstm",
    "mclr",
    "pretrained",
    "rebuild_model",
    "resnet8",
    "step_seconds",
    "trains_head_alone",
    "unlike_a_draw",
    "unmappable",
]

cifarnet = lenet5
"""The network that pFedBreD calls CifarNet; it is the same as LeNet-5 here."""

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cifarnet": cifarnet,
    **{maker.__name__: maker for maker in MAKERS.values()},
}


def default(federation: Federation) -> nn.Module:
    """Choose a network.

    An LSTM for token ids (for a next-token task, one that predicts at every step), LeNet-5 for
    images with sides of 16 pixels or more, else one hidden layer.
    """
    shape = federation.input_shape
    if federation.task == "next-token":
        return language_lstm(federation)
    if len(shape) == 1 and not federation.x.is_floating_point():
        return lstm(federation)
    if len(shape) == 3 and min(shape[1:]) >= 16:
        return lenet5(federation)
    return dnn(federation)
