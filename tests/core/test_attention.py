"""Laws of networks with attention: any engine's numbers, and switches that are put back."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from sartor.core import attention
from sartor.core.attention import _SWITCHES, plain_attention
from sartor.core.task import Task


class Reader(nn.Module):
    """An encoder layer of torch over token ids."""

    head = "fc"

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        scores: Tensor = self.fc(self.encoder(self.embedding(tokens)).mean(1))
        return scores


class Own(nn.Module):
    """Attention as people write it themselves."""

    head = "fc"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.three = nn.Linear(8, 24)
        self.fc = nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        q, k, v = self.three(self.embedding(tokens)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)
        scores: Tensor = self.fc(mixed[:, 0].mean(1))
        return scores


@pytest.fixture
def federation() -> sartor.Federation:
    x = torch.randint(1, 20, (60, 5), generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 10).long()
    return sartor.Federation.from_arrays(x, y, client=[i % 3 for i in range(60)], tokens=True)


@pytest.mark.parametrize("method", ["fedavg", "per-fedavg"])
@pytest.mark.parametrize(
    "model", [Reader(), Reader(0.1).eval(), Own()], ids=["encoder", "frozen dropout", "own"]
)
def test_every_engine_trains_it_alike(
    model: nn.Module, method: str, federation: sartor.Federation
) -> None:
    """Without a word of warning; first and second derivatives."""
    common: Any = {
        "model": model,
        "rounds": 2,
        "local": sartor.Local(batch=5, steps=3, lr=0.3),
        "dtype": "float64",
    }
    plain = sartor.fit(method, federation, engine="sequential", **common)
    for chunk in (1, 3):
        found = sartor.fit(method, federation, chunk=chunk, **common)
        for client in federation.names:
            leaves = zip(
                found.model(client).parameters(), plain.model(client).parameters(), strict=True
            )
            for a, b in leaves:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_seed_draws_attention_anew() -> None:
    """All of a layer's parameters, as torch draws them: the bias of its last product is zero."""
    task = Task(Reader(), "fc")
    one, same, other = task.init(0), task.init(0), task.init(1)
    name = "encoder.layers.0.self_attn."
    for leaf in (f"{name}in_proj_weight", f"{name}out_proj.weight"):
        assert torch.equal(one[leaf], same[leaf])
        assert not torch.equal(one[leaf], other[leaf])
    assert not one[f"{name}out_proj.bias"].any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_begins_anew() -> None:
    """Though a thread of its parent was in a call, or held the lock, when it was made."""
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with plain_attention():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    inside.wait(10)
    with attention._LOCK:
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # a lock that nobody will give back
            sound = all(enabled() for enabled, _ in _SWITCHES)
            with plain_attention():
                sound = sound and not any(enabled() for enabled, _ in _SWITCHES)
            os._exit(0 if sound and all(enabled() for enabled, _ in _SWITCHES) else 1)
    assert os.waitpid(child, 0)[1] == 0
    leave.set()
    thread.join()


def test_the_switches_are_put_back() -> None:
    """Also after a fault, and only when the last of several threads is done."""
    before = [enabled() for enabled, _ in _SWITCHES]
    assert all(before)

    def fail() -> None:
        with plain_attention():
            raise RuntimeError("a network that fails")

    with pytest.raises(RuntimeError, match="a network that fails"):
        fail()
    assert [enabled() for enabled, _ in _SWITCHES] == before
    inside, leave = threading.Event(), threading.Event()

    def wait() -> None:
        with plain_attention():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=wait)
    thread.start()
    inside.wait(10)
    with plain_attention():
        pass
    assert not any(enabled() for enabled, _ in _SWITCHES)
    leave.set()
    thread.join()
    assert [enabled() for enabled, _ in _SWITCHES] == before
