"""Stacked LSTMs for texts and for their next tokens, in a form that can be mapped over clients.

The loop over steps is in ``sartor.core.loops``; a layer has the parameters of ``nn.LSTM``,
including both biases, which have the same gradient.

A text is a row of token ids, padded at its end with ``PADDING``. Steps after the last real token
leave the state unchanged, so the final state is that of the last real token, and the backward
direction starts there, as in ``nn.LSTM`` with packed sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core.errors import ModelError
from sartor.core.loops import lstm_loop
from sartor.core.task import PADDING
from sartor.models.sizes import sizes_of

if TYPE_CHECKING:
    from sartor.data.federation import Federation


def in_text(tokens: Tensor) -> Tensor:
    """Return which steps of token ids ``(batch, steps)`` belong to the text.

    A step belongs to it if there is a token at or after it, so padding inside a text counts.

    >>> in_text(torch.tensor([[5, 0, 6, 0]])).tolist()
    [[True, True, True, False]]
    """
    return (tokens != PADDING).to(torch.int64).flip(-1).cumsum(-1).flip(-1) > 0


class Direction(nn.Module):
    """One LSTM layer in one direction, with the parameters of ``nn.LSTM`` and its initial draw."""

    def __init__(self, inputs: int, hidden: int, *, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias_ih = nn.Parameter(torch.empty(4 * hidden))
        self.bias_hh = nn.Parameter(torch.empty(4 * hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters from U(−1/√hidden, 1/√hidden)."""
        bound = self.weight_hh.shape[1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        """Run over texts ``(batch, steps, inputs)``; ``is_token`` says which steps belong to them.

        Returns the outputs ``(batch, steps, hidden)``, arbitrary after the text, and the last one.
        """
        given = F.linear(x, self.weight_ih, self.bias_ih + self.bias_hh)
        outputs, _ = lstm_loop(given, self.weight_hh, is_token, self.backward)
        return outputs, outputs[:, 0 if self.backward else -1]


class Layer(nn.Module):
    """One LSTM layer: forwards, or forwards and backwards with concatenated outputs."""

    def __init__(self, inputs: int, hidden: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.forwards = Direction(inputs, hidden)
        self.backwards = Direction(inputs, hidden, backward=True) if bidirectional else None

    def forward(self, x: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of all steps and the last ones, with directions concatenated."""
        parts = [self.forwards(x, is_token)]
        if self.backwards is not None:
            parts.append(self.backwards(x, is_token))
        outputs, last = zip(*parts, strict=True)
        return torch.cat(outputs, dim=-1), torch.cat(last, dim=-1)


class Embedding(nn.Module):
    """A vector for every token: drawn from N(0, I), or given.

    Args:
        tokens: the number of tokens.
        size: the length of a vector.
        vectors: ``(tokens, size)`` to start with; a seed does not draw them again.
        trainable: whether the vectors learn. Fixed ones are the same for all and never sent.
    """

    def __init__(
        self, tokens: int, size: int, vectors: Tensor | None = None, *, trainable: bool = True
    ) -> None:
        super().__init__()
        self.drawn, self.is_fixed = vectors is None, not trainable
        start = torch.empty(tokens, size) if vectors is None else vectors.detach().clone().float()
        self.weight = nn.Parameter(start, requires_grad=trainable)
        self.reset_parameters()
        if self.drawn and not trainable:  # no seed draws them, so they must always be the same
            nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(0))

    def reset_parameters(self) -> None:
        """Draw the vectors, unless they were given."""
        if self.drawn:
            nn.init.normal_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors ``(..., size)`` of token ids."""
        return F.embedding(tokens, self.weight)


class LSTM(nn.Module):
    """Embedding, stacked LSTM layers, a hidden layer with leaky ReLU (slope 0.1), and the head fc.

    The arguments are those of :func:`lstm`; ``outputs`` is the number of classes.
    """

    head = "fc"

    def __init__(
        self,
        embedding: Embedding,
        outputs: int,
        *,
        hidden: int = 50,
        layers: int = 2,
        classifier: int = 100,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        wide = hidden * (2 if bidirectional else 1)
        sizes = [embedding.weight.shape[1], *[wide] * (layers - 1)]
        self.layers = nn.ModuleList(
            Layer(size, hidden, bidirectional=bidirectional) for size in sizes
        )
        self.fc1 = nn.Linear(wide, classifier)
        self.fc = nn.Linear(classifier, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, outputs)`` of token ids ``(batch, steps)``."""
        is_token = in_text(tokens)
        x: Tensor = self.embedding(tokens)
        last = x[:, 0]
        for layer in self.layers:
            x, last = layer(x, is_token)
        logits: Tensor = self.fc(F.leaky_relu(self.fc1(last), 0.1))
        return logits


class LanguageLSTM(nn.Module):
    """Embedding, stacked LSTM layers that run forwards, and the head fc over the next tokens.

        p(token_{t+1} | token_1 … token_t) = softmax(W h_t + b)

    with the state h_t of the last layer after step t. Padding has scores too, but the loss ignores
    them. The arguments are those of :func:`language_lstm`; ``outputs`` is its ``num_classes``.
    """

    head = "fc"

    def __init__(
        self, vocabulary: int, outputs: int, *, embedding: int, hidden: int, layers: int
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, embedding)
        sizes = [embedding, *[hidden] * (layers - 1)]
        self.layers = nn.ModuleList(Layer(size, hidden, bidirectional=False) for size in sizes)
        self.fc = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, steps, outputs)`` of token ids ``(batch, steps)``."""
        is_token = in_text(tokens)
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x, _ = layer(x, is_token)
        logits: Tensor = self.fc(x)
        return logits


def lstm(
    federation: Federation | None = None,
    *,
    vocabulary: int | None = None,
    embedding: int = 50,
    hidden: int = 50,
    layers: int = 2,
    classifier: int = 100,
    bidirectional: bool = False,
    vectors: Tensor | None = None,
    trainable_embedding: bool = True,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> LSTM:
    """Return a stacked LSTM for a federation of token ids, or for the given sizes.

    Args:
        federation: with int64 features ``(samples, length)``.
        vocabulary: the number of tokens, padding included. By default that of the federation's
            vocabulary, else its largest token id + 1.
        embedding: the length of a token's vector.
        hidden: the size of a layer's state in one direction.
        layers: the number of LSTM layers.
        classifier: the size of the hidden layer before the head.
        bidirectional: whether every layer also runs backwards.
        vectors: ``(vocabulary, embedding)`` to start with, such as GloVe.
        trainable_embedding: whether the vectors learn.
        input_shape: ``(length,)``.
        num_classes: the number of classes.

    >>> net = lstm(input_shape=(25,), num_classes=2, vocabulary=1000)
    >>> sum(p.numel() for p in net.parameters())
    96102
    """
    shape, outputs = sizes_of(federation, input_shape, num_classes)
    if len(shape) != 1 or (federation is not None and federation.x.is_floating_point()):
        kind = "real numbers" if federation is not None else "samples"
        raise ModelError(
            f"lstm needs texts, rows of token ids of one length, got {kind} of shape {shape}; make "
            "the federation with tokens=True, or use another model."
        )
    if vocabulary is None and vectors is not None:
        vocabulary = len(vectors)
    if vocabulary is None and federation is not None:
        known = federation.info.get("vocabulary", 0)
        vocabulary = max(int(known), int(federation.x.max()) + 1)
    sizes = {"hidden": hidden, "layers": layers, "classifier": classifier}
    faults = [
        f"{name} must be >= 1, got {value}"
        for name, value in {"vocabulary": vocabulary, "embedding": embedding, **sizes}.items()
        if value is None or value < 1
    ]
    if vectors is not None and not faults and tuple(vectors.shape) != (vocabulary, embedding):
        faults.append(
            f"vectors have shape {tuple(vectors.shape)}, but vocabulary and embedding ask for "
            f"{(vocabulary, embedding)}"
        )
    if faults:
        raise ModelError("; ".join(faults) + ".")
    assert vocabulary is not None
    table = Embedding(vocabulary, embedding, vectors, trainable=trainable_embedding)
    return LSTM(table, outputs, bidirectional=bidirectional, **sizes)


def language_lstm(
    federation: Federation | None = None,
    *,
    vocabulary: int | None = None,
    embedding: int = 50,
    hidden: int = 50,
    layers: int = 1,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> LanguageLSTM:
    """Return a next-token LSTM for a federation of token ids, or for the given sizes.

    Args:
        federation: of the task "next-token".
        vocabulary: the number of token ids in texts; ``num_classes`` by default.
        embedding: the length of a token's vector.
        hidden: the size of a layer's state.
        layers: the number of LSTM layers.
        input_shape: ``(steps,)``.
        num_classes: the number of token ids that can be predicted.

    >>> net = language_lstm(input_shape=(20,), num_classes=100)
    >>> net(torch.ones(3, 20, dtype=torch.int64)).shape
    torch.Size([3, 20, 100])
    """
    shape, outputs = sizes_of(federation, input_shape, num_classes)
    if federation is not None and federation.task != "next-token":
        raise ModelError(
            f"language_lstm predicts the next token, but the task is {federation.task!r}; make the "
            'federation with task="next-token", or use lstm.'
        )
    if len(shape) != 1 or min(embedding, hidden, layers) < 1:
        raise ModelError(
            f"language_lstm needs rows of token ids and sizes >= 1, got samples of shape {shape}, "
            f"embedding {embedding}, hidden {hidden}, layers {layers}."
        )
    return LanguageLSTM(
        vocabulary or outputs, outputs, embedding=embedding, hidden=hidden, layers=layers
    )
