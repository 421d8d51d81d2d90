"""Predictions that average over what a model could be: N(w, Σ) in place of w.

| symbol | here | meaning |
|---|---|---|
| Σ | model["posterior"] | covariance of the parameters given all samples |
| f, J | | scores of a sample, and their derivatives by the parameters |
| G | J Σ Jᵀ | covariance of its scores (exact for linear models) |
| σ² | model["noise"] | the noise of a regression |

A target has the variance G + σ². A probability is the mean over 1,024 points of N(f, G), which are
always the same (a Sobol sequence and its mirror image), and its deviation that over these points.
MacKay's κ(v) = (1 + πv/8)^-½ ("The Evidence Framework Applied to Classification Networks", 1992) is
as near for two classes (0.01), but its generalisations to more are off by up to 0.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.task import Predictor

POINTS = 512
"""Of N(f, G), and as many mirrored ones."""
BATCH = 256
"""Samples whose points are held at once."""


def scores_with_spread(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores (n, c), their covariances (n, c, c), and σ².

    Raises:
        ConfigError: the model comes without a covariance.
    """
    model = network.tree() if isinstance(network, Predictor) else {}
    if not isinstance(network, Predictor) or "posterior" not in model:
        raise ConfigError(
            "This model does not know how uncertain it is; train with "
            'sartor.fit("evidence", ..., options={"posterior": True}), or leave out uncertainty.'
        )
    model = tree.map(torch.detach, model)
    rest = {name: model.pop(name) for name in ("posterior", "noise")}

    def scores(row: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        found = network.predict({**tree.shaped(row, model), **rest}, sample[None]).reshape(-1)
        return found, found

    each = torch.func.vmap(torch.func.jacrev(scores, has_aux=True), in_dims=(None, 0))
    slopes, found = each(tree.flat(model), x)
    return found, slopes @ rest["posterior"] @ slopes.mT, rest["noise"]


def averaged(kind: str, scores: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return averaged probabilities (n, c) with their deviations.

    Args:
        kind: "classification" or "multilabel".
        scores: (n, c) f.
        spread: (n, c, c) G.
    """
    sobol = torch.quasirandom.SobolEngine(scores.shape[1], scramble=True, seed=0)
    half = torch.special.ndtri(sobol.draw(POINTS, dtype=torch.float64).clamp(1e-9, 1.0 - 1e-9))
    points = torch.cat([half, -half]).to(scores.dtype)
    size, turn = torch.linalg.eigh(spread)
    root = turn * size.clamp(min=0.0).sqrt()[:, None]
    found = []
    for f, r in zip(scores.split(BATCH), root.split(BATCH), strict=True):
        drawn = f[:, None] + points @ r.mT  # (n, points, c)
        p = torch.sigmoid(drawn) if kind == "multilabel" else torch.softmax(drawn, -1)
        found.append((p.mean(1), p.std(1, correction=0)))
    return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])
