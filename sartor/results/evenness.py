"""How evenly accuracy is spread over the clients.

==============  =====================================================================
symbol          meaning
==============  =====================================================================
a_i, M          accuracy of client i, and the number of clients that have one
ā               mean of the a_i, each client alike
s_i             a_i / Σ_j a_j, the share of client i
==============  =====================================================================

==============  =====================================================================
measure         formula; even is
==============  =====================================================================
std             √((1/M) Σ (a_i − ā)²), population formula; 0
Jain's index    (Σ a_i)² / (M Σ a_i²) in [1/M, 1]; 1
Gini            Σ_i Σ_j |a_i − a_j| / (2 M² ā) in [0, 1 − 1/M]; 0
entropy         −Σ s_i ln s_i / ln M in [0, 1]; 1
==============  =====================================================================

Worst and best clients and deciles leave out clients with fewer than ten test samples, whose
accuracies are noise; the other measures take all clients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sartor.results import metrics


class Fairness(NamedTuple):
    """The distribution of accuracy over clients; see the table above.

    ``worst_decile`` and ``best_decile`` are means of the lowest and the highest tenth, ``clients``
    is how many have an accuracy, and ``excluded`` how many of them were left out of worst and best
    for lack of test samples.
    """

    mean: float
    std: float
    worst: float
    worst_decile: float
    best_decile: float
    best: float
    jain: float
    gini: float
    entropy: float
    clients: int
    excluded: int


def fairness(
    accuracy: npt.ArrayLike, count: npt.ArrayLike | None = None, floor: int = metrics.FLOOR
) -> Fairness:
    """Return the measures of a list of accuracies; clients with NaN stay out.

    For worst, best and deciles a client needs ``floor`` test samples, of ``count``; None takes all.

    >>> found = fairness([0.95, 0.9, 0.85, 0.8, 0.5])
    >>> round(found.mean, 6), round(found.std, 6), found.worst, round(found.jain, 6)
    (0.8, 0.158114, 0.5, 0.962406)
    """
    values = np.asarray(accuracy, dtype=np.float64)
    known = metrics.finite(values)
    negated = -values
    worst = metrics.worst_client(values, count, floor)
    return Fairness(
        mean=float(metrics.macro(values)),
        std=math.sqrt(metrics.variance_over_clients(values)) if known.size else math.nan,
        worst=worst.value,
        worst_decile=metrics.worst_share(values, 10, count, floor),
        best_decile=0.0 - metrics.worst_share(negated, 10, count, floor),
        best=0.0 - metrics.worst_client(negated, count, floor).value,
        jain=metrics.jain_index(values),
        gini=gini(values),
        entropy=entropy(values),
        clients=int(known.size),
        excluded=worst.excluded - int((~np.isfinite(values)).sum()),
    )


def gini(values: npt.ArrayLike) -> float:
    """Return the Gini coefficient Σ_i Σ_j |a_i − a_j| / (2 M² ā); all zero counts as even.

    From the sorted values it is Σ_k (2k − M − 1) a_(k) / (M Σ a), k = 1 … M.

    >>> gini([0.0, 0.0, 0.0, 1.0])
    0.75
    """
    known = np.sort(metrics.finite(values))
    if not known.size:
        return math.nan
    total = float(known.sum())
    if total == 0:
        return 0.0
    ranks = 2 * np.arange(1, known.size + 1) - known.size - 1
    return float((ranks * known).sum() / (known.size * total))


def entropy(values: npt.ArrayLike) -> float:
    """Return the entropy of the shares a_i / Σ a, divided by ln M; 1 is even, 0 is one for all.

    >>> entropy([0.5, 0.5]), entropy([1.0, 0.0])
    (1.0, 0.0)
    """
    known = metrics.finite(values)
    if not known.size:
        return math.nan
    if known.size == 1 or known.sum() == 0:
        return 1.0
    share = known / known.sum()
    share = share[share > 0]
    return max(0.0, float(-(share * np.log(share)).sum() / math.log(known.size)))
