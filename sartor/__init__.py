"""Sartor: a model for every client of a federation, borrowing from the others as much as helps."""

from __future__ import annotations

from sartor import methods, models
from sartor._version import __version__
from sartor.adviser import Advice, advise
from sartor.comparison import Comparison
from sartor.data.federation import Federation
from sartor.fit import compare, fit
from sartor.local import Local
from sartor.result import Result
from sartor.serving import Prediction, load

__all__ = [
    "Advice",
    "Comparison",
    "Federation",
    "Local",
    "Prediction",
    "Result",
    "__version__",
    "advise",
    "compare",
    "fit",
    "load",
    "methods",
    "models",
]
