"""The plan of a phase: each pass covers the client's samples once, whoever else is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor import rng
from sartor.engines.arena import Arena, Split
from sartor.engines.plan import Plan, _used, build_plan, num_steps
from sartor.method import Phase

KINDS = st.fixed_dictionaries(
    {
        "batch": st.one_of(st.none(), st.integers(1, 9)),
        "epochs": st.integers(1, 3),
        "share": st.sampled_from([1.0, 0.8, 0.5, 0.01]),
        "drop_last": st.booleans(),
        "draws": st.integers(1, 2),
        "shuffle": st.booleans(),
        "random": st.booleans(),
    }
)
SIZES = st.lists(st.integers(0, 17), min_size=1, max_size=5)


def _arena(sizes: list[int]) -> Arena:
    """Lay the samples of the clients out in a shuffled order, and know where each is."""
    total = max(sum(sizes), 1)
    rows = torch.from_numpy(np.random.default_rng(0).permutation(total))
    start = (np.cumsum(sizes) - sizes)[None]
    split = Split(rows, start, np.asarray(sizes)[None], max(sizes))
    x = torch.arange(total, dtype=torch.float64)[:, None]
    return Arena(x, torch.zeros(total), {"train": split}, 1, len(sizes), torch.device("cpu"))


def _phase(**kind: Any) -> Phase:
    return Phase("train", step=lambda work, batch, site: work, **kind)


def _plan(
    sizes: list[int],
    kind: dict[str, Any],
    cohort: list[int] | None = None,
    steps: int | None = None,
) -> Plan:
    arena, phase = _arena(sizes), _phase(**kind)
    ids = np.asarray(cohort if cohort is not None else range(len(sizes)))[None]
    keys = rng.fold_host(rng.key(3).numpy()[None, None, :], ids, "train")
    wanted = num_steps(phase, arena.splits["train"].size[:, ids[0]])
    if steps is not None:
        wanted = np.where(wanted > 0, steps, 0)
    return build_plan(phase, arena, ids, keys, wanted)


def _rows(plan: Plan, lane: int, draw: int) -> list[list[int]]:
    """List the real rows of every step of a lane."""
    found = []
    for s in range(int(plan.steps[0, lane])):
        entry = plan.table[0, lane, s % plan.table.shape[2]]
        rows = entry[(2 * draw + 1) * plan.batch : (2 * draw + 2) * plan.batch].tolist()
        found.append([r for r in rows if r >= 0])
    return found


@given(SIZES, KINDS)
def test_every_pass_covers_each_sample_once(sizes: list[int], kind: dict[str, Any]) -> None:
    """A pass holds the used share of the samples, each once, in batches of the asked size."""
    plan = _plan(sizes, kind)
    for lane, size in enumerate(sizes):
        share = int(np.ceil(kind["share"] * size - 1e-9))
        batch = kind["batch"] or max(share, 1)
        full = share // batch * batch if kind["drop_last"] and share >= batch else share
        for draw in range(kind["draws"]):
            steps = _rows(plan, lane, draw)
            per_pass = -(-full // batch)
            assert len(steps) == kind["epochs"] * per_pass
            used = set()
            for e in range(kind["epochs"]):
                one = steps[e * per_pass : (e + 1) * per_pass]
                flat = [r for rows in one for r in rows]
                assert len(flat) == len(set(flat)) == full
                assert all(0 <= r < size for r in flat)
                assert all(len(rows) == batch for rows in one[:-1])
                used |= set(flat)
            assert len(used) <= share  # the share is drawn once a round, not once a pass
            if not kind["shuffle"] and kind["share"] == 1.0 and steps:
                assert [r for rows in steps[:per_pass] for r in rows] == list(range(full))


@given(SIZES, KINDS, st.integers(1, 7))
def test_samples_counted_are_samples_in_the_table(
    sizes: list[int], kind: dict[str, Any], steps: int
) -> None:
    """The count of a lane, in whole passes or cut off early, is what its batches hold."""
    for plan in (_plan(sizes, kind), _plan(sizes, kind, steps=steps)):
        for lane in range(len(sizes)):
            lists = [_rows(plan, lane, d) for d in range(kind["draws"])]
            assert plan.samples[0, lane] == sum(len(r) for rows in lists for r in rows)
            for early in range(int(plan.steps[0, lane]) + 1):
                held = sum(len(r) for rows in lists for r in rows[:early])
                assert plan.samples_in(np.full_like(plan.steps, early))[0, lane] == held


@given(SIZES, KINDS)
def test_batches_gather_the_clients_own_samples(sizes: list[int], kind: dict[str, Any]) -> None:
    """Row r of a client is its r-th sample; padding is masked; ends of passes are marked."""
    arena, plan = _arena(sizes), _plan(sizes, kind)
    split = arena.splits["train"]
    per_pass = plan.passes[0][0]
    for s in range(plan.num_steps):
        found = plan.batches(arena, plan.table[:, :, s % plan.table.shape[2]])
        for batch in (found,) if kind["draws"] == 1 else found:
            assert batch.x.shape == (1, len(sizes), plan.batch, 1)
            for lane in range(len(sizes)):
                if s >= plan.steps[0, lane]:
                    continue
                own = split.rows[split.start[0, lane] : split.start[0, lane] + sizes[lane]]
                mask = batch.mask[0, lane]
                rows = batch.rows[0, lane]
                assert torch.equal(batch.x[0, lane, mask, 0].long(), own[rows[mask]])
                assert bool((rows[~mask] == split.capacity).all())
                assert bool(batch.last[0, lane]) == ((s + 1) % per_pass[lane] == 0)


@given(SIZES, KINDS, st.randoms(use_true_random=False))
def test_a_lane_does_not_depend_on_the_others(
    sizes: list[int], kind: dict[str, Any], random: Any
) -> None:
    """Another order, a smaller cohort, or a client that is far larger: the same batches."""
    whole = _plan(sizes, kind)
    order = list(range(len(sizes)))
    random.shuffle(order)
    order = order[: random.randint(1, len(order))]
    part = _plan(sizes, kind, cohort=order)
    padded = _plan([*sizes, 41], kind)
    for lane, client in enumerate(order):
        for draw in range(kind["draws"]):
            wanted = _rows(whole, client, draw)
            assert _rows(part, lane, draw) == wanted
            assert _rows(padded, client, draw) == wanted
        steps = int(whole.steps[0, client])
        assert whole.keys.shape[-1] == (2 if kind["random"] else 0)
        assert torch.equal(part.keys[0, lane, :steps], whole.keys[0, client, :steps])


def test_passes_draws_and_keys_differ() -> None:
    """Epochs are shuffled anew, draws are independent, and every step has its own key."""
    plan = _plan([16], {"batch": 4, "epochs": 2, "draws": 2, "random": True})
    first, second = _rows(plan, 0, 0), _rows(plan, 0, 1)
    assert first != second
    assert first[:4] != first[4:]
    assert len({tuple(k) for k in plan.keys[0, 0].tolist()}) == 8


@given(SIZES, KINDS)
def test_lanes_with_one_key_draw_the_same_and_others_their_own(
    sizes: list[int], kind: dict[str, Any]
) -> None:
    """The runs of a sweep with one seed share what they draw; the rows are those of each alone."""
    arena, phase = _arena(sizes), _phase(**kind)
    ids = np.arange(len(sizes))[None]
    bases = [rng.fold_host(rng.key(seed).numpy()[None, None, :], ids, "train") for seed in (3, 4)]
    steps = num_steps(phase, arena.splits["train"].size)
    split = arena.splits["train"]
    wide = replace(split, start=np.repeat(split.start, 3, 0), size=np.repeat(split.size, 3, 0))
    three = replace(arena, splits={"train": wide}, num_runs=3)
    keys = np.concatenate([bases[0], bases[1], bases[0]])
    plan = build_plan(phase, three, np.repeat(ids, 3, 0), keys, np.repeat(steps, 3, 0))
    for run, base in enumerate((bases[0], bases[1], bases[0])):
        alone = build_plan(phase, arena, ids, base, steps)
        assert torch.equal(plan.table[run : run + 1], alone.table)
        assert torch.equal(plan.keys[run : run + 1], alone.keys)


def test_one_key_and_different_sizes_are_different_draws() -> None:
    """Runs with one seed may have other data: nothing is shared then."""
    phase, ids = _phase(batch=2, epochs=2), np.zeros((2, 1), dtype=np.int64)
    key = rng.fold_host(rng.key(3).numpy()[None, None, :], np.zeros((1, 1), dtype=np.int64))
    arena = _arena([4, 7])
    split = arena.splits["train"]
    split = replace(split, start=split.start.T.copy(), size=split.size.T.copy())
    both = replace(arena, splits={"train": split}, num_runs=2, num_clients=1)
    steps = num_steps(phase, split.size)
    plan = build_plan(phase, both, ids, np.repeat(key, 2, 0), steps)
    for run in range(2):
        part = replace(split, start=split.start[run : run + 1], size=split.size[run : run + 1])
        own = replace(both, splits={"train": part}, num_runs=1)
        alone = build_plan(phase, own, ids[:1], key, steps[run : run + 1])
        wanted = alone.table[0, 0]
        assert torch.equal(plan.table[run, 0, : len(wanted)], wanted)


def test_data_none_is_steps_without_samples() -> None:
    """No rows, no samples, but steps and keys."""
    arena = _arena([3, 0])
    phase = _phase(data="none", epochs=4, random=True)
    steps = num_steps(phase, arena.splits["train"].size)
    keys = rng.fold_host(rng.key(0).numpy()[None, None, :], np.array([[0, 1]]))
    plan = build_plan(phase, arena, np.array([[0, 1]]), keys, steps)
    assert plan.steps.tolist() == [[4, 4]]
    assert plan.samples.sum() == 0
    assert plan.batches(arena, plan.table[:, :, 0]) == ()
    assert plan.keys.shape == (1, 2, 4, 2)


@pytest.mark.parametrize(("steps", "wanted"), [(None, [[6, 2, 0]]), (5, [[5, 5, 0]])])
def test_steps_replace_epochs_and_the_empty_take_none(steps, wanted) -> None:
    """A client without samples never steps."""
    phase = _phase(epochs=2, steps=steps, batch=3)
    assert num_steps(phase, np.array([[7, 3, 0]])).tolist() == wanted


def test_widths_cover_all_active_lanes_and_mark_the_idle() -> None:
    """At step s the leading lanes that cover the active ones are computed; gaps are marked."""
    plan = _plan([9, 2, 5], {"batch": 2, "epochs": 1})
    assert plan.steps.tolist() == [[5, 1, 3]]
    assert plan.widths() == [(3, False), (3, True), (3, True), (1, False), (1, False)]


def test_a_part_of_a_client_ends_at_whole_samples() -> None:
    """Edges are rounded down, 0.7 of 7 is 4; what is whole but for rounding, 0.3·10, counts."""
    first, length, _ = _used(_phase(part=(0.0, 0.7)), np.array([7, 10, 1]))
    assert first.tolist() == [0, 0, 0]
    assert length.tolist() == [4, 7, 1]
    first, length, _ = _used(_phase(part=(0.3, 1.0)), np.array([10, 7]))
    assert first.tolist() == [3, 2]
    assert length.tolist() == [7, 5]
