"""Sartor: a model for every client of a federation, borrowing from the others as much as helps."""

from __future__ import annotations

from sartor import errors as errors
from sartor import methods, models
from sartor._version import __version__
from sartor.adviser import Advice, advise
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.engines.cpu.acceleration import accelerate
from sartor.results.comparison import Comparison
from sartor.results.result import Result
from sartor.results.serving import Prediction
from sartor.training.callbacks import STOP
from sartor.training.compare import compare
from sartor.training.fit import fit
from sartor.training.loading import load
from sartor.training.search import Search, search
from sartor.training.stopping import EarlyStopping

__all__ = [
    "STOP",
    "Advice",
    "Comparison",
    "EarlyStopping",
    "Federation",
    "Local",
    "Prediction",
    "Result",
    "Search",
    "__version__",
    "accelerate",
    "advise",
    "compare",
    "fit",
    "load",
    "methods",
    "models",
    "search",
]
