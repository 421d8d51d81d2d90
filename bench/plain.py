"""Federated averaging as a researcher would write it.

A deepcopy of the model per client, DataLoader, torch.optim.SGD, averages of state dicts. It needs
torch and numpy only.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.workloads import TOKENS, Share


class LeNet5(nn.Module):
    """LeNet-5 for 28x28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out


class Texts(nn.Module):
    """Embedding, two LSTM layers, a hidden layer; the answer follows the last true token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 50)
        self.lstm = nn.LSTM(50, 50, 2, batch_first=True)
        self.classifier = nn.Sequential(nn.Linear(50, 100), nn.LeakyReLU(0.1), nn.Linear(100, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        outputs, _ = self.lstm(self.embedding(tokens))
        last = (tokens != 0).sum(1).clamp(min=1) - 1
        at = last[:, None, None].expand(-1, 1, outputs.shape[2])
        out: Tensor = self.classifier(outputs.gather(1, at)[:, 0])
        return out


def make_model(name: str) -> nn.Module:
    """Return the network of a workload."""
    if name == "lenet5":
        return LeNet5()
    if name == "lstm":
        return Texts()
    if name == "dnn":
        layers = (nn.Linear(784, 100), nn.LeakyReLU(0.1), nn.Linear(100, 10))
        return nn.Sequential(nn.Flatten(), *layers)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def train_client(
    model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], epochs: int, lr: float, device: str
) -> None:
    """Train a client's copy of the model."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()


def average(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """Return the weighted average of state dicts."""
    total = sum(weights)
    mean = {name: value * (weights[0] / total) for name, value in states[0].items()}
    for state, weight in zip(states[1:], weights[1:], strict=True):
        for name, value in state.items():
            mean[name] += value * (weight / total)
    return mean


@torch.no_grad()
def evaluate(model: nn.Module, loaders: list[DataLoader[tuple[Tensor, ...]]], device: str) -> float:
    """Return the accuracy over the test samples of all clients."""
    model.eval()
    correct = count = 0
    for loader in loaders:
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            correct += int((model(x).argmax(1) == y).sum())
            count += len(y)
    return correct / count


def rounds(share: Share, number: int, device: str, seed: int) -> Iterator[tuple[float, float]]:
    """Train, and yield the seconds of each round with its evaluation, and the accuracy after it."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    w = share.workload
    x, y = torch.from_numpy(share.x), torch.from_numpy(share.y)
    trains = [TensorDataset(x[rows], y[rows]) for rows in share.train]
    tests = [TensorDataset(x[rows], y[rows]) for rows in share.test if len(rows)]
    train_loaders = [DataLoader(d, batch_size=w.batch, shuffle=True) for d in trains]
    test_loaders = [DataLoader(d, batch_size=256) for d in tests]
    model = make_model(w.model).to(device)
    for _ in range(number):
        began = time.perf_counter()
        chosen = range(w.clients)
        if w.cohort < w.clients:
            chosen = rng.choice(w.clients, w.cohort, replace=False)  # type: ignore[assignment]
        states, weights = [], []
        for i in chosen:
            local = copy.deepcopy(model)
            train_client(local, train_loaders[i], w.epochs, w.lr, device)
            states.append(local.state_dict())
            weights.append(float(len(trains[i])))
        model.load_state_dict(average(states, weights))
        accuracy = evaluate(model, test_loaders, device)
        if device == "cuda":
            torch.cuda.synchronize()
        yield time.perf_counter() - began, accuracy
