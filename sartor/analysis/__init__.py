"""What a training reached, looked at more closely: pure functions of vectors, losses and costs."""

from __future__ import annotations

from sartor.analysis.deviations import Deviations, class_means, deviate, loss_deviations
from sartor.analysis.directions import Coherence, chance_coherence, coherence, generalized_coherence
from sartor.analysis.smoothing import savitzky_golay
from sartor.results.costs import Reached, pareto_front, to_reach
from sartor.results.evenness import Fairness, entropy, fairness, gini

__all__ = [
    "Coherence",
    "Deviations",
    "Fairness",
    "Reached",
    "chance_coherence",
    "class_means",
    "coherence",
    "deviate",
    "entropy",
    "fairness",
    "generalized_coherence",
    "gini",
    "loss_deviations",
    "pareto_front",
    "savitzky_golay",
    "to_reach",
]
