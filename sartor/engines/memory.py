"""When memory runs out: work on a block of lanes in halves, and make later blocks smaller.

A block writes to stores and tallies at its end, or in a way that can be repeated, so that half of a
block can start where the whole one failed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.engines.parts import Block, Costs, Engine

B = TypeVar("B")
T = TypeVar("T")
Split = tuple[list[B], int, int]
"""The halves of a block, the axis along which it was cut, and the lanes of the larger half."""


def sparing(
    engine: Engine,
    work: Callable[[B], T],
    halves: Callable[[B], Split[B] | None],
    joined: Callable[[list[T], int], T],
) -> Callable[[B], T]:
    """Return ``work``, made to do a block in halves if there is no memory for it at once.

    Args:
        engine: makes its blocks smaller from then on.
        work: what is done to a block.
        halves: cuts a block, or returns None if it is a single lane.
        joined: puts what came of the halves together, along an axis.
    """

    @wraps(work)
    def careful(block: B) -> T:
        try:
            return work(block)
        except torch.OutOfMemoryError as error:
            said = str(error).splitlines()[0]
        # The error held on to the memory of the attempt; it is gone here.
        split = halves(block)
        if split is None:
            raise ConfigError(
                f"The work of a single client does not fit into memory ({said}); use a smaller "
                "batch, a smaller network, or more memory."
            )
        parts, axis, lanes = split
        engine.spare(lanes)
        return joined([careful(part) for part in parts], axis)

    return careful


def halved_block(block: Block) -> Split[Block] | None:
    """Cut the slots of a block in two, or its runs if it has one slot."""
    if block.slots > 1:
        less = block.slots // 2
        rest = block.slots - less
        if block.only is not None:
            sides = [block.only[:rest], block.only[rest:]]
            parts = [Block(block.run, block.runs, block.slot, len(s), s) for s in sides]
        else:
            parts = [
                Block(block.run, block.runs, block.slot, rest),
                Block(block.run, block.runs, block.slot + rest, less),
            ]
        return parts, 1, block.runs * rest
    if block.runs > 1:
        rest = block.runs - block.runs // 2
        parts = [
            Block(block.run, rest, block.slot, 1, block.only),
            Block(block.run + rest, block.runs - rest, block.slot, 1, block.only),
        ]
        return parts, 0, rest
    return None


def joined_work(done: list[Any], axis: int) -> Any:
    """Put the uploads, costs and times of the halves of a block together."""
    uploads, costs, seconds = zip(*done, strict=True)
    times = seconds[0]
    if seconds[1] is not times:  # on a GPU all blocks share one clock
        times = {name: times[name] + seconds[1][name] for name in times}
    return tree.cat(list(uploads), axis), joined_costs(list(costs), axis), times


def joined_costs(costs: list[Costs], axis: int) -> Costs:
    """Add the costs of other slots, or put those of other runs behind one another."""
    put: Any = np.concatenate if axis == 0 else np.sum
    settings = {} if axis == 0 else {"axis": 0}
    return Costs(
        put([c.backward for c in costs], **settings), put([c.forward for c in costs], **settings)
    )


def halved_clients(block: tuple[int, np.ndarray]) -> Split[tuple[int, np.ndarray]] | None:
    """Cut the ids (runs, n) of an evaluation in two."""
    run, ids = block
    runs, slots = ids.shape
    if slots > 1:
        rest = slots - slots // 2
        return [(run, ids[:, :rest]), (run, ids[:, rest:])], 1, runs * rest
    if runs > 1:
        rest = runs - runs // 2
        return [(run, ids[:rest]), (run + rest, ids[rest:])], 0, rest
    return None


def joined_scores(done: list[Any], axis: int) -> Any:
    """Put the costs and the messages' bytes of the halves of an evaluation together."""
    costs, messages = zip(*done, strict=True)
    total = np.concatenate(messages) if axis == 0 else np.sum(messages, axis=0)
    return joined_costs(list(costs), axis), total
