"""The plan of a phase: each pass covers the client's samples once, whoever else is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core import rng
from sartor.core.method import Batch, Phase
from sartor.engines.parts import Arena, Split
from sartor.engines.plan import BatchPlan, _different, _permutations, _used, build_plan, num_steps

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
    return Phase("train", step=lambda work, batch, ctx: work, **kind)


def _plan(
    sizes: list[int],
    kind: dict[str, Any],
    cohort: list[int] | None = None,
    steps: int | None = None,
) -> BatchPlan:
    arena, phase = _arena(sizes), _phase(**kind)
    ids = np.asarray(cohort if cohort is not None else range(len(sizes)))[None]
    keys = rng.fold_host(rng.key(3).numpy()[None, None, :], ids, "train")
    wanted = num_steps(phase, arena.splits["train"].size[:, ids[0]])
    if steps is not None:
        wanted = np.where(wanted > 0, steps, 0)
    return build_plan(phase, arena, ids, keys, wanted)


def _rows(plan: BatchPlan, lane: int, draw: int) -> list[list[int]]:
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
        for draw, batch in enumerate((found,) if kind["draws"] == 1 else found):
            assert batch.x.shape == (1, len(sizes), plan.batch, 1)
            for lane in range(len(sizes)):
                if s >= plan.steps[0, lane]:
                    assert not bool(batch.mask[0, lane].any())  # who is done sees no sample
                    continue
                own = split.rows[split.start[0, lane] : split.start[0, lane] + sizes[lane]]
                mask = batch.mask[0, lane]
                rows = batch.rows[0, lane]
                assert rows[mask].tolist() == _rows(plan, lane, draw)[s]
                assert torch.equal(batch.x[0, lane, mask, 0].long(), own[rows[mask]])
                assert bool((rows[~mask] == split.capacity).all())
                assert bool(torch.isin(batch.x[0, lane, :, 0].long(), own).all())
                assert bool(batch.last[0, lane]) == ((s + 1) % per_pass[lane] == 0)


def test_the_last_short_batch_ends_a_pass() -> None:
    """Ten samples in batches of three, beside four: 3, 3, 3, 1 and 3, 1, twice."""
    arena, plan = _arena([10, 4]), _plan([10, 4], {"batch": 3, "epochs": 2})
    batches = [plan.batches(arena, plan.table[:, :, s]) for s in range(8)]
    held = [[int(b.mask[0, lane].sum()) for b in batches] for lane in (0, 1)]
    assert held == [[3, 3, 3, 1, 3, 3, 3, 1], [3, 1, 3, 1, 0, 0, 0, 0]]
    ends = [[s for s, b in enumerate(batches) if b.last[0, lane]] for lane in (0, 1)]
    assert ends[0] == [3, 7]
    assert ends[1][:2] == [1, 3]
    assert plan.samples.tolist() == [[20, 8]]


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
    assert (plan.batch, plan.draws, plan.capacity) == (0, 0, 0)
    assert plan.table.shape == (1, 2, 1, 1)
    assert plan.samples_in(plan.steps).tolist() == [[0, 0]]
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
    assert 0.29 * 100 < 29
    assert _used(_phase(part=(0.0, 0.29)), np.array([100]))[1].tolist() == [29]
    # Only what rounding makes is forgiven: 4.95 is not 5.
    first, length, _ = _used(_phase(part=(0.0, 0.495)), np.array([10]))
    assert (first.tolist(), length.tolist()) == ([0], [4])


def test_a_part_that_is_not_empty_by_its_edges_has_the_first_sample() -> None:
    """A tenth of one, of five and of none: 1, 1 and 0; the rest has what is left."""
    sizes = np.array([1, 5, 0, 20])
    first, length, _ = _used(_phase(part=(0.0, 0.1)), sizes)
    assert (first.tolist(), length.tolist()) == ([0, 0, 0, 0], [1, 1, 0, 2])
    first, length, _ = _used(_phase(part=(0.1, 1.0)), sizes)
    assert (first.tolist(), length.tolist()) == ([1, 1, 0, 2], [0, 4, 0, 18])


def test_a_share_is_rounded_up_to_whole_samples() -> None:
    """7 % of 100 is 7, though 0.07·100 > 7 in floating point; 50.5 % of 10 is 6."""
    assert 0.07 * 100 > 7
    assert _used(_phase(share=0.07), np.array([100, 1, 0]))[2].tolist() == [7, 1, 0]
    assert _used(_phase(share=0.505), np.array([10]))[2].tolist() == [6]
    assert _used(_phase(share=0.5, part=(0.5, 1.0)), np.array([10]))[2].tolist() == [3]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ({"batch": 4}, [3, 1, 1, 0]),
        ({"batch": 4, "drop_last": True}, [2, 1, 1, 0]),  # too few for one batch: they are one
        ({"batch": None}, [1, 1, 1, 0]),
        ({"batch": 4, "fresh": True}, [1, 1, 1, 0]),
        ({"batch": 1}, [9, 4, 3, 0]),
    ],
)
def test_batches_of_a_pass(kind: dict[str, Any], wanted: list[int]) -> None:
    """Nine, four, three and no samples."""
    assert num_steps(_phase(epochs=1, **kind), np.array([9, 4, 3, 0])).tolist() == wanted
    doubled = [2 * n for n in wanted]
    assert num_steps(_phase(epochs=2, **kind), np.array([9, 4, 3, 0])).tolist() == doubled


@pytest.mark.parametrize(
    ("sizes", "kind", "batch", "period"),
    [
        ([4, 4], {"batch": 2, "shuffle": False}, 2, 2),  # one pass is all there is to know
        ([4, 2], {"batch": 2, "shuffle": False}, 2, 6),  # unequal passes
        ([4, 2], {"batch": 2, "shuffle": False, "epochs": 1}, 2, 2),
        ([4, 4], {"batch": 2}, 2, 6),  # every pass has an order of its own
        ([4, 2], {"batch": None}, 4, 1),  # everything at once is the same in any order
        ([4, 2], {"batch": 9}, 4, 3),  # no batch is wider than the longest list
        ([1, 1], {"batch": 1, "shuffle": False}, 1, 1),
        ([0, 0], {"batch": 3}, 1, 0),
        ([4, 4], {"batch": 2, "shuffle": False, "steps": 1}, 2, 1),
    ],
)
def test_the_table_is_as_long_as_what_differs(
    sizes: list[int], kind: dict[str, Any], batch: int, period: int
) -> None:
    """Three passes, unless said otherwise."""
    plan = _plan(sizes, {"epochs": 3, **kind})
    assert plan.batch == batch
    assert plan.table.shape == (1, 2, period, 2 * batch + 1)


@pytest.mark.parametrize("sizes", [[1, 0], [0, 1], [1, 1], [3, 1, 0], [0]])
def test_few_samples_and_none_have_a_table(sizes: list[int]) -> None:
    """Padding points at samples that exist; the rows are all there, in one pass and in three."""
    kinds: Any = ({"steps": 3}, {"steps": 3, "share": 0.5}, {"steps": 3, "shuffle": False}, {})
    for kind in kinds:
        plan = _plan(sizes, {"batch": 2, **kind})
        numbers = plan.table[..., : plan.batch]
        assert bool(((numbers >= 0) & (numbers < max(sum(sizes), 1))).all())
        for lane, size in enumerate(sizes):
            if "share" not in kind:
                assert {r for rows in _rows(plan, lane, 0) for r in rows} == set(range(size))


def test_a_pass_is_the_permutation_of_its_key() -> None:
    """Epoch e of a lane is drawn from its key, folded with the draw and e, whoever is beside it."""
    sizes = [5, 0, 8, 1, 13]
    plan = _plan(sizes, {"batch": 3, "epochs": 3, "draws": 2, "random": True})
    for lane, size in enumerate(sizes):
        key = rng.fold(rng.key(3), lane, "train")
        for draw in range(2):
            rows = [r for step in _rows(plan, lane, draw) for r in step]
            keys = [rng.fold(key, "shuffle", draw, e) for e in range(3)]
            assert rows == [r for k in keys for r in rng.permutation(k, size).tolist()]
        for s in range(int(plan.steps[0, lane])):
            assert torch.equal(plan.keys[0, lane, s], rng.fold(key, "step", s))


@pytest.mark.parametrize("sizes", [[10, 1, 4, 0], [1, 0]])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_parts_are_cut_from_one_order_and_shuffled_inside(share: float, sizes: list[int]) -> None:
    """Rows of (a, b) are those from a·n to b·n of the client's own order, in any order."""
    arena, ids = _arena(sizes), np.arange(len(sizes))[None]
    base = rng.key(3).numpy()[None, None, :]
    keys, part_keys = rng.fold_host(base, ids, "train"), rng.fold_host(base, ids, "part")
    for part in ((0.0, 0.3), (0.3, 1.0)):
        phase = _phase(part=part, share=share, batch=3, epochs=2)
        plan = build_plan(phase, arena, ids, keys, num_steps(phase, np.array([sizes])), part_keys)
        first, length, used = _used(phase, np.array(sizes))
        for lane, size in enumerate(sizes):
            order = rng.permutation(rng.fold(rng.key(3), lane, "part", 0), size).tolist()
            inside = order[first[lane] : first[lane] + length[lane]]
            rows = [r for step in _rows(plan, lane, 0) for r in step]
            assert len(rows) == 2 * used[lane]
            if share == 1.0:
                assert sorted(rows) == sorted(2 * inside)
                keep = [rng.fold(rng.key(3), lane, "train", "shuffle", 0, e) for e in range(2)]
                orders = [rng.permutation(k, int(length[lane])).tolist() for k in keep]
                assert rows == [inside[j] for one in orders for j in one]
            else:
                chosen = rng.fold(rng.key(3), lane, "train", "share", 0, 0)
                picked = rng.permutation(chosen, int(length[lane]))[: used[lane]].tolist()
                assert sorted(rows) == sorted(2 * [inside[j] for j in picked])


def test_runs_that_differ_in_labels_share_the_features() -> None:
    """With a list of rows, the label is that of the sample and the features those of its row."""
    arena = _arena([3, 2])
    row = torch.tensor([4, 3, 2, 1, 0])
    labels = torch.arange(10).reshape(5, 2)  # two of them a sample
    arena = replace(arena, row=row, y=labels)
    plan = _plan([3, 2], {"batch": 3})
    batch = plan.batches(arena, plan.table[:, :, 0])
    assert isinstance(batch, Batch)
    numbers = plan.table[:, :, 0, :3]
    assert torch.equal(batch.x[..., 0].long(), row[numbers])
    assert torch.equal(batch.y, labels[numbers])


def _three_runs() -> BatchPlan:
    """Make a plan of three runs and four slots, all different."""
    sizes = [[9, 7, 5, 2], [8, 6, 3, 1], [4, 9, 2, 6]]
    flat = [n for row in sizes for n in row]
    arena, phase = _arena(flat), _phase(batch=2, epochs=2, random=True)
    split = arena.splits["train"]
    split = replace(split, start=split.start.reshape(3, 4), size=split.size.reshape(3, 4))
    arena = replace(arena, splits={"train": split}, num_runs=3, num_clients=4)
    ids = np.tile(np.arange(4), (3, 1))
    seeds = np.arange(3)[:, None]
    keys = rng.fold_host(rng.fold_host(rng.key(3).numpy()[None, None, :], seeds), ids)
    return build_plan(phase, arena, ids, keys, num_steps(phase, split.size))


@pytest.mark.parametrize(("run", "runs", "slot", "slots"), [(1, 2, 1, 2), (0, 1, 2, 2)])
def test_the_plan_of_a_block_is_that_of_its_lanes(
    run: int, runs: int, slot: int, slots: int
) -> None:
    """Rows, keys, steps and counts are those of the lanes in the block."""
    whole = _three_runs()
    part = whole.narrow(run, runs, slot, slots)
    assert part.steps.shape == (runs, slots)
    for r in range(runs):
        for i in range(slots):
            assert torch.equal(part.table[r, i], whole.table[run + r, slot + i])
            assert torch.equal(part.keys[r, i], whole.keys[run + r, slot + i])
            for name in ("steps", "samples"):
                assert getattr(part, name)[r, i] == getattr(whole, name)[run + r, slot + i]
            assert part.passes[:, r, i].tolist() == whole.passes[:, run + r, slot + i].tolist()
    early = part.samples_in(np.full((runs, slots), 2))
    wanted = whole.samples_in(np.full((3, 4), 2))[run : run + runs, slot : slot + slots]
    assert early.tolist() == wanted.tolist()


def test_the_lanes_of_all_runs_are_the_lanes_of_one() -> None:
    """In the given order: lane k is lane order[k], counted through the runs."""
    whole, order = _three_runs(), np.array([11, 0, 6, 5, 3])
    one = whole.as_one_run(order)
    assert one.steps.shape == one.samples.shape == (1, 5)
    assert one.passes.shape == (2, 1, 5)
    for lane, k in enumerate(order):
        r, i = divmod(int(k), 4)
        assert torch.equal(one.table[0, lane], whole.table[r, i])
        assert torch.equal(one.keys[0, lane], whole.keys[r, i])
        assert one.steps[0, lane] == whole.steps[r, i]
        assert one.samples[0, lane] == whole.samples[r, i]
        assert one.passes[:, 0, lane].tolist() == whole.passes[:, r, i].tolist()


# ---- what is drawn -------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many blocks of four words every draw takes."""
    found: list[int] = []
    words_at = rng.words_at

    def counting(keys: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        found.append(len(blocks))
        return words_at(keys, blocks)

    monkeypatch.setattr(rng, "words_at", counting)
    return found


def test_permutations_are_packed_and_no_word_too_many_is_drawn(drawn: list[int]) -> None:
    """Four numbers a block: ⌈n/4⌉ blocks for n samples, once for lanes with the same key."""
    keys = rng.fold_host(np.tile(rng.key(1).numpy(), (4, 1)), np.array([0, 1, 0, 2]))
    sizes, epochs = np.array([8, 5, 8, 1]), np.array([2, 1, 2, 3])
    order, offset, base = _permutations(keys, sizes, epochs, torch.device("cpu"))
    assert drawn == [2 * 2 + 1 * 2 + 3 * 1]
    assert len(order) == 2 * 8 + 5 + 3 * 1
    for lane, (size, num) in enumerate(zip(sizes, epochs, strict=True)):
        for e in range(num):
            begin = int(offset[base[lane] + e])
            own = rng.permutation(rng.fold(torch.from_numpy(keys[lane]), e), int(size))
            assert torch.equal(order[begin : begin + size], own)
    assert base[0] == base[2]


def test_no_pass_is_drawn_that_nobody_begins(drawn: list[int]) -> None:
    """Three steps of two batches a pass begin two passes; the absent begin none."""
    _plan([8, 5, 0], {"batch": 4, "steps": 3})
    assert drawn == [2 * 2 + 2 * 2]


def test_of_equal_words_the_earlier_sample_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``rng.permutation``: the order is the same on every device."""
    monkeypatch.setattr(rng, "words_at", lambda keys, blocks: torch.zeros(len(blocks), 4).long())
    order, *_ = _permutations(
        np.array([[1, 2], [3, 4]]), np.array([150, 70]), np.array([1, 1]), torch.device("cpu")
    )
    assert order.tolist() == [*range(150), *range(70)]


def test_draws_are_shared_by_equal_keys_alone() -> None:
    """Both words of a key count, and equal keys share only if sizes and epochs are equal too."""
    ones = np.ones(2, dtype=np.int64)

    def shared(a: tuple[int, int], b: tuple[int, int], sizes=ones, epochs=ones) -> bool:
        first, same = _different(np.array([a, b]), sizes, epochs)
        assert same.tolist() == ([0, 0] if len(first) == 1 else [0, 1])
        return len(first) == 1

    assert shared((1, 2), (1, 2))
    assert not shared((1, 2), (1, 3))
    assert not shared((1, 2), (4, 2))
    assert not shared((0, 7), (1 << 31, 7))
    assert not shared((1, 2), (2, 1))
    assert not shared((1, 2), (1, 2), sizes=np.array([3, 4]))
    assert not shared((1, 2), (1, 2), epochs=np.array([3, 4]))
