"""Trackers: callbacks that hand the numbers of a training to a program that shows them.

A tracker is a callback with three verbs: ``open`` a run with its settings, ``log`` numbers of a
round, ``close`` it with its summary. Every run of a sweep is a run of the tracker. Each program is
an optional package, imported when its tracker is made; nothing is sent to a service unless that is
asked for.

>>> from sartor.trackers import track
>>> track("tensorbord:runs")
Traceback (most recent call last):
    ...
sartor.core.errors.ConfigError: there is no tracker 'tensorbord'; did you mean 'tensorboard'?
"""

from sartor.trackers.tracker import TRACKERS, Tracker, numbers_of, track

__all__ = ["TRACKERS", "Tracker", "numbers_of", "track"]
