"""An LSTM that predicts the next token after every step of a text, mapped over clients.

    p(token_{t+1} | token_1 … token_t) = softmax(W h_t + b)

with the state h_t of the last layer of ``sartor.models.recurrent`` after step t. Padding has scores
too, but the loss ignores them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sartor.core.errors import ModelError
from sartor.models.recurrent import Embedding, Layer, in_text
from sartor.models.sizes import sizes_of

if TYPE_CHECKING:
    from sartor.data.federation import Federation


class LanguageLSTM(nn.Module):
    """Embedding, stacked LSTM layers that run forwards, and the head fc over tokens.

    The arguments are those of :func:`language_lstm`; ``outputs`` is its ``num_classes``.
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

    >>> import torch
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
