"""Every table and figure of the papers, as data; and what it takes to run them.

>>> from sartor import reproduce
>>> reproduce.names()[0]
'bred-figure10'
>>> outcome = reproduce.run("chen-figure1-left", quick=True)  # doctest: +SKIP
>>> print(outcome.table())  # doctest: +SKIP
"""

from sartor.reproduce.outcome import Outcome
from sartor.reproduce.plan import Plan, load, names
from sartor.reproduce.runner import chosen, finished, read, run, unclaim

__all__ = ["Outcome", "Plan", "chosen", "finished", "load", "names", "read", "run", "unclaim"]
