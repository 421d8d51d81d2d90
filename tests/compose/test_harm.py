"""Do no harm: the best of alone, global and personalised, each trained as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

import sartor
from sartor.compose.judging import HUGE, beyond_noise, paired_sums, ranked_sums
from sartor.compose.parallel import kept_after_training, on_share
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import changed
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.methods import build
from sartor.runs import RunFolder
from tests.laws import SGD, Case, check_method
from tests.toys import assert_same, federation, net_task, outcome, run, simulation, states

SIZES = (12, 17, 14, 19, 15)
ON_VAL = {"do_no_harm": True, "harm_on": "validation"}
FEW = ("apfl", "fedapa", "fedem", "dichotomous", "fedprox-two-stage")
MORE = ("fedprox", "ditto", "fedper", "fedproto", "pfedbayes", "l2gd", "pfedme", "dbe", "fedbabu")
SOME = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in (*MORE, "fedfomo"))]


def protected(name: str, local: Local = SGD, **settings: Any) -> Any:
    """Run a method that does no harm, on validation data by default."""
    task = net_task()
    options = {**ON_VAL, **settings.pop("options", {})}
    feds = settings.pop("federations", [federation(sizes=SIZES)])
    return run(simulation(build(name, task, local, options), task, feds, **settings))


# ---- the rule ------------------------------------------------------------------------------------


def verdict(alone: list[float], *others: list[float], margin: float = 1.0) -> tuple[int, Any]:
    losses = torch.tensor([alone, *others], dtype=torch.float64)
    sums = paired_sums(losses, torch.ones(losses.shape[1], dtype=torch.bool))
    choice, seen = beyond_noise(sums, torch.tensor(margin))
    return int(choice), seen


def test_the_rule_on_worked_numbers() -> None:
    """Gains 1, 2, 3 have mean 2 and standard error 1/√3; so the switch is at margin 2√3."""
    alone, other = [4.0, 4.0, 4.0], [3.0, 2.0, 1.0]
    choice, seen = verdict(alone, other)
    assert choice == 1
    assert seen["loss"].tolist() == [4.0, 2.0]
    assert float(seen["error"][1]) == pytest.approx(1 / np.sqrt(3))
    assert float(seen["count"]) == 3
    assert verdict(alone, other, margin=2 * np.sqrt(3) - 1e-6)[0] == 1
    assert verdict(alone, other, margin=2 * np.sqrt(3) + 1e-6)[0] == 0


def test_of_those_that_pass_the_lowest_loss_wins() -> None:
    """A lower loss that is too noisy does not count; a tie stays alone."""
    sure, noisy = [3.0, 3.1, 2.9, 3.0], [-12.0, 12.0, -10.0, 12.0]
    alone = [4.0] * 4
    assert verdict(alone, sure, noisy)[0] == 1
    assert verdict(alone, sure, noisy, margin=0.0)[0] == 2
    assert verdict(alone, sure, [v - 1 for v in sure])[0] == 2
    assert verdict(alone, alone, margin=0.0)[0] == 0


def test_what_is_a_tie_by_algebra_stays_alone() -> None:
    """One error fewer of n has d̄ = s/√n = 1/n: at margin 1 it does not pass, whatever n.

    With k errors fewer and no other change d̄ √n/s is √(k (n − 1)/(n − k)); beside it all is clear.
    """
    for num in range(2, 301):
        for fewer in {1, 2, num // 2} - {num}:
            alone = [1.0] * fewer + [0.0] * (num - fewer)
            tie = float(np.sqrt(fewer * (num - 1) / (num - fewer)))
            sums = paired_sums(
                torch.tensor([alone, [0.0] * num], dtype=torch.float64),
                torch.ones(num, dtype=torch.bool),
            )
            for margin, wanted in ((tie, 0), (tie * (1 + 1e-6), 0), (tie * (1 - 1e-6), 1)):
                choice, _ = beyond_noise(sums, torch.tensor(margin, dtype=torch.float64))
                assert int(choice) == wanted, (num, fewer, margin)


def test_one_sample_decides_nothing() -> None:
    """Its noise is not known."""
    assert verdict([4.0], [0.0], margin=0.0)[0] == 0
    assert verdict([4.0, 4.0], [0.0, 0.0], margin=0.0)[0] == 1


def test_padding_counts_for_nothing_and_nan_as_huge() -> None:
    """Masked samples leave no trace; a model that gives NaN is never chosen, and can be left."""
    losses = torch.tensor([[1.0, 2.0, 9.0], [0.5, 1.0, torch.nan]])
    sums = paired_sums(losses, torch.tensor([True, True, False]))
    assert sums.tolist() == [[3.0, 1.5], [0.0, 1.5], [0.0, 1.25], [2.0, 2.0]]
    nan = [float("nan")] * 3
    assert verdict([1.0, 2.0, 3.0], nan)[0] == 0
    assert verdict(nan, [1.0, 2.0, 3.0])[0] == 1
    assert float(verdict(nan, [1.0] * 3)[1]["loss"][0]) == pytest.approx(HUGE)


def test_wrong_answers_can_decide_in_place_of_losses() -> None:
    """The recorded scores are then shares of wrong answers on the validation samples."""
    sim = protected("fedprox", options={"harm_score": "error"}, points=("pre",))
    last = sim.log.snapshots[-1]
    kept, choice = last["held_out_loss"][0], last["choice"][0].astype(int)
    scores = sim.scores()["pre", "val"]
    used = np.take_along_axis(kept, choice[:, None], 1)[:, 0]
    wrong = 1 - scores.correct[0, -1] / scores.count[0]
    np.testing.assert_allclose(used, wrong, rtol=0, atol=1e-6)


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["validation", "holdout"])
@pytest.mark.parametrize("name", ["fedem", "fedapa"])
def test_a_huge_margin_leaves_every_client_alone_to_the_bit(name: str, on: str) -> None:
    """What is used is LocalTrain's model on all training data, also where some are held out."""
    sim = protected(name, options={"harm_on": on}, hyper={"harm_margin": 1e9}, points=("pre",))
    task = net_task()
    fed = federation(sizes=SIZES)
    alone = run(simulation(build("local", task, SGD, {}), task, [fed]))
    for split in ("test", "val"):
        np.testing.assert_array_equal(
            sim.scores()["pre", split].loss, alone.scores()["pre", split].loss
        )
    assert set(sim.log.snapshots[-1]["choice"].ravel()) == {0.0}


def logistic(num: int, clients: int, flipped: int = 0, seed: int = 0, val: int = 60) -> Federation:
    """Clients that share one linear rule with noise; the last ``flipped`` have its opposite."""
    draw = np.random.default_rng(seed)
    size = num + val + 100
    weight = draw.normal(size=8)
    x = draw.normal(size=(clients * size, 8))
    y = (x @ weight + draw.logistic(size=len(x)) > 0).astype(np.int64)
    y[(clients - flipped) * size :] ^= 1
    rows = np.arange(len(x)).reshape(clients, size)
    parts = np.split(rows, [num, num + val], axis=1)
    names = tuple(f"c{i}" for i in range(clients))
    train, held, test = (Ragged.from_lists(list(part)) for part in parts)
    return Federation(torch.from_numpy(x), torch.from_numpy(y), train, held, test, names, 2, {})


def linear() -> torch.nn.Module:
    module: Any = torch.nn.Linear(8, 2)
    module.head = None
    return module


GD = Local(steps=5, batch=None, lr=0.5)
QUICK: dict[str, Any] = {"model": linear(), "local": GD, "chunk": 64, "points": ("pre",)}


def test_tiny_equal_clients_leave_and_a_flipped_one_stays() -> None:
    """Eight samples each are too few alone; clients with the opposite labels are not drawn in."""
    fed = logistic(8, 12, flipped=1)
    result = sartor.fit("fedavg", fed, rounds=15, eval_every=15, **QUICK, do_no_harm=True)
    ended = result.ended_with()
    assert ended is not None
    assert ended[-1] == "alone"
    assert sum(word != "alone" for word in ended[:-1]) >= 9
    plain = sartor.fit("fedavg", fed, rounds=15, eval_every=15, **QUICK)
    hurt = plain.gain().notes["clients hurt"]
    assert hurt >= 1
    assert result.gain(plain.baseline()).notes["clients hurt"] <= hurt


def test_no_client_does_worse_than_alone_on_the_samples_that_decide() -> None:
    """Half the clients alike, the others each for itself, one harmful: no held-out loss rises."""
    fed = logistic(20, 10, flipped=1, seed=3)
    draw = np.random.default_rng(5)
    y = fed.y.clone()
    for i in range(5, 9):  # rules of their own
        rows = torch.cat([fed.split(s).of(i) for s in ("train", "val", "test")])
        y[rows] = (fed.x[rows] @ torch.from_numpy(draw.normal(size=8)) > 0).long()
    fed = replace(fed, y=y)
    settings: dict[str, Any] = {**QUICK, "rounds": 10, "dtype": "float64"}
    alone = sartor.fit("local", fed, **settings).scores["pre", "val"].loss[0]
    free = sartor.fit("fedavg", fed, **settings).scores["pre", "val"].loss[0, -1]
    assert (free > alone[-1]).sum() >= 3
    for margin in (0.0, 1.0):
        kept = sartor.fit("fedavg", fed, do_no_harm=True, hyper={"harm_margin": margin}, **settings)
        loss = kept.scores["pre", "val"].loss[0]
        assert (loss <= alone + 1e-9).all()  # at every evaluation, not only the last
        assert (loss[-1] < alone[-1] - 1e-3).any()


# ---- training is what it was ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME)
def test_every_part_trains_as_if_it_were_alone_to_the_bit(name: str) -> None:
    """Server and clients of each slot hold the bits of that method by itself."""
    task, fed = net_task(), federation(sizes=SIZES)
    sim = protected(name, participation="all", points=("pre",))
    found = states(sim)
    for slot, method in (("alone", "local"), ("global", "fedavg"), ("personalised", name)):
        record = build(method, task, SGD, {})
        late = record.use.headline == "post"
        record = kept_after_training(record) if late else record
        wanted = run(simulation(record, task, [fed], participation="all"))
        for key, value in states(wanted).items():
            where, leaf = key.split("/", 1)
            np.testing.assert_array_equal(found[f"{where}/{slot}/{leaf}"], value, err_msg=key)


def test_clients_outside_the_cohort_keep_their_states() -> None:
    """A client that is not drawn trains alone; its other states and kept models do not change."""
    task, fed = net_task(), federation(sizes=SIZES)
    found = states(protected("fedapa", points=("pre",)))
    record = kept_after_training(build("fedapa", task, SGD, {}))
    for key, value in states(run(simulation(record, task, [fed]))).items():
        where, leaf = key.split("/", 1)
        np.testing.assert_allclose(
            found[f"{where}/personalised/{leaf}"], value, rtol=0, atol=1e-12, err_msg=key
        )


@pytest.mark.parametrize("name", ["fedapa", "moon"])
def test_models_used_after_training_are_kept(name: str) -> None:
    """The kept model is the one that the method alone would use, also of sampled clients."""
    task, fed = net_task(), federation(sizes=SIZES)
    record = build(name, task, SGD, {})
    kept = run(simulation(kept_after_training(record), task, [fed], points=("pre",)))
    alone = run(simulation(record, task, [fed]))
    for client in range(5):
        assert_same(
            {k: v.numpy() for k, v in kept.params(client).items()},
            {k: v.numpy() for k, v in alone.params(client, point="post").items()},
        )


@pytest.mark.parametrize("name", ["ditto", "fedem", "l2gd", "dbe", "scaffold"])
def test_a_share_of_the_data_is_a_federation_without_the_rest(name: str) -> None:
    """With full batches, training on a share equals training where the rest does not exist."""
    task, fed = net_task(), federation(sizes=SIZES, val=2)
    local = Local(steps=2, batch=None, lr=0.2)
    record = build(name, task, local, {})
    seen: dict[int, set[int]] = {}

    def watch(phase: Any) -> Any:
        def step(work: Any, batch: Any, ctx: Any) -> Any:
            for one in batch if type(batch) is tuple else (batch,):
                rows = one.rows[one.mask].tolist()
                seen.setdefault(int(ctx.index), set()).update(rows)
            return phase.step(work, batch, ctx)

        return replace(phase, step=step) if phase.data == "train" else phase

    part = on_share(record, 0.8)
    spied = changed(part, phases=tuple(watch(p) for p in part.phases))
    a = run(simulation(spied, task, [fed], participation="all", engine="sequential"))
    lists = [fed.train.of(i)[sorted(seen[i])] for i in range(5)]
    assert [len(rows) for rows in lists] == [int(0.8 * n + 1e-9) for n in SIZES]
    less = replace(fed, train=Ragged.from_lists(lists))
    b = run(simulation(record, task, [less], participation="all", engine="sequential"))
    for point in ("pre", "post"):
        np.testing.assert_allclose(
            a.scores()[point, "test"].loss, b.scores()[point, "test"].loss, rtol=0, atol=1e-9
        )


def test_held_out_samples_take_no_part_in_training() -> None:
    """New labels of the held-out fifth change the models of those who stay alone only."""
    task, fed = net_task(), federation(sizes=(20,) * 5, val=0)
    record = build("ditto", task, SGD, {"do_no_harm": True})
    sims = [run(simulation(record, task, [fed], participation="all"))]
    rows: set[int] = set()
    judged = record.schedule.after
    assert judged is not None
    scored = judged.phases[-1]

    def step(work: Any, batch: Any, ctx: Any) -> Any:
        own = fed.train.of(int(ctx.index))
        rows.update(own[batch.rows[batch.mask]].tolist())
        return scored.step(work, batch, ctx)

    spied = changed(record, after=changed(judged, phases=(replace(scored, step=step),)))
    run(simulation(spied, task, [fed], participation="all", engine="sequential"))
    assert len(rows) == 5 * 4
    y = fed.y.clone()
    y[list(rows)] = (y[list(rows)] + 1) % 3
    sims.append(run(simulation(record, task, [replace(fed, y=y)], participation="all")))
    a, b = (states(sim) for sim in sims)
    for key in a:
        same = np.array_equal(a[key], b[key])
        assert same or "alone_used" in key or key.startswith(("client/choice", "client/held_out"))
    assert any(not np.array_equal(a[k], b[k]) for k in a if "alone_used" in k)


# ---- engines, sweeps, checkpoints, costs ---------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("fedprox", {"do_no_harm": True}), marks=pytest.mark.slow),
        Case("fedem", {"do_no_harm": True, "components": 2}),
        pytest.param(Case("fedapa", ON_VAL), marks=pytest.mark.slow),
        pytest.param(Case("dichotomous", ON_VAL), marks=pytest.mark.slow),
        pytest.param(Case("pfedhn", ON_VAL), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_is_a_method_like_any_other(case: Case, tmp_path: Path) -> None:
    """Engines agree, a row of a sweep is the single run, and resuming is running straight."""
    laws = (
        "engines_agree",
        "a_sweep_row_is_the_single_run",
        "stop_and_resume_is_straight",
        "evaluation_changes_nothing",
        "gradients_are_counted",
        "dtype_survives",
    )
    check_method(case, tmp_path, laws)


def test_engines_make_the_same_choice() -> None:
    """The table of choices, and the losses behind it, agree in float64."""
    sims = [
        protected(name, engine=engine, hyper={"harm_margin": 0.2}, points=("pre",))
        for name in ("fedem", "fedbabu")
        for engine in ("vectorised", "sequential")
    ]
    for one, other in (sims[:2], sims[2:]):
        assert_same(outcome(one), outcome(other), atol=1e-6)  # snapshots are float32
        chosen, same = (sim.log.snapshots[-1]["choice"] for sim in (one, other))
        np.testing.assert_array_equal(chosen, same)
        assert chosen.max() > 0


def test_a_sweep_of_the_margin_is_the_single_runs() -> None:
    """One pass over three margins gives what three passes give."""
    fed = logistic(8, 6, flipped=1, val=20)
    settings: dict[str, Any] = {**QUICK, "rounds": 4, "dtype": "float64", "eval_every": 4}
    margins = [0.0, 1.0, 1e6]
    swept = sartor.fit("fedprox", fed, do_no_harm=True, sweep={"harm_margin": margins}, **settings)
    ended = []
    for run_index, margin in enumerate(margins):
        one = sartor.fit("fedprox", fed, do_no_harm=True, hyper={"harm_margin": margin}, **settings)
        assert swept.ended_with(run_index) == one.ended_with()
        np.testing.assert_allclose(
            swept.scores["pre", "test"].loss[run_index],
            one.scores["pre", "test"].loss[0],
            rtol=0,
            atol=1e-10,
        )
        ended.append(one.ended_with())
    assert ended[0] != ended[1] != ended[2] == ["alone"] * 6


@pytest.mark.parametrize("participation", ["all", "at_least:0.6"])
@pytest.mark.parametrize("name", ["pfedme", "l2gd", "fedbabu", "fedprox-two-stage"])
def test_the_ledger_is_the_sum_of_the_parts_and_the_scoring(name: str, participation: str) -> None:
    """Gradients and bytes are the parts' own; scoring adds forward passes and one message each."""
    task, fed = net_task(), federation(sizes=SIZES)
    sim = protected(name, participation=participation, points=("pre",))
    found = sim.ledger()
    parts = [
        run(simulation(build(m, task, SGD, {}), task, [fed], participation=participation))
        for m in ("local", "fedavg", name)
    ]
    for counter in ("gradient_evaluations", "forward_evaluations", "bytes_up", "bytes_down"):
        wanted = sum(getattr(part.ledger(), counter) for part in parts)
        assert getattr(found, counter).tolist() == wanted.tolist(), counter
    alone = [part.ledger() for part in parts]
    assert found.setup_gradients.tolist() == sum(s.setup_gradients for s in alone).tolist()
    held_out = int(fed.val.sizes.sum())
    forward = sum(s.setup_forward for s in alone) + 3 * held_out
    assert found.setup_forward.tolist() == forward.tolist()
    ctx = sim.clients.evaluator.models(sim.server, sim.store, 3, sim.context.everybody)[0]
    message = tree.num_bytes(ctx.common, 1) + tree.num_bytes(ctx.own, 2)
    counted = 0 if parts[2].method.use.adapt else sum(s.setup_bytes[0] for s in alone)
    assert found.setup_bytes.tolist() == [5 * message + counted]


def test_resuming_and_the_run_folder(tmp_path: Path) -> None:
    """A run that is resumed ends with the same choice, and the folder holds it."""
    fed = logistic(8, 6, val=20)
    settings: dict[str, Any] = {
        **QUICK,
        "do_no_harm": True,
        "checkpoint_every": 2,
    }

    class Stop:
        def start(self, total_rounds: int, description: str) -> None: ...
        def stop(self) -> None: ...
        def update(self, round_index: int, info: dict[str, Any]) -> None:
            if round_index == 2:
                raise KeyboardInterrupt

    straight = sartor.fit("fedem", fed, rounds=4, **settings)
    with pytest.raises(KeyboardInterrupt):
        sartor.fit("fedem", fed, rounds=4, out=tmp_path / "r", progress=Stop(), **settings)
    again = sartor.fit("fedem", fed, rounds=4, out=tmp_path / "r", resume=True, **settings)
    read = RunFolder.open(tmp_path / "r").read_result()
    assert straight.ended_with() == again.ended_with() == read.ended_with()
    assert straight.accuracy == again.accuracy == read.accuracy
    model, x = again.model(0), fed.x[:7].float()
    torch.testing.assert_close(model(x), straight.model(0)(x), rtol=0, atol=0)


# ---- what is reported ----------------------------------------------------------------------------


def test_the_choice_is_reported_in_tables_words_and_json() -> None:
    """A column for each client, a sentence for all, and both in the summary."""
    fed = logistic(8, 6, flipped=1)
    result = sartor.fit("fedprox", fed, rounds=8, eval_every=8, **QUICK, do_no_harm=True)
    ended = result.ended_with()
    assert ended is not None
    for table in (result.gain(), result.per_client()):
        assert table.column("ended with") == ended
    reported = ", ".join(
        f"{word} {ended.count(word)}" for word in ("alone", "global", "personalised")
    )
    assert result.ended_with_words() == f"{reported} of 6 clients"
    assert result.gain().notes["ended with"] == f"{reported} of 6 clients"
    summary = result.summary()
    assert summary["ended_with"]["alone"] == ended.count("alone")
    assert summary["ended_with_by_client"] == dict(zip(result.clients, ended, strict=True))
    plain = sartor.fit("fedprox", fed, rounds=1, **QUICK)
    assert plain.ended_with() is None
    assert "ended with" not in plain.gain().columns
    assert "ended_with" not in plain.summary()


def test_local_and_fedavg_are_their_own_part() -> None:
    """What would be there twice is left out; with fine-tuning FedAvg is a method of its own."""
    task = net_task()
    for name, options, wanted in (
        ("local", {}, ("alone", "global")),
        ("fedavg", {}, ("alone", "global")),
        ("fedavg", {"finetune_steps": 1}, ("alone", "global", "personalised")),
    ):
        assert build(name, task, SGD, {**options, "do_no_harm": True}).show.names == wanted


def test_the_global_part_takes_no_notice_of_the_methods_relaxation() -> None:
    """FedAvg beside a relaxed method is plain FedAvg."""
    task, fed = net_task(), federation(sizes=SIZES)
    sim = protected("pfedme", hyper={"relax": 1.5}, participation="all", points=("pre",))
    plain = run(simulation(build("fedavg", task, SGD, {}), task, [fed], participation="all"))
    assert_same(
        {k: v.numpy() for k, v in tree.items(sim.server["global"])},
        {k: v.numpy() for k, v in tree.items(plain.server)},
    )


@pytest.mark.parametrize("participation", ["all", "at_least:0.6"])
def test_served_one_by_one_fedavg_is_still_fedavg(participation: str) -> None:
    """Beside a method that serves clients in turn, the average is that of the whole round."""
    task, fed = net_task(), federation(sizes=SIZES)
    sim = protected("pfedhn", participation=participation, points=("pre", "global"))
    for name, slot in (("fedavg", "global"), ("pfedhn", "personalised")):
        alone = run(
            simulation(
                build(name, task, SGD, {}), task, [fed], participation=participation,
                points=("pre", "global"),
            )
        )  # fmt: skip
        if slot == "global":
            wanted, found = (s.scores()["global", "test"].loss for s in (alone, sim))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
        else:
            for key, leaf in tree.items(alone.server):
                mine = dict(tree.items(sim.server[slot]))[key]
                torch.testing.assert_close(mine, leaf, rtol=0, atol=1e-10)


def test_the_samples_that_decide() -> None:
    """Validation data where every client has some and the method leaves them alone."""
    fed = logistic(8, 4, val=10)
    settings: dict[str, Any] = {**QUICK, "rounds": 1, "do_no_harm": True}
    assert sartor.fit("ditto", fed, **settings).runs[0].options["harm_on"] == "validation"
    uses_them = sartor.fit("fedfomo", fed, options={"select_on": "validation"}, **settings)
    assert uses_them.runs[0].options["harm_on"] == "holdout"
    bare = replace(fed, val=Ragged.from_lists([fed.val.of(i)[:0] for i in range(4)]))
    assert sartor.fit("ditto", bare, **settings).runs[0].options["harm_on"] == "holdout"
    with pytest.raises(ConfigError, match="harm_share must be between 0 and 1"):
        sartor.fit("ditto", bare, options={"harm_share": 1.0}, **settings)
    with pytest.raises(ConfigError, match="without do_no_harm"):
        sartor.fit("ditto", bare, model=linear(), options={"harm_share": 0.5})


def test_newcomers_decide_for_themselves() -> None:
    """Those that are like the others take their model; those with opposite labels do not."""
    fed = logistic(8, 12)
    result = sartor.fit("fedavg", fed, rounds=15, eval_every=15, **QUICK, do_no_harm=True)
    new = logistic(8, 6)
    for flipped, least, most in ((0, 4, 6), (6, 0, 1)):
        joined = result.onboard(logistic(8, 6, flipped=flipped), rounds=5)
        ended = joined.ended_with()
        assert ended is not None
        assert least <= ended.count("global") <= most
    assert result.onboard(new, rounds=0).ended_with() is not None
    pair = (new.x.numpy(), new.y.numpy())  # samples to decide by are held out of a pair
    assert result.onboard(pair, rounds=1).ended_with() is not None


def test_a_comparison_protects_all_but_local() -> None:
    """LocalTrain stays the floor that the others are measured from."""
    fed = logistic(8, 4)
    found = sartor.compare(
        ["ditto"],
        fed,
        rounds=2,
        **QUICK,
        do_no_harm=True,
    )
    assert [r.choices != () for r in found.values()] == [False, True, True, True]
    assert "ditto ended with" in found.table().notes


def test_with_and_without_in_one_sweep() -> None:
    """A sweep of the switch keeps what those ended with who had a choice."""
    fed = logistic(8, 4)
    found = sartor.fit("ditto", fed, rounds=2, **QUICK, sweep={"do_no_harm": [False, True]})
    assert found.ended_with(0) is None
    assert found.ended_with(1) is not None


def delong(y: np.ndarray, first: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Difference of two AUROCs and its standard error, pair by pair, in NumPy."""
    kernel = [
        (np.greater.outer(p[y == 1], p[y == 0]) + 0.5 * np.equal.outer(p[y == 1], p[y == 0]))
        for p in (first, other)
    ]
    apart = kernel[1] - kernel[0]
    of_positive, of_negative = apart.mean(1), apart.mean(0)
    variance = of_positive.var(ddof=1) / len(of_positive) + of_negative.var(ddof=1) / len(
        of_negative
    )
    return float(apart.mean()), float(np.sqrt(variance))


@pytest.mark.parametrize("seed", range(6))
def test_areas_are_compared_by_delongs_variance(seed: int) -> None:
    """Two classes, ties included, padding left out: the values are those of the definition."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat([0, 1], [rng.integers(3, 20), rng.integers(3, 20)]))
    scores = rng.integers(0, 6, (3, len(y) + 2, 2)).astype(float)  # the last two rows are padding
    mask = torch.arange(len(y) + 2) < len(y)
    padded = torch.from_numpy(np.append(y, [1, 0]))
    sums = ranked_sums(torch.from_numpy(scores), padded, mask)
    _, found = beyond_noise(sums, torch.tensor(1.0))
    p = (scores[..., 1] - scores[..., 0])[:, : len(y)]
    for k in range(3):
        gain, error = delong(y, p[0], p[k])
        assert float(sums[1, k] / sums[3, k]) == pytest.approx(gain, abs=1e-12)
        assert float(found["error"][k]) == pytest.approx(error, abs=1e-9)
        assert float(found["loss"][k]) == pytest.approx(1 - roc_auc_score(y, p[k]), abs=1e-12)


def test_of_more_classes_the_area_is_their_mean() -> None:
    """One against the rest, over the classes that occur; samples of one class decide nothing."""
    rng = np.random.default_rng(0)
    y, scores = rng.integers(0, 3, 30), rng.normal(size=(2, 30, 4))
    mask = torch.ones(30, dtype=torch.bool)
    sums = ranked_sums(torch.from_numpy(scores), torch.from_numpy(y), mask)
    p = np.exp(scores[1]) / np.exp(scores[1]).sum(1, keepdims=True)
    each = [roc_auc_score(y == k, p[:, k]) for k in range(3)]
    assert float(1 - sums[0, 1] / sums[3, 1]) == pytest.approx(np.mean(each))
    one = ranked_sums(torch.from_numpy(scores), torch.zeros(30, dtype=torch.long), mask)
    assert beyond_noise(one, torch.tensor(0.0))[0] == 0


def test_a_measure_decides_about_harm_too() -> None:
    """With measure="auroc" held-out areas decide; the scores recorded are 1 − AUROC."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    y = (x[:, 0] + rng.normal(size=400) > 1).astype(int)
    fed = sartor.Federation.from_arrays(x, y, client=np.arange(400) % 4, val=0.2)
    result = sartor.fit("fedavg", fed, rounds=2, measure="auroc", do_no_harm=True)
    assert result.config["options"]["harm_score"] == "auroc"
    held_out = result.snapshots[-1]["held_out_loss"][0]
    alone = sartor.fit("local", fed, rounds=2)
    for client in range(4):
        rows = fed.val.of(client)
        p = alone.predict(client, fed.x[rows].numpy()).scores[:, 1]
        area = roc_auc_score(fed.y[rows].numpy(), p)
        assert held_out[client, 0] == pytest.approx(1 - area, abs=1e-6)
    brier = sartor.fit("fedavg", fed, rounds=1, measure="brier", do_no_harm=True)
    assert brier.config["options"]["harm_score"] == "brier"
    numbers = sartor.Federation.from_arrays(
        x, x[:, 0], client=np.arange(400) % 4, task="regression"
    )
    with pytest.raises(sartor.errors.ConfigError, match="needs probabilities of classes"):
        sartor.fit("fedavg", numbers, do_no_harm=True, options={"harm_score": "auroc"})
