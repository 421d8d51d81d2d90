"""Small federations whose minimisers are exact: double precision, solved by Newton's method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

RIDGE = 0.2


@dataclass(frozen=True)
class Instance:
    """Clients' averaged losses with their constants, and true models.

    Attributes:
        losses: (clients, d) models -> (clients,) L_i.
        weights: (clients,) p_i.
        sizes: (clients,) n_i.
        targets: (clients, d) w_i*.
        smoothness: L, the largest curvature of any L_i.
        strong_convexity: μ, the smallest.
        noise: ρ.
    """

    losses: Callable[[Tensor], Tensor]
    weights: Tensor
    sizes: Tensor
    targets: Tensor
    smoothness: float
    strong_convexity: float
    noise: float

    @property
    def target(self) -> Tensor:
        """w_g* = Σ p_i w_i*."""
        return self.weights @ self.targets

    @property
    def heterogeneity(self) -> float:
        """R, the largest distance."""
        return float((self.targets - self.target).norm(dim=1).max())

    def gradients(self, models: Tensor) -> Tensor:
        """∇L_i at a model of each client, or at one for all."""
        models = models.expand(self.targets.shape)
        return torch.func.grad(lambda w: self.losses(w).sum())(models)

    def solve(self, lam: float) -> tuple[Tensor, Tensor]:
        """Return w̃_g (d,) and w̃_i (clients, d) of objective (1)."""
        shape = (self.targets.shape[0] + 1, self.targets.shape[1])

        def objective(flat: Tensor) -> Tensor:
            all_models = flat.reshape(shape)
            own, shared = all_models[:-1], all_models[-1]
            pull = lam / 2 * (own - shared).square().sum(1)
            return self.weights @ (self.losses(own) + pull)

        found = newton(objective, torch.zeros(shape[0] * shape[1], dtype=torch.float64))
        return found.reshape(shape)[-1], found.reshape(shape)[:-1]

    def pooled(self) -> Tensor:
        """Return w_GT (d,), the minimiser of Σ p_i L_i."""

        def objective(shared: Tensor) -> Tensor:
            return self.weights @ self.losses(shared.expand(self.targets.shape))

        return newton(objective, torch.zeros_like(self.targets[0]))


def newton(fn: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Minimise a strongly convex function to a gradient of 1e-10."""
    at, slope = start, torch.func.grad(fn)
    bend = torch.func.jacrev(slope)
    for _ in range(30):
        now = slope(at)
        if float(now.norm()) <= 1e-13:
            break
        at = at - torch.linalg.solve(bend(at), now)
    assert float(slope(at).norm()) <= 1e-10
    return at


def quadratic(seed: int, clients: int = 4, dim: int = 3, spread: float = 1.0) -> Instance:
    """½(w − z)ᵀA_i(w − z) with random A_i and normal records z about w_i*; unequal clients."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=draw)

    turn, _ = torch.linalg.qr(normal(clients, dim, dim))
    curves = 0.2 + 2.0 * torch.rand(clients, dim, dtype=torch.float64, generator=draw)
    bend = turn @ torch.diag_embed(curves) @ turn.mT
    sizes = torch.randint(5, 40, (clients,), generator=draw)
    weights = torch.rand(clients, dtype=torch.float64, generator=draw) + 0.2
    targets = spread * normal(clients, dim)
    means = targets + normal(clients, dim) / sizes[:, None].sqrt()

    def losses(models: Tensor) -> Tensor:
        step = models - means
        return 0.5 * torch.einsum("id,ide,ie->i", step, bend, step)

    return Instance(
        losses,
        weights / weights.sum(),
        sizes,
        targets,
        float(curves.max()),
        float(curves.min()),
        float(curves.square().sum(1).max().sqrt()),  # E‖A_i(w_i* − z)‖² = tr A_i²
    )


def logistic(seed: int, clients: int = 4, dim: int = 3, spread: float = 1.0) -> Instance:
    """Logistic regression with ridge; a client's records are drawn from 200 that are its world.

    So the true model and the noise are exact: the minimiser over those 200, and the mean square.
    """
    world = torch.Generator().manual_seed(1000 + clients)  # the same clients for every seed
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, 200, dim, dtype=torch.float64, generator=world)
    true = spread * torch.randn(clients, dim, 1, dtype=torch.float64, generator=world)
    coin = torch.rand(clients, 200, dtype=torch.float64, generator=world)
    y = (coin < torch.sigmoid((x @ true)[..., 0])).double()

    def record_losses(models: Tensor, x: Tensor, y: Tensor) -> Tensor:
        score = (x @ models[..., None])[..., 0]
        ridge = RIDGE / 2 * models.square().sum(-1, keepdim=True)
        return F.softplus(score) - y * score + ridge

    def world_losses(flat: Tensor) -> Tensor:
        return record_losses(flat.reshape(clients, dim), x, y).mean(1).sum()

    targets = newton(world_losses, torch.zeros(clients * dim, dtype=torch.float64))
    targets = targets.reshape(clients, dim)
    slack = torch.sigmoid((x @ targets[..., None])[..., 0]) - y
    slopes = slack[..., None] * x + RIDGE * targets[:, None]
    sizes = torch.tensor([12 + 6 * i for i in range(clients)])
    keep = [torch.randint(200, (int(n),), generator=draw) for n in sizes]
    parts = [(x[i, k], y[i, k]) for i, k in enumerate(keep)]

    def losses(models: Tensor) -> Tensor:
        found = [record_losses(w, *part).mean() for w, part in zip(models, parts, strict=True)]
        return torch.stack(found)

    bends = [torch.linalg.eigvalsh(a.T @ a / len(a))[-1] / 4 for a, _ in parts]
    return Instance(
        losses,
        sizes.double() / sizes.sum(),
        sizes,
        targets,
        RIDGE + float(torch.stack(bends).max()),
        RIDGE,
        float(slopes.square().sum(2).mean(1).max().sqrt()),
    )
