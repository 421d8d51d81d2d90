"""Blocks of lanes: a cut shows the lanes of the block, and what belongs to the run stays whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sartor.core.method import ClientContext, Phase
from sartor.engines.parts import (
    BY_RUN,
    Arena,
    Block,
    Split,
    cut_arena,
    cut_context,
    reorder,
    reorder_context,
)
from sartor.engines.trial import planned

RUNS, SLOTS = 3, 5
LANES = torch.arange(RUNS * SLOTS).reshape(RUNS, SLOTS)


def _client_context() -> ClientContext:
    """Make a client context whose every field shows from which lane or run it comes."""
    fields = {
        name: {"a": LANES[..., None].expand(RUNS, SLOTS, 2)} for name in ClientContext._fields
    }
    return ClientContext(
        **{
            **fields,
            "common": {"a": 100 * torch.arange(RUNS)},
            "round": torch.arange(RUNS),
            "rate_round": torch.arange(RUNS),
            "index": LANES,
        }
    )


def _leaf(ctx: ClientContext, name: str) -> torch.Tensor:
    value = getattr(ctx, name)
    return value["a"] if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("block", "rows", "columns"),
    [
        (Block(1, 2, 2, 3), [1, 2], [2, 3, 4]),
        (Block(1, 1, 1, 2), [1], [1, 2]),
        (Block(2, 1, 0, 5), [2], [0, 1, 2, 3, 4]),
        (Block(1, 2, 0, 3, np.array([4, 0, 2])), [1, 2], [4, 0, 2]),
    ],
)
def test_a_block_is_its_runs_and_slots(block: Block, rows: list[int], columns: list[int]) -> None:
    """Arrays and contexts are cut alike: neighbours, or those that are listed."""
    wanted = LANES[rows][:, columns]
    assert torch.equal(torch.from_numpy(LANES.numpy()[block.cut]), wanted)
    ctx = cut_context(_client_context(), block)
    for name in ClientContext._fields:
        leaf = _leaf(ctx, name)
        if name in BY_RUN:
            assert torch.equal(leaf, _leaf(_client_context(), name)[rows])
        else:
            assert torch.equal(leaf if leaf.dim() == 2 else leaf[..., 1], wanted)


def test_slots_are_put_in_order_run_by_run() -> None:
    """Each run has its own order; the message to all and the rounds have none."""
    order = torch.tensor([[4, 3, 2, 1, 0], [0, 1, 2, 3, 4], [1, 0, 3, 2, 4]])
    wanted = torch.stack([LANES[r, order[r]] for r in range(RUNS)])
    assert torch.equal(reorder({"a": LANES}, order)["a"], wanted)
    ctx = reorder_context(_client_context(), order)
    for name in ClientContext._fields:
        leaf = _leaf(ctx, name)
        if name in BY_RUN:
            assert torch.equal(leaf, _leaf(_client_context(), name))
        else:
            assert torch.equal(leaf if leaf.dim() == 2 else leaf[..., 1], wanted)


def test_the_arena_of_some_runs_has_their_lists() -> None:
    """Samples stay where they are; of all runs it is the arena itself."""
    start, size = LANES.numpy(), 10 * LANES.numpy()
    split = Split(torch.arange(3), start, size, 9)
    arena = Arena(torch.zeros(3, 1), torch.zeros(3), {"val": split}, RUNS, SLOTS, LANES.device)
    part = cut_arena(arena, 1, 2)
    assert (part.num_runs, part.num_clients, part.x is arena.x) == (2, SLOTS, True)
    assert part.splits["val"].start.tolist() == start[1:3].tolist()
    assert part.splits["val"].size.tolist() == size[1:3].tolist()
    one = cut_arena(arena, 1, 1)
    assert one.splits["val"].start.tolist() == start[1:2].tolist()
    assert one.splits["val"].size.tolist() == size[1:2].tolist()
    assert cut_arena(arena, 0, RUNS) is arena


def test_phases_that_are_sure_come_first_and_the_longest_of_them() -> None:
    """Nobody knows what a phase costs that clients may leave out or end."""

    def phase(name: str, **kind: object) -> Phase:
        return Phase(name, lambda work, batch, ctx: work, **kind)

    def true(work: object, ctx: object) -> torch.Tensor:
        return torch.tensor(True)

    phases = [
        phase("stops", epochs=9, stop=true),
        phase("left out", epochs=9, when=true),
        phase("both", epochs=9, when=true, stop=true),
        phase("counted", epochs=9, steps=50),
        phase("two passes", epochs=2),
    ]
    assert [planned(p) for p in phases] == [
        (False, 9),
        (False, 9),
        (False, 9),
        (True, 1),
        (True, 2),
    ]
    assert max(phases, key=planned).name == "two passes"
