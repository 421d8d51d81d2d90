"""How many lanes at once, found by measuring: the best number depends on network and machine.

On a CPU small dense networks want many lanes in one call, which shares the cores inside its
operations; convolutions want one lane at a time, with the cores working on different lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

_CHOSEN: dict[Hashable, int] = {}
_REPEATS = 2


def choose_chunk(
    trial: Callable[[int], float], lanes: int, workers: int, signature: Hashable
) -> int:
    """Return the number of lanes a block that is fastest.

    Args:
        trial: takes a few steps in blocks of so many lanes, as many side by side as there are
            cores, and predicts from them what the whole work would take.
        lanes: how many lanes there are.
        workers: how many blocks can run side by side.
        signature: what the choice depends on; asked for again, it is answered from memory.
    """
    if signature not in _CHOSEN:
        widest = -(-lanes // workers)
        candidates = {lanes, widest, *(c for c in (1, 4, 16, 64, 256) if c < widest)}
        trial(1)  # the first steps of all pay for caches and threads
        cost = {c: min(trial(c) for _ in range(_REPEATS)) for c in sorted(candidates)}
        _CHOSEN[signature] = min(cost, key=cost.__getitem__)
    return _CHOSEN[signature]
