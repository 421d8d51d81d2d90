"""The adviser: should we federate, how much should each client personalise, what will it cost?

::

    advise.py        the question: the theory where it holds, else a trial
    refusals.py      what is refused, and why the theory does not hold
    features.py      the data as a convex model sees them
    estimates.py     heterogeneity, noise, and the expected error at every λ
    by_theory.py     the answer from these; crosscheck.py holds it against held-out samples
    by_trial.py      the answer from trial.py, which trains every λ as lanes
    plan.py          steps, rounds, bytes and gradients of a strategy
    advice.py        the answer itself; words.py has its tables and sentences
    verify.py        afterwards: the answer and both ends, trained and compared on test data
    verification.py  what came out, with its table and sentences
    folder.py        an advice and its verification on disk
"""

from sartor.adviser.advice import Advice
from sartor.adviser.advise import advise
from sartor.adviser.folder import AdviceFolder

__all__ = ["Advice", "AdviceFolder", "advise"]
