"""Auto: which methods, which rates, how many rounds, and how much of each for whom.

``fit("auto", federation)`` takes no hyper-parameter. It trains twice:

1. Trials. Some samples of every client are held out: the federation's validation samples if every
   client has some; else every sample once, in FOLDS folds, or where there are many samples, one
   fold of them. Every candidate trains at all RATES, as lanes of one pass, and is scored on them.
   Its rate and rounds are those of the lowest mean loss, after its scores are multiplied by one
   number, its sharpness, that makes them as sure as they are right (Guo et al., ICML 2017). A
   network that is trained long is right more often and yet too sure; without it, the loss would
   ask for too few rounds and too small a rate.
2. The choice, from the same losses (`sartor/theory/stacking.py`): one candidate for all, each
   client's best, or a stack of all with weights that are shrunk towards those of the federation;
   whatever has the lowest cross-fitted loss, or ``evidence`` where that is not surely better. A
   client for which the choice is worse than alone by more than a standard error stays alone.
3. The training that counts, on all samples, as one record (`sartor/methods/auto.py`): the
   candidates that have weight, at their rates, for their rounds, with the weights fixed.

The trials do not depend on the order of clients and of their samples: both are sorted by a hash of
their content, which also says which sample is in which fold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import methods
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import PADDING, Task
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.engines import make_engine
from sartor.engines.shard import processes
from sartor.methods.auto import candidates, slot
from sartor.results.result import Result
from sartor.results.scores import ONCE, Ledger, Run
from sartor.theory.stacking import FOLDS, Answers, cross_fit
from sartor.training.driver import drive
from sartor.training.settings import Settings
from sartor.training.simulation import Simulation

RATES = (0.3, 0.1, 0.03, 0.01)
LOOKS = 10
"""Evaluations of a trial, spread evenly over its rounds."""
FEW = 2000
"""Training samples up to which every one of them is held out once."""
LEAST = 0.02
"""The weight below which a candidate is not trained again."""
SMALL = 320
"""Training samples of a client in the middle, below which batches are of 10 and not of 32."""
A_ROUND = 100
"""Samples that such a client trains on in a round, at least."""
LEFT = 0.1
"""What is left of a rate after all rounds: less noise in the last step."""
EXACT, SURE = "evidence", 1.96
"""It is solved exactly, with no rate or number of rounds that the held-out samples chose, so that
its loss on them is not flattered as that of the others is: it stays unless something is better by
more than so many standard errors, paired by sample."""
LONGEST = 5.0
"""The longest gradient of a step. One that is longer is a step that goes wrong, and at a high rate
it can end in NaN: in the last training, too, where there is no other rate to fall back on."""


@dataclass(frozen=True)
class Choice:
    """What the trials on one federation found.

    Attributes:
        names: the candidates.
        rates: the rate of each, or None.
        rounds: the rounds of each.
        sharpness: what the scores of each are multiplied by.
        losses: the mean held-out loss of each, and its standard error against "local".
        rules: rule of choice -> cross-fitted loss.
        rule: the one that was taken.
        weights: (clients, candidates).
        held: per client: samples, loss alone, loss of the choice, its standard error.
        alone: clients that stay alone.
        cost: counted costs of the trials.
        left_out: candidate -> why it was not tried.
    """

    names: list[str]
    rates: list[float | None]
    rounds: list[int]
    sharpness: list[float]
    losses: list[tuple[float, float]]
    rules: dict[str, float]
    rule: str
    weights: np.ndarray
    held: np.ndarray
    alone: np.ndarray
    cost: dict[str, float]
    left_out: dict[str, str]


def select(
    federations: dict[int, Federation],
    settings: Settings,
    tried: Callable[[Federation], Task],
) -> dict[str, Any]:
    """Choose for the federation of every seed; return JSON-able facts.

    ``parts`` are the candidates that are trained again for any seed, ``rounds`` the most that one
    of them takes; ``seeds`` holds for every seed (as a word) the hyper-parameters of `auto`, and
    how they were found.
    """
    known: dict[int, Choice] = {}
    settings = replace(settings, local=local_for(federations.values(), settings.rounds))
    for seed, federation in federations.items():
        if id(federation) not in known:
            known[id(federation)] = choose(tried(federation), federation, seed, settings)
    choices = {seed: known[id(federation)] for seed, federation in federations.items()}
    used = {
        name
        for c in choices.values()
        for name, weights in zip(c.names, c.weights.T, strict=True)
        if weights.any()
    }
    parts = [name for c in choices.values() for name in c.names if name in used]
    return {
        "parts": list(dict.fromkeys(parts)),
        "rounds": max(
            t
            for c in choices.values()
            for name, t in zip(c.names, c.rounds, strict=True)
            if name in (used | {"local"})
        ),
        "limit": settings.rounds,
        "local": {
            k: getattr(settings.local, k) for k in ("epochs", "batch", "lr_decay", "clip_norm")
        },
        "seeds": {str(seed): facts(c, federations[seed]) for seed, c in choices.items()},
    }


def facts(choice: Choice, federation: Federation) -> dict[str, Any]:
    """Return a choice as JSON-able values."""
    weights = choice.weights.T
    found = choice.rates, choice.rounds, choice.sharpness, choice.losses
    rows = zip(choice.names, *found, weights, strict=True)
    return {
        "candidates": {
            name: {
                "rate": rate,
                "rounds": rounds,
                "sharpness": sharpness,
                "loss": loss,
                "error": error,
                "weights": own.tolist(),
            }
            for name, rate, rounds, sharpness, (loss, error), own in rows
        },
        "rules": choice.rules,
        "rule": choice.rule,
        "clients": {
            name: {
                "samples": int(held[0]),
                "alone": None if held[0] == 0 else float(held[1]),
                "chosen": None if held[0] == 0 else float(held[2]),
                "error": None if held[0] < 2 else float(held[3]),
                "stays alone": bool(alone),
            }
            for name, held, alone in zip(federation.names, choice.held, choice.alone, strict=True)
        },
        "cost": choice.cost,
        "left out": choice.left_out,
    }


def hyper_of(found: dict[str, Any], parts: Sequence[str], seed: int) -> dict[str, Any]:
    """Return the hyper-parameters of `auto` for a seed."""
    given: dict[str, Any] = {"horizon": float(found["limit"])} if "fedphp" in parts else {}
    for name in parts:
        none: dict[str, Any] = {"weights": [], "rate": None}
        one = found["seeds"][str(seed)]["candidates"].get(name, none)
        used = any(one["weights"])
        given |= {f"{slot(name)}_weight": one["weights"] if used else 0.0}
        given |= {f"{slot(name)}_rounds": one["rounds"] if used else 0.0}
        given |= {f"{slot(name)}_sharpness": one.get("sharpness", 1.0)}
        if one["rate"] is not None:
            given[f"{slot(name)}_lr"] = one["rate"]
    if len(parts) == 1:  # whatever its weight beside others is
        one = found["seeds"][str(seed)]["candidates"][parts[0]]
        given |= {f"{slot(parts[0])}_weight": 1.0, f"{slot(parts[0])}_rounds": one["rounds"]}
    return given


def add_cost(result: Result, found: dict[str, Any]) -> None:
    """Count the trials among what is spent once."""
    ledger = result.ledger
    for column in ONCE:
        name = column.removeprefix("setup_")
        spent = [found["seeds"][str(run.seed)]["cost"][name] for run in result.runs]
        setattr(ledger, column, getattr(ledger, column) + np.array(spent))


KEPT = ("epochs", "batch", "lr_decay", "clip_norm")
"""What is written of local training."""
CHOSEN = ("local", "sweep", "early_stopping")
"""Keywords of ``fit`` that auto does without."""


def without_choices(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a comparison without those that auto chooses itself."""
    return {name: value for name, value in settings.items() if name not in CHOSEN}


def refuse_settings(
    local: Local | None,
    hyper: Any,
    sweep: Any,
    options: Any,
    settings: Settings,
    harm: bool,
    weighted: bool,
) -> None:
    """Refuse everything that auto chooses itself."""
    given = {
        "local (rate, epochs, batch, ...)": local is not None and local != Local(),
        "hyper": bool(hyper),
        "sweep": bool(sweep),
        "options": bool(options),
        "early_stopping": settings.early_stopping is not None and not settings.open_ended,
        "do_no_harm": harm,
        "class_weights": weighted,
    }
    if names := [name for name, there in given.items() if there]:
        raise ConfigError(
            f"auto chooses rates, rounds and methods itself and does no harm by itself, so it "
            f"takes no {', '.join(names)}. Leave that out; or name a method to set it for, such "
            "as fedavg-ft (`sartor methods` lists them)."
        )


# ---------------------------------------------------------------------- held-out samples


def prints(federation: Federation, rows: Tensor) -> Tensor:
    """Return a hash of the content of samples, (rows,) int64, which their order does not change."""
    x, y = (t[rows][:, None].flatten(1).double() for t in (federation.x, federation.y))
    bits = torch.cat([y, x], 1).view(torch.int64)
    odd = 2 * torch.arange(bits.shape[1]) + 1
    mixed = ((bits ^ (bits >> 31)) * odd * 0x9E3779B1).sum(1)
    mixed = (mixed ^ (mixed >> 29)) * 0xC2B2AE3D
    return mixed ^ (mixed >> 32)


def divided(federation: Federation) -> tuple[list[Federation], np.ndarray]:
    """Return the federations of the trials, one per fold, and the order of their clients."""
    given = bool((federation.val.sizes > 0).all())
    lists: dict[str, list[Tensor]] = {"train": [], "val": []}
    marks = []
    for client in range(federation.num_clients):
        mark = 0
        for times, (name, rows) in enumerate(
            (("train", federation.train), ("val", federation.val))
        ):
            own = rows.of(client)
            keys = prints(federation, own)
            lists[name].append(own[keys.argsort(stable=True)])
            mark += int(keys.sum()) * (2 * times + 1)
        marks.append(mark & (2**62 - 1))
    order = np.argsort(np.array(marks), kind="stable")
    train, val = ([lists[name][i] for i in order] for name in ("train", "val"))
    names = tuple(federation.names[i] for i in order)
    base = replace(federation, names=names, test=Ragged.empty(len(order)))
    if given:
        parts = Ragged.from_lists(train), Ragged.from_lists(val)
        return [replace(base, train=parts[0], val=parts[1])], order
    whole = [torch.cat(pair) for pair in zip(train, val, strict=True)]
    many = 1 if sum(map(len, whole)) > FEW else FOLDS
    found = []
    for fold in range(many):
        held = [torch.arange(len(rows)) % FOLDS == fold for rows in whole]
        held = [mark & (len(mark) > 1) for mark in held]
        pairs = list(zip(whole, held, strict=True))
        found.append(
            replace(
                base,
                train=Ragged.from_lists([rows[~mark] for rows, mark in pairs]),
                val=Ragged.from_lists([rows[mark] for rows, mark in pairs]),
            )
        )
    if not any(len(one.val.rows) for one in found):
        raise ConfigError(
            "auto chooses by held-out samples, and no client has two samples; train alone with "
            "method 'local', or one model with 'fedavg'."
        )
    return [one for one in found if len(one.val.rows)], order


# ---------------------------------------------------------------------- trials


@dataclass
class Trial:
    """A candidate at its best rate."""

    name: str
    rate: float | None
    rounds: int
    sharpness: float
    scores: list[list[Tensor]]  # fold, client -> of its held-out samples, times the sharpness


def local_for(federations: Iterable[Federation], rounds: int) -> Local:
    """Return the local training of every candidate, but for its rate."""
    sizes = torch.cat([federation.train.sizes for federation in federations])
    middle = float(sizes.double().median())
    return Local(
        epochs=max(1, round(A_ROUND / middle)),
        batch=10 if middle < SMALL else 32,
        lr_decay=LEFT ** (1.0 / rounds),
        clip_norm=LONGEST,
    )


def _trials(
    task: Task, folds: Sequence[Federation], seed: int, settings: Settings
) -> tuple[list[Trial], dict[str, str], dict[str, float]]:
    """Train every candidate at every rate; return them at their best one, and the costs."""
    found: list[Trial] = []
    left_out: dict[str, str] = {}
    cost: dict[str, float] = dict.fromkeys(("bytes", "gradients", "forward", "seconds"), 0.0)
    for name in candidates(task):
        try:
            record = methods.build("auto", task, settings.local, {"parts": (name,)})
            rate = f"{slot(name)}_lr"
            rates = RATES if rate in record.hyper else (None,)
            fixed = {"horizon": float(settings.rounds)} if "horizon" in record.hyper else {}
            rows = [fixed if value is None else {**fixed, rate: value} for value in rates]
            simulation = _trial(record, task, folds, rows, seed, settings)
            best = _Best(simulation, folds)
            title = f"auto: trials of {name}"
            drive(simulation, progress=settings.progress, title=title, after_round=best.look)
        except ConfigError as error:
            left_out[name] = str(error)
            continue
        _count(cost, simulation.ledger())
        if best.scores is None:
            left_out[name] = "its loss became NaN or infinite at every rate"
            continue
        found.append(Trial(name, rates[best.row], best.rounds, best.sharpness, best.scores))
    return found, left_out, cost


def _trial(
    record: Method,
    task: Task,
    folds: Sequence[Federation],
    rows: Sequence[dict[str, Any]],
    seed: int,
    settings: Settings,
) -> Simulation:
    """Return the training of one candidate with several values on all folds, in one pass."""
    return Simulation(
        record,
        task,
        [fold for _ in rows for fold in folds],
        [Run(seed=seed, hyper=dict(row), options={}) for row in rows for _ in folds],
        lambda arena: make_engine(settings.engine, arena, settings.chunk, task),
        rounds=settings.rounds,
        participation=settings.participation,
        device=processes.device_for(settings.device),
        dtype=settings.dtype,
        eval_every=max(1, settings.rounds // LOOKS),
        points=(record.use.headline,),
        eval_start=False,
    )


class _Best:
    """The rate, round and sharpness of the lowest mean loss on all held-out samples, so far."""

    def __init__(self, simulation: Simulation, folds: Sequence[Federation]) -> None:
        self.simulation, self.folds = simulation, folds
        self.value, self.row, self.rounds, self.sharpness = math.inf, 0, 0, 1.0
        self.scores: list[list[Tensor]] | None = None
        rows = [[fold.val.of(client) for client in range(fold.num_clients)] for fold in folds]
        self.x = [[self._moved(f.x[r]) for r in own] for f, own in zip(folds, rows, strict=True)]
        self.y = [f.y[r] for f, own in zip(folds, rows, strict=True) for r in own]

    def _moved(self, x: Tensor) -> Tensor:
        x = x.to(self.simulation.context.arena.device)
        return x.to(self.simulation.dtype) if x.is_floating_point() else x

    def look(self) -> None:
        """See whether the round that is done is better."""
        simulation, num = self.simulation, len(self.folds)
        if not simulation.log.scored(simulation.method.use.headline, simulation.round_index):
            return
        lost = [lost is not None for lost in simulation.log.diverged]
        models = simulation.models(simulation.context.everybody)
        for row in range(len(lost) // num):
            if any(lost[row * num : (row + 1) * num]):
                continue
            scores = self._said(models, range(row * num, (row + 1) * num))
            value, sharpness = sharpened(simulation.task.kind, scores, self.y)
            if value < self.value:
                self.value, self.row, self.sharpness = value, row, sharpness
                self.rounds = simulation.round_index
                self.scores = [[(sharpness * s).cpu() for s in fold] for fold in scores]

    def _said(self, models: Any, runs: Iterable[int]) -> list[list[Tensor]]:
        """Return what the models of runs, one for each fold, say of its held-out samples."""
        predict = self.simulation.task.answer(self.simulation.method.use.predict)
        found = []
        with torch.no_grad():
            for run, fold in zip(runs, self.x, strict=True):
                said = [
                    predict(_leaf(models, run, client), x).double() if len(x) else torch.empty(0)
                    for client, x in enumerate(fold)
                ]
                found.append(said)
        return found


def sharpened(
    kind: str, scores: Sequence[Sequence[Tensor]], truth: Sequence[Tensor]
) -> tuple[float, float]:
    """Return the mean loss of scores at their best sharpness, and that.

    Sought is the logarithm u of the sharpness, with a normal prior of deviation 1, between
    −3 and 1.5. A regression has none.

    Args:
        kind: of the task.
        scores: of all held-out samples, in lists of lists.
        truth: their labels, in the order of the lists.
    """
    given = [one for part in scores for one in part]
    pairs = [(s, y.to(s.device)) for s, y in zip(given, truth, strict=True) if len(s)]
    every = torch.cat([s for s, _ in pairs]), torch.cat([y for _, y in pairs])
    num = len(every[0])
    if kind == "regression":
        apart = (every[0].reshape(num, -1) - every[1].reshape(num, -1)).square()
        value = float(0.5 * apart.sum(1).mean())
        return (value if math.isfinite(value) else math.inf), 1.0

    def loss(u: float) -> float:
        log_p, real = _said(kind, math.exp(u) * every[0][None], every[1])
        return float(-torch.where(real, log_p[0], 0.0).sum() / real.shape[-1])

    best = 0.0
    for step, reach in ((0.5, 6), (0.1, 4), (0.02, 4)):
        tried = [best + step * k for k in range(-reach, reach + 1)]
        tried = [u for u in tried if -3.0 <= u <= 1.5]
        best = min(tried, key=lambda u: loss(u) + 0.5 * u * u)
    found = loss(best) / num
    return (found if math.isfinite(found) else math.inf), math.exp(best)


def _count(cost: dict[str, float], ledger: Ledger) -> None:
    for name, counters in (
        ("bytes", ("bytes_up", "bytes_down")),
        ("gradients", ("gradient_evaluations",)),
        ("forward", ("forward_evaluations",)),
    ):
        once = float(np.sum(getattr(ledger, f"setup_{name}")))
        cost[name] += once + sum(float(np.sum(ledger.total(k))) for k in counters)
    cost["seconds"] += ledger.total_seconds


def _leaf(models: Any, run: int, client: int) -> Any:
    if isinstance(models, dict):
        return {k: _leaf(v, run, client) for k, v in models.items()}
    return models[run, client]


def _answers(task: Task, trials: Sequence[Trial], folds: Sequence[Federation]) -> Answers:
    """Put what all candidates say of all held-out samples into one tensor."""
    said: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for client in range(folds[0].num_clients):
        there = [f for f, fold in enumerate(folds) if len(fold.val.of(client))]
        if there:
            y = torch.cat([folds[f].y[folds[f].val.of(client)] for f in there])
            scores = torch.stack([torch.cat([t.scores[f][client] for f in there]) for t in trials])
            said[client] = (*_said(task.kind, scores, y), y.double().reshape(len(y), -1))
    shape = max(len(mask) for _, mask, _ in said.values()), next(iter(said.values()))[1].shape[1]
    found = torch.zeros(folds[0].num_clients, len(trials), *shape, dtype=torch.float64)
    mask, truth = torch.zeros_like(found[:, 0], dtype=torch.bool), torch.zeros_like(found[:, 0])
    for client, (value, real, y) in said.items():
        found[client, :, : len(y)], mask[client, : len(y)] = value, real
        if task.kind == "regression":
            truth[client, : len(y)] = y
    found = found.nan_to_num(nan=-1e3, posinf=1e3, neginf=-1e3)
    if task.kind != "regression":
        return Answers(found, mask)
    answers = Answers(found, mask, truth)
    errors = answers.single().sum((0, 2)) / mask.any(-1).sum()
    return replace(answers, noise=float((2.0 * errors.min()).clamp(min=1e-12)))


def _said(kind: str, scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (candidates, samples, answers) log p of the truth, or predictions, and a mask."""
    if kind == "regression":
        flat = scores.flatten(2) if scores.dim() > 2 else scores[..., None]
        return flat, torch.ones(flat.shape[1:], dtype=torch.bool)
    if kind == "multilabel":
        signed = torch.where(y > 0.5, scores, -scores)
        return torch.nn.functional.logsigmoid(signed), torch.ones_like(y, dtype=torch.bool)
    true = y.reshape(len(y), -1)
    log_p = scores.log_softmax(-1).reshape(*scores.shape[:2], true.shape[1], -1)
    index = true[None, :, :, None].expand(len(scores), -1, -1, 1)
    known = true != PADDING if kind == "next-token" else torch.ones_like(true, dtype=torch.bool)
    return log_p.gather(-1, index)[..., 0], known


# ---------------------------------------------------------------------- the choice


def choose(task: Task, federation: Federation, seed: int, settings: Settings) -> Choice:
    """Train the candidates on a federation and choose.

    Args:
        task: the network.
        federation: the data.
        seed: of the trials.
        settings: of the call of ``fit``; ``rounds`` are the most that a candidate may take.
    """
    folds, order = divided(federation)
    trials, left_out, cost = _trials(task, folds, seed, settings)
    names = [trial.name for trial in trials]
    if "local" not in names:
        raise ConfigError("Every trial of auto diverged; scale the features, or check the labels.")
    answers, home = _answers(task, trials, folds), names.index("local")
    real, single = answers.real, answers.single()
    num = real.sum(1).double()
    rank = torch.arange(real.shape[1]).expand(real.shape)
    crossed = cross_fit(answers, rank)
    rules = {name: float(value.sum() / num.sum()) for name, value in crossed.items()}
    rule = min(rules, key=lambda name: rules[name])
    weights = _weights(answers, single, rule)
    if EXACT in names:
        own = single[:, names.index(EXACT)]
        crossed[EXACT], rules[EXACT] = own, float(own[real].mean())
        ahead, noise = _mean((own - crossed[rule]).flatten()[None], real.flatten()[None])
        if float(ahead) <= SURE * float(noise):
            rule = EXACT
            one = torch.eye(len(names), dtype=torch.float64)[names.index(EXACT)]
            weights = one.repeat(len(weights), 1)
    gain, error = _mean(single[:, home] - crossed[rule], real)
    alone = (num >= 2) & (gain < -error)
    weights[alone] = torch.eye(len(names), dtype=torch.float64)[home]
    before, _ = _mean(single[:, home], real)
    held = torch.stack([num, before, before - gain, error], 1)
    everyone = real.flatten()[None]
    losses, errors = [], []
    for one in single.unbind(1):
        losses.append(float(_mean(one.flatten()[None], everyone)[0]))
        errors.append(float(_mean((one - single[:, home]).flatten()[None], everyone)[1]))
    back = np.argsort(order)
    return Choice(
        names=names,
        rates=[trial.rate for trial in trials],
        rounds=[trial.rounds for trial in trials],
        sharpness=[trial.sharpness for trial in trials],
        losses=list(zip(losses, errors, strict=True)),
        rules=rules,
        rule=rule,
        weights=weights.numpy()[back],
        held=held.numpy()[back],
        alone=alone.numpy()[back],
        cost=cost,
        left_out=left_out,
    )


def _mean(values: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and standard errors (clients,) over the samples that there are."""
    num = real.sum(1).double()
    mean = torch.where(real, values, 0.0).sum(1) / num.clamp(min=1.0)
    square = torch.where(real, values - mean[:, None], 0.0).square().sum(1)
    return mean, (square / (num - 1.0).clamp(min=1.0) / num.clamp(min=1.0)).sqrt()


def _weights(answers: Answers, single: Tensor, rule: str) -> Tensor:
    """Return (clients, candidates) weights by a rule, from all held-out samples."""
    sums = (single * answers.real[:, None]).sum(-1)
    best = sums.sum(0).argmin()
    eye = torch.eye(single.shape[1], dtype=torch.float64)
    if rule == "one":
        return eye[best].repeat(len(sums), 1)
    if rule == "each":
        return eye[torch.where(answers.real.any(1), sums.argmin(1), best)]
    strength = float(rule.removeprefix("stack "))
    weights = answers.fit(answers.pooled(), strength).exp()
    kept = weights.mean(0) >= LEAST
    if not bool(kept.all()):  # what hardly counts for anyone is not worth its training
        part = replace(answers, values=answers.values[:, kept])
        weights = torch.zeros_like(weights)
        weights[:, kept] = part.fit(part.pooled(), strength).exp()
    return weights.clone()
