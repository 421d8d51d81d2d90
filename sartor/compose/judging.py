"""What held-out samples say of several models: a score of each, and how sure their difference is.

| score | of a model | compared by |
|---|---|---|
| loss | the mean loss | paired differences of losses |
| error | the share of wrong answers | paired differences, 0 or 1 |
| brier | the mean squared difference of probabilities and outcomes | paired differences |
| auroc | 1 − AUROC; of more classes the mean, each against the rest | DeLong's variance |

The AUROC of a client is a mean over pairs of a positive and a negative sample, so its standard
error is not that of a mean over samples. With V(i) the share of the other class that sample i is on
the right side of, the variance of a difference is S₁/m + S₀/n, where S₁ and S₀ are the sample
variances of V_k − V_0 over the m positives and the n negatives (DeLong, DeLong and Clarke-Pearson,
1988).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core.errors import ConfigError
from sartor.core.task import Task
from sartor.core.tree import Tree

Score = Literal["error", "loss", "brier", "auroc"]
HUGE = 1e30
"""Stands for a loss that is not a number."""
TIE = 1e-9
"""How much a mean gain must exceed its bound, as a share: equal ones must not pass by rounding."""


def criterion_of(task: Task, score: Score) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what a sample's score is the value of."""
    if score in ("brier", "auroc") and task.kind not in ("classification", "multilabel"):
        raise ConfigError(
            f"harm_score={score!r} needs probabilities of classes, and this task has none; use "
            "harm_score='loss'."
        )
    if score == "brier":
        return brier
    if score == "auroc":  # of all samples at once
        return lambda scores, y: scores
    return task.is_wrong if score == "error" else task.criterion


def brier(scores: Tensor, y: Tensor) -> Tensor:
    """Return Σ_c (p_c − y_c)² of each sample; of two classes (p − y)², of labels their mean."""
    if y.dim() == 2:
        return (torch.sigmoid(scores) - y.to(scores.dtype)).square().mean(-1)
    p = torch.softmax(scores, -1)
    squares = (p - F.one_hot(y, scores.shape[-1]).to(p.dtype)).square().sum(-1)
    return squares / 2 if scores.shape[-1] == 2 else squares


def paired_sums(losses: Tensor, mask: Tensor) -> Tensor:
    """Return Σ ℓ_k, Σ d_k, Σ d_k² and n over the real samples of a batch: (4, methods).

    d_k = ℓ_0 − ℓ_k is what method k gains on a sample over the first. A loss (methods, batch) that
    is not a number counts as very large.
    """
    real = losses.double().nan_to_num(nan=HUGE, posinf=HUGE).clamp(max=HUGE)
    gain = real[:1] - real
    rows = torch.stack((real, gain, gain.square(), torch.ones_like(real)))
    return torch.where(mask, rows, torch.zeros_like(rows)).sum(-1)


def ranked_sums(scores: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return what :func:`paired_sums` would, if 1 − AUROC were a mean over the n samples.

    Scores are (methods, n, classes), of all held-out samples at once. The count is 0 where the
    samples have one class, and the difference has no end where a class has one sample.
    """
    scores = scores.double()
    if y.dim() == 2:  # labels
        truth = y > 0.5
    elif scores.shape[-1] == 2:
        scores, truth = scores[..., 1:] - scores[..., :1], (y == 1)[:, None]
    else:
        scores = scores.log_softmax(-1)
        truth = F.one_hot(y, scores.shape[-1]).bool()
    positive, negative = truth & mask[:, None], ~truth & mask[:, None]
    m, n = positive.sum(0).double(), negative.sum(0).double()
    known = (m > 0) & (n > 0)
    share = known / known.sum().clamp(min=1)  # of a class in the mean
    apart = scores[:, :, None] - scores[:, None]
    wins = (apart > 0).double() + 0.5 * (apart == 0).double()  # (methods, n, n, classes)
    above = (wins * negative).sum(2) / n.clamp(min=1)
    below = (wins * positive[:, None]).sum(1) / m.clamp(min=1)
    auroc = (above * positive).sum(1) / m.clamp(min=1)  # (methods, classes)
    # What each sample adds to the difference, scaled so that squares add up to the variance.
    lead = auroc - auroc[:1]
    one = ((above - above[:1]) - lead[:, None]) * positive / (m * (m - 1)).clamp(min=1e-12).sqrt()
    two = ((below - below[:1]) - lead[:, None]) * negative / (n * (n - 1)).clamp(min=1e-12).sqrt()
    variance = ((one + two) * share).sum(-1).square().sum(1)
    lonely = (known & ((m < 2) | (n < 2))).any()
    variance = torch.where(lonely, HUGE, variance)
    count = torch.where(known.any(), mask.sum().double(), 0.0)
    mean = (lead * share).sum(-1)
    value = 1.0 - (auroc * share).sum(-1)
    square = variance * count * (count - 1.0).clamp(min=0.0) + count * mean.square()
    return torch.stack((value * count, mean * count, square, count.expand(len(mean))))


def beyond_noise(sums: Tensor, margin: Tensor) -> tuple[Tensor, Tree]:
    """Choose the method with the lowest loss among those that beat the first beyond its noise.

    Method k passes if d̄_k > margin · s_k/√n by more than rounding. d̄_k and s_k are the mean and the
    sample standard deviation of the paired gains in ``sums``, see :func:`paired_sums`. If none
    passes, or of fewer than two samples, it is the first; a margin of 0 takes the lowest loss, ties
    to the first.
    Returned are its number, and mean losses and standard errors (methods,) with the count.
    """
    total, gain, square, count = sums.unbind(0)
    num = count.clamp(min=1.0)
    mean = gain / num
    spread = (square - num * mean.square()).clamp(min=0.0) / (num - 1.0).clamp(min=1.0)
    error = (spread / num).sqrt()
    passes = (mean > margin * error * (1.0 + TIE)) & (count >= 2.0)
    ranked = torch.where(passes, total / num, torch.full_like(total, torch.inf))
    choice = torch.where(passes.any(), ranked.argmin(), torch.zeros_like(ranked.argmin()))
    return choice, {"loss": total / num, "error": error, "count": count[0]}
