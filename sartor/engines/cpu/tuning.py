"""How many lanes at once, and on what, by measuring: it depends on network and machine.

On a CPU small dense networks want many lanes in one call, which shares the cores inside its
operations; convolutions want one lane at a time, with the cores working on different lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from sartor.engines.cpu.kept import recalled, remember

_CHOSEN: dict[Hashable, int] = {}
_REPEATS = 2
_LONG = 0.5  # seconds of a round that are worth a second look
_CLEARLY = 1.2  # times as fast: less is within what a rehearsal errs
_FAR = 5.0  # times as slow in a trial: not looked at again
_SURELY = 2.0  # times as fast or as slow: no need to look again


def choose_chunk(
    trial: Callable[[int], float],
    lanes: int,
    workers: int,
    signature: Hashable,
    rehearsal: Callable[[int], float] | None = None,
    was_quiet: Callable[[], bool] = lambda: True,
) -> int:
    """Return the number of lanes a block that is fastest.

    Args:
        trial: takes a few steps in blocks of so many lanes, as many side by side as there are
            cores, and predicts from them what the whole work would take.
        lanes: how many lanes there are.
        workers: how many blocks can run side by side.
        signature: what the choice depends on; asked for again, it is answered from memory.
        rehearsal: the same as the steps will be later, when they are traced; that takes a
            while to set up, so it is asked for long rounds only,
            and from what the trial found only as far as it gets better.
        was_quiet: says whether the rehearsals were undisturbed: only then is the choice, which is
            that of a long round, kept for later processes.
    """
    if signature not in _CHOSEN:
        chosen = recalled(signature, lanes)
        if chosen is None:
            chosen, seconds = _measured(trial, lanes, workers, rehearsal)
            if seconds > _LONG and was_quiet():
                remember(signature, chosen)
        _CHOSEN[signature] = chosen
    return _CHOSEN[signature]


def _measured(
    trial: Callable[[int], float],
    lanes: int,
    workers: int,
    rehearsal: Callable[[int], float] | None,
) -> tuple[int, float]:
    """Return the fastest number of lanes, and the seconds that were rehearsed; 0 if none were."""
    widest = -(-lanes // workers)
    candidates = sorted({lanes, widest, *(c for c in (1, 4, 16, 64, 256) if c < widest)})
    trial(1)  # the first steps of all pay for caches and threads
    # In turns: a moment in which others want the cores must not meet every look at one number.
    cost = {c: trial(c) for c in candidates}
    for _ in range(1, _REPEATS):
        least = min(cost.values())
        for c in candidates:
            if cost[c] < _FAR * least:
                cost[c] = min(cost[c], trial(c))
    best = min(candidates, key=cost.__getitem__)
    if rehearsal is None or cost[best] <= _LONG or lanes == 1:
        return best, 0.0
    if best > 1:
        return _rehearsed(rehearsal, lanes, workers, best, 1)
    wide = [c for c in candidates if c > 1]
    least = min(cost[c] for c in wide)
    # Of those that seem alike, the smallest is the quickest to rehearse.
    rival = next(c for c in wide if cost[c] <= _CLEARLY * least)
    return _rehearsed(rehearsal, lanes, workers, 1, rival)


def _rehearsed(
    rehearsal: Callable[[int], float], lanes: int, workers: int, start: int, rival: int
) -> tuple[int, float]:
    """Choose between one lane and more; if more, go on from there as long as it gets faster.

    A lane of its own is worked without ``vmap``, and may be far faster than two or three in a
    block: no way down leads there. The other numbers divide the lanes evenly among the cores, in
    blocks that halve from each to the next.

    Args:
        rehearsal: predicts the seconds with blocks of so many lanes.
        lanes: how many lanes there are.
        workers: how many blocks can run side by side.
        start: what is chosen unless something is clearly faster.
        rival: what it is compared with first; either of the two is one lane.

    Returns:
        the number of lanes, and the seconds predicted.
    """
    looks: dict[int, list[float]] = {}

    def is_faster(other: int, than: int) -> bool:
        """Look at both in turns, until it is sure or often enough."""
        for turn in range(_REPEATS):
            for step in (than, other):
                if len(looks.setdefault(step, [])) <= turn:
                    looks[step].append(rehearsal(step))
            mine, theirs = min(looks[other]), min(looks[than])
            if max(mine, theirs) > _SURELY * min(mine, theirs):
                break
        return theirs > _CLEARLY * mine

    best = rival if is_faster(rival, start) else start
    if best == 1:
        return best, min(looks[best])
    shares = (-(-lanes // (workers << halvings)) for halvings in range(lanes.bit_length()))
    steps = sorted({lanes, best, *shares} - {1})
    for way in (-1, 1):
        at = steps.index(best) + way
        while 0 <= at < len(steps) and is_faster(steps[at], best):
            best = steps[at]
            at += way
    return best, min(looks[best])
