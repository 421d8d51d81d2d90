"""How many lanes at once, and on what, by measuring: it depends on network and machine.

On a CPU small dense networks want many lanes in one call, which shares the cores inside its
operations; convolutions want one lane at a time, with the cores working on different lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache

_CHOSEN: dict[Hashable, int] = {}
_REPEATS = 2
_LONG = 0.5  # seconds of a round that are worth a second look
_WORTH_A_FORK = 10  # times its cost: shorter work is not even tried in processes
_SURELY_WORTH_IT = 200


def choose_chunk(
    trial: Callable[[int], float],
    lanes: int,
    workers: int,
    signature: Hashable,
    rehearsal: Callable[[int], float] | None = None,
) -> int:
    """Return the number of lanes a block that is fastest.

    Args:
        trial: takes a few steps in blocks of so many lanes, as many side by side as there are
            cores, and predicts from them what the whole work would take.
        lanes: how many lanes there are.
        workers: how many blocks can run side by side.
        signature: what the choice depends on; asked for again, it is answered from memory.
        rehearsal: the same as the steps will be later, when they are traced and each core has a
            process of its own; that takes a while to set up, so it is asked for long rounds only,
            and from what the trial found only as far as it gets better.
    """
    if signature not in _CHOSEN:
        widest = -(-lanes // workers)
        candidates = {lanes, widest, *(c for c in (1, 4, 16, 64, 256) if c < widest)}
        trial(1)  # the first steps of all pay for caches and threads
        cost = {c: min(trial(c) for _ in range(_REPEATS)) for c in sorted(candidates)}
        best = min(cost, key=cost.__getitem__)
        if rehearsal is not None and cost[best] > _LONG:
            best = _descended(rehearsal, lanes, workers, best)
        _CHOSEN[signature] = best
    return _CHOSEN[signature]


def _descended(rehearsal: Callable[[int], float], lanes: int, workers: int, start: int) -> int:
    """Go from one number of lanes to the next smaller or larger as long as that is faster.

    The numbers divide the lanes evenly among the cores, in blocks that halve from each to the next.
    """
    shares = [-(-lanes // (workers << halvings)) for halvings in range(lanes.bit_length())]
    steps = sorted({1, lanes, start, *shares})

    @cache
    def cost(chunk: int) -> float:
        return min(rehearsal(chunk) for _ in range(_REPEATS))

    best = start
    for way in (-1, 1):
        at = steps.index(best) + way
        while 0 <= at < len(steps) and cost(steps[at]) < cost(best):
            best = steps[at]
            at += way
    return best


@dataclass
class Pace:
    """How long a block of some kind of work took one core, in seconds, one way and the other.

    Attributes:
        threads: in threads, the last time.
        forks: in processes, the last time; None if that was not tried.
        waves: how often threads were tried.
        traces: how many traces there were at the last time.
    """

    threads: float = 0.0
    forks: float | None = None
    waves: int = 0
    traces: int = 0

    def forks_pay(self, blocks: int, cost: float, traces: int) -> bool:
        """Say whether to work on so many blocks in processes, which takes ``cost`` to make.

        Both ways are measured, threads again whenever there are new traces: what processes learn
        about steps is lost with them. Work that is very long is not: there a fork costs nothing
        against what Python's lock does.
        """
        seconds = self.threads * blocks
        if seconds < _WORTH_A_FORK * cost:
            return False
        if self.traces != traces:
            return seconds > _SURELY_WORTH_IT * cost
        return self.forks is None or self.forks < self.threads
