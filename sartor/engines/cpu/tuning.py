"""Choose the number of lanes in a block by a short trial.

One block of all lanes shares the cores inside its operations; one block per core needs no such
sharing. Which is faster depends on the network, and on what else the machine is doing: beside
another busy process a block that waits for all cores can take nine times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

_CHOSEN: dict[Hashable, int] = {}
_MOST = 256  # lanes: larger blocks are compared with this number
_REPEATS = 2


def choose_chunk(
    trial: Callable[[int], float], lanes: int, workers: int, signature: Hashable
) -> int:
    """Return the number of lanes in a block that is fastest.

    Args:
        trial: takes a few steps in blocks of so many lanes and predicts the seconds of a round.
        lanes: the number of lanes.
        workers: the number of blocks that can run in parallel.
        signature: what the choice depends on; this process tries each signature once.
    """
    if signature not in _CHOSEN:
        share = -(-lanes // workers)
        candidates = sorted({lanes, share, min(share, _MOST)})
        cost = dict.fromkeys(candidates, float("inf"))
        # In turns, so that a busy moment does not meet both trials of one candidate.
        for candidate in candidates * _REPEATS if len(candidates) > 1 else ():
            cost[candidate] = min(cost[candidate], trial(candidate))
        _CHOSEN[signature] = min(candidates, key=cost.__getitem__)
    return _CHOSEN[signature]
