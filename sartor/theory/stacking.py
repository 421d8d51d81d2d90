"""The weights of a stack: how much each of several predictors counts, from held-out samples.

Our own; stacking as of Wolpert (Neural Networks 1992) and Breiman (Machine Learning 1996), with
the weights of a client shrunk towards those of the federation.

| symbol | here | meaning |
|---|---|---|
| p_nk | values | the log probability that predictor k gives to the true answer of sample n |
| f_nk, y_n | values, truth | its prediction, and the truth, in a regression |
| ℓ_n(w) | losses | −log Σ_k w_k p_nk, or ½ (y_n − Σ_k w_k f_nk)² |
| w̄ | ``pooled`` | the weights of the federation: least Σ ℓ_n(w) over all held-out samples |
| w_i | fit | of client i: least Σ_n ℓ_n(w)/σ² − s Σ_k w̄_k log w_k over its own samples |
| s | strength | the samples that w̄ counts for; ∞ gives every client w̄ |

σ² is 1, and in a regression the mean squared error of the best predictor. ``cross_fit`` fits on
all folds but one and scores that one, so that every loss in its answer is of a sample that neither
the models nor the weights have seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

STRENGTHS = (math.inf, 100.0, 30.0, 10.0, 3.0)
"""Tried from the simplest on."""
FOLDS = 5
STEPS = 100


@dataclass(frozen=True)
class Answers:
    """What predictors say of the held-out samples of clients, padded to one length.

    Attributes:
        values: (clients, predictors, samples, answers) float64.
        mask: (clients, samples, answers), false for padding.
        truth: (clients, samples, answers) in a regression, else None.
        noise: σ².
    """

    values: Tensor
    mask: Tensor
    truth: Tensor | None = None
    noise: float = 1.0

    @property
    def real(self) -> Tensor:
        """Return (clients, samples): which samples there are."""
        return self.mask.any(-1)

    def where(self, kept: Tensor) -> Answers:
        """Keep some of the samples (clients, samples)."""
        return replace(self, mask=self.mask & kept[..., None])

    def losses(self, share: Tensor) -> Tensor:
        """Return (clients, samples) losses of mixtures.

        Args:
            share: (clients, predictors) log w.
        """
        share = share[..., None, None]
        if self.truth is not None:
            each = 0.5 * (self.truth - (share.exp() * self.values).sum(1)).square()
            return torch.where(self.mask, each, 0.0).sum(-1)
        each = -torch.logsumexp(share + self.values, 1)
        return torch.where(self.mask, each, 0.0).sum(-1) / self.mask.shape[-1]

    def single(self) -> Tensor:
        """Return (clients, predictors, samples) losses of each predictor by itself."""
        num = self.values.shape[1]
        alone = torch.where(torch.eye(num, dtype=torch.bool), 0.0, -torch.inf).double()
        return torch.stack([self.losses(row.expand(len(self.mask), num)) for row in alone], 1)

    def fit(self, prior: Tensor, strength: float) -> Tensor:
        """Return the log weights (clients, predictors) of every client.

        Args:
            prior: (predictors,) w̄.
            strength: s.
        """
        target = prior.expand(self.values.shape[:2])
        if math.isinf(strength):
            return target.log()
        theta = target.clamp(min=1e-3).log().clone().requires_grad_()
        search = torch.optim.LBFGS(
            [theta], max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe"
        )

        def objective() -> Tensor:
            search.zero_grad()
            share = theta.log_softmax(-1)
            value = self.losses(share).sum() / self.noise - strength * (target * share).sum()
            value.backward()
            return value

        with torch.enable_grad():
            search.step(objective)
        return theta.detach().log_softmax(-1)

    def pooled(self) -> Tensor:
        """Return the weights (predictors,) of the federation."""
        num = self.values.shape[1]
        truth = None if self.truth is None else self.truth.flatten(0, 1)[None]
        joined = replace(
            self,
            values=self.values.transpose(0, 1).flatten(1, 2)[None],
            mask=self.mask.flatten(0, 1)[None],
            truth=truth,
        )
        even = torch.full((num,), 1.0 / num, dtype=torch.float64)
        return joined.fit(even, 1.0)[0].exp()


def cross_fit(answers: Answers, rank: Tensor) -> dict[str, Tensor]:
    """Return (clients, samples) losses of every rule of choice, each on samples it has not seen.

    The rules are "one" (the best predictor, for all), "each" (every client's best), and
    "stack S" for every strength.

    Args:
        answers: what the predictors say.
        rank: (clients, samples) the place of a sample in the folds.
    """
    single = answers.single()
    found = {name: torch.zeros(rank.shape, dtype=torch.float64) for name in ("one", "each")}
    found |= {f"stack {s:g}": torch.zeros_like(found["one"]) for s in STRENGTHS}
    for fold in range(FOLDS):
        away = rank % FOLDS == fold
        part = answers.where(~away)
        sums = (single * part.real[:, None]).sum(-1)
        best = sums.sum(0).argmin()
        own = torch.where(part.real.any(-1), sums.argmin(-1), best)
        prior = part.pooled()
        losses = {
            "one": single[:, best],
            "each": single[torch.arange(len(own)), own],
            **{f"stack {s:g}": answers.losses(part.fit(prior, s)) for s in STRENGTHS},
        }
        for name, value in losses.items():
            found[name] = torch.where(away & answers.real, value, found[name])
    return found
