"""How many lanes at once, found by measuring.

On a CPU the best number depends on the network and the machine.

Small dense networks want many lanes in one call; convolutions want few, with the cores working on
different lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

_CHOSEN: dict[Hashable, int] = {}
_REPEATS = 2


def choose_chunk(
    trial: Callable[[int], float], lanes: int, workers: int, signature: Hashable
) -> int:
    """Return the number of lanes a block that is expected to be fastest.

    Args:
        trial: runs a few steps on a block of so many lanes and returns the seconds per lane and
            step.
        lanes: how many lanes there are.
        workers: how many blocks can run side by side, each on one core.
        signature: what the choice depends on; asked for again, it is answered from memory.
    """
    if signature in _CHOSEN:
        return _CHOSEN[signature]
    # One block of all lanes shares the cores inside its operations.
    cost = {lanes: min(trial(lanes) for _ in range(_REPEATS))}
    widest = -(-lanes // workers)
    candidates = (
        {min(2**k, widest) for k in range(12)} if workers > 1 else {2**k for k in range(12)}
    )
    with one_thread():
        for chunk in sorted(c for c in candidates if c < lanes):
            cost[chunk] = min(trial(chunk) for _ in range(_REPEATS)) / min(
                workers, -(-lanes // chunk)
            )
    _CHOSEN[signature] = min(cost, key=cost.__getitem__)
    return _CHOSEN[signature]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
