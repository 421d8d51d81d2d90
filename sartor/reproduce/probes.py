"""What is measured between the rounds, beyond accuracy and loss.

A probe is made for a simulation and its problems, and then called before the first round and after
every evaluated one; it returns one number per run for each of its names, or nothing when there is
nothing to see yet.

| name | gives | meaning |
|---|---|---|
| errors | local_error | mean_i ‖w_i − w_i*‖² of the models that the clients would use |
| | global_error | ‖w_g − mean_i w_i*‖², w_g the global model, else the mean of the clients' |
| optimum | optimum_gap | ‖w_g − w̃_g‖², w̃_g the minimiser of one-stage FedProx' objective |
| | guaranteed_rate | r of Theorem 2, what a round leaves at most; NaN if the steps break (12) |
| | envelope_condition | κ_g = κ(λ+μ)/(λ+L); the rounds are κ_g times a logarithm |
| coherence | coherence | GCE = 1 − det Ĝ of w_i − θ_i: what a client sent minus the model it uses |
| | coherence_log | log det Ĝ per client, which still differs where GCE is 1 to all digits |
| | update_coherence, update_coherence_log | the same of w_g − w_i: the way of a round |
| deviations | global_deviation_c | ΔG_1c of the first client, class c, at the end of training |
| | local_deviation_c | ΔL_1c; see `sartor.analysis.deviations` |
| | global_own, global_missing | mean of ΔG_1c over the classes it has, and has not |
| | local_own, local_missing | mean of ΔL_1c likewise |
| training_loss | training_loss | mean loss on the clients' own training samples, their models |
| | training_loss_global | the same of the global model, else the mean of the clients' |
| common_test | central_accuracy | on the samples of all clients: the global model, else the mean |
| | average_accuracy | the mean of the models that the clients would use |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sartor.analysis import coherence as coherence_of
from sartor.analysis import loss_deviations
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.task import Predictor
from sartor.core.tree import Tree
from sartor.reproduce.derived import smoothness
from sartor.reproduce.problems import Problem
from sartor.reproduce.solutions import stacked
from sartor.theory.exact_fits import fit_coupled
from sartor.theory.proximal import envelope, rate, satisfies
from sartor.training.simulation import Simulation

Probe = Callable[[], dict[str, np.ndarray]]


def errors(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure distances from the true models."""
    if any(problem.truth is None for problem in problems):
        raise ConfigError(
            "The probe 'errors' needs a synthetic problem, whose truth is known; set data = "
            "'logistic-theory', 'logistic-literal' or 'logistic-radius', or leave it out."
        )
    truth = torch.stack([p.truth for p in problems if p.truth is not None])
    truth = truth.to(simulation.context.arena.device, simulation.dtype)
    centre = truth.mean(1)

    def look() -> dict[str, np.ndarray]:
        own = tree.flat(models_now(simulation), 2)
        local = (own - truth).square().sum(-1).mean(1)
        error = (tree.flat(_central(simulation), 1) - centre).square().sum(-1)
        return {"local_error": local.cpu().numpy(), "global_error": error.cpu().numpy()}

    return look


def optimum(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure how far w_g is from where one-stage FedProx leads, beside what the theory promises.

    L is the largest smoothness of the clients' logistic losses plus the ridge ν (``weight_decay``),
    and μ = ν, which holds everywhere.
    """
    steps = simulation.method.phases[0].steps
    goals, rates, conditions = [], [], []
    for problem, run in zip(problems, simulation.runs, strict=True):
        names = ("prox_strength", "local_lr", "server_lr", "weight_decay")
        absent = [name for name in names if name not in run.hyper]
        if absent or not isinstance(steps, int):
            raise ConfigError(
                f"The probe 'optimum' needs one-stage FedProx with a number of steps and "
                f"{', '.join(names)}; missing: {', '.join(absent) or 'steps'}. Take fedprox with "
                'preset = "free", steps and weight_decay > 0.'
            )
        lam, local_lr, server_lr, ridge = (float(run.hyper[n]) for n in names)  # type: ignore[arg-type]
        clients = replace(stacked([problem]), ridge=ridge)
        weights = torch.full(clients.mask.shape[:2], 1.0 / clients.mask.shape[1]).double()
        pull = torch.tensor(lam, dtype=torch.float64)
        goals.append(fit_coupled(clients, weights, pull, tolerance=1e-12).centre[0])
        env = envelope(lam, smoothness(problem) + ridge, ridge)
        fine = satisfies(steps, local_lr, server_lr, env)
        rates.append(rate(server_lr, env) if fine else np.nan)
        conditions.append(env.condition)
    goal = torch.stack(goals).to(simulation.context.arena.device, simulation.dtype)

    def look() -> dict[str, np.ndarray]:
        gap = (tree.flat(_central(simulation), 1) - goal).square().sum(-1)
        return {
            "optimum_gap": gap.cpu().numpy(),
            "guaranteed_rate": np.array(rates),
            "envelope_condition": np.array(conditions),
        }

    return look


def training_loss(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure mean_i L_i(w_i) and mean_i L_i(w_g) on the training samples."""
    clients = simulation.clients
    sizes = simulation.context.arena.splits["train"].size

    def look() -> dict[str, np.ndarray]:
        t, (server, store) = simulation.round_index, simulation.deployed()
        own = clients.evaluate(server, store, t, ("train",))[0]["train"]
        common = clients.evaluate_common(_central(simulation), t, ("train",))["train"]
        return {
            "training_loss": (own.loss / sizes).mean(1),
            "training_loss_global": (common.loss / sizes).mean(1),
        }

    return look


def common_test(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure what one model for all answers on the test samples of all clients."""
    clients = simulation.clients
    split = simulation.context.arena.splits["val"]
    if not split.size.any() or (split.start != split.start[:, :1]).any():
        raise ConfigError(
            "The probe 'common_test' needs samples of all clients; set everyone = 2000."
        )

    def accuracy(models: Tree) -> np.ndarray:
        tally = clients.evaluate_common(models, simulation.round_index, ("val",), clients=1)["val"]
        return tally.correct[:, 0] / split.size[:, 0]

    def look() -> dict[str, np.ndarray]:
        average = _average(simulation)
        central = average if simulation.method.use.centre is None else _central(simulation)
        return {"central_accuracy": accuracy(central), "average_accuracy": accuracy(average)}

    return look


def coherence(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure how alike the clients' envelope gradients are.

    With a proximal solve around w the gradient of the envelope is λ(w_i − θ_i), up to a positive
    factor the difference between what the client sends and the model that it uses. Summed over the
    steps of a round it is the way w_g − w_i of the client. Lengths do not matter, directions do.
    """
    sent: dict[str, Tensor] = {}

    def watch(uploads: Tree, cohort: np.ndarray, trains: np.ndarray) -> None:
        if "params" not in uploads:
            raise ConfigError(
                f"The probe 'coherence' needs uploaded models, and {simulation.method.name} "
                "sends none; leave it out."
            )
        local = tree.flat(uploads["params"], 2)
        if not sent:
            shape = (*simulation.context.everybody.shape, local.shape[-1])
            sent["local"], sent["way"] = local.new_zeros(shape), local.new_zeros(shape)
        start = tree.flat(_central(simulation), 1)
        for run, (ids, there) in enumerate(zip(cohort, trains, strict=True)):
            rows = torch.from_numpy(ids[there]).to(local.device)
            fresh = local[run, torch.from_numpy(there).to(local.device)]
            sent["local"][run, rows], sent["way"][run, rows] = fresh, start[run] - fresh

    simulation.rounds.watch = watch

    def look() -> dict[str, np.ndarray]:
        if not sent:
            return {}
        gaps = sent["local"] - tree.flat(models_now(simulation), 2)
        return {**_alike("coherence", gaps), **_alike("update_coherence", sent["way"])}

    return look


def _alike(name: str, vectors: Tensor) -> dict[str, np.ndarray]:
    finite = vectors.isfinite().flatten(1).all(1).tolist()
    found = [coherence_of(own) if fine else None for own, fine in zip(vectors, finite, strict=True)]
    return {
        name: np.array([np.nan if c is None else c.value for c in found]),
        f"{name}_log": np.array(
            [np.nan if c is None else c.log_determinant_per_vector for c in found]
        ),
    }


def deviations(simulation: Simulation, problems: Sequence[Problem]) -> Probe:
    """Measure, after the last round, how the first client's losses per class differ from all's."""

    def look() -> dict[str, np.ndarray]:
        if simulation.round_index < simulation.num_rounds:
            return {}
        models = tree.map(lambda leaf: leaf.detach(), models_now(simulation))
        rows = [_of_first(simulation, models, run, p) for run, p in enumerate(problems)]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    return look


def _of_first(simulation: Simulation, models: Tree, run: int, problem: Problem) -> dict[str, float]:
    task, predict = simulation.task, simulation.method.use.predict
    answer, networks = task.answer(predict), []
    for client in range(problem.federation.num_clients):
        params = tree.map(lambda leaf, k=client: leaf[run, k].clone(), models)
        network = task.with_params(params) if predict is None else Predictor(params, answer)
        networks.append(network.to(simulation.context.arena.device))
    found = loss_deviations(networks, problem.federation, criterion=task.criterion)
    has = found.counts[0] > 0
    numbers: dict[str, float] = {}
    for name, values in (("global", found.pooled[0]), ("local", found.local[0])):
        numbers |= {f"{name}_deviation_{c}": float(v) for c, v in enumerate(values)}
        numbers[f"{name}_own"] = float(values[has].mean()) if has.any() else np.nan
        numbers[f"{name}_missing"] = float(values[~has].mean()) if (~has).any() else np.nan
    return numbers


def _average(simulation: Simulation) -> Tree:
    """Return the mean of the clients' models, (runs, ...)."""
    return tree.map(lambda leaf: leaf.mean(1), models_now(simulation))


def _central(simulation: Simulation) -> Tree:
    """Return the global model, or the mean of the clients' where there is none, (runs, ...)."""
    if simulation.method.use.centre is None:
        return _average(simulation)
    return simulation.context.centre(simulation.deployed()[0], simulation.round_index)


def models_now(simulation: Simulation) -> Tree:
    """Return what all clients would use now, (runs, clients, ...)."""
    return simulation.models(simulation.context.everybody, simulation.method.use.headline)


PROBES: dict[str, Callable[[Simulation, Sequence[Problem]], Probe]] = {
    probe.__name__: probe
    for probe in (errors, optimum, training_loss, common_test, coherence, deviations)
}
