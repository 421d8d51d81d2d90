"""Clients that join after training: the server stays as it is, and they get models by its rule.

A newcomer receives the messages that the trained server would send (its own one is the method's
newcomer message), starts its kept state from the global model where there is one (else from the
common initial model), and takes some rounds of the method's own local work. Nothing is uploaded,
and no other model changes. Newcomers are numbered after the clients that trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sartor.compose import fine_tuned
from sartor.compose.fields import viewed
from sartor.core import tree, wire
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, refuse
from sartor.core.local import Local
from sartor.core.method import (
    ClientContext,
    Method,
    ServerContext,
    changed,
    has_own_messages,
    newcomer_state,
)
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.data.encoding import prepare
from sartor.data.federation import Federation
from sartor.engines import make_engine
from sartor.methods import build
from sartor.results.result import Result
from sartor.results.scores import Run
from sartor.results.serving import record_of
from sartor.runs import save_result
from sartor.training.driver import drive
from sartor.training.simulation import Simulation, phases_on

Data = Federation | tuple[Any, Any]
VAL = 0.2
"""The share of a newcomer's samples that is held out where its method decides by such."""


class Trained(NamedTuple):
    """What newcomers meet: one run of a trained federation, without the data of its clients."""

    method: Method
    task: Task
    server: Tree
    server_ctx: ServerContext  # at the end of training
    num_clients: int
    past: int  # rounds that were trained
    run: Run
    make_engine: Callable[..., Any]
    device: torch.device
    dtype: torch.dtype
    facts: dict[str, Any]  # input_shape, num_classes, tokens and class_names of the data
    recipe: Any  # how samples become features, or None


def onboard(
    source: Simulation | Trained,
    newcomers: Data,
    *,
    rounds: int = 5,
    finetune_epochs: int = 0,
    run: int = 0,
    test: float = 0.25,
    origin: Mapping[str, Any] | None = None,
) -> Result:
    """Give newcomers their models.

    Args:
        source: a trained federation, or what one left for newcomers.
        newcomers: their data: a federation, or the pair (x, y) of one client.
        rounds: rounds of the method's local work on the newcomers; 0 takes what the server sends.
        finetune_epochs: passes of plain fine-tuning after that; the way for methods that would give
            every client the same model.
        run: whose server, in a sweep.
        test: the share held out for testing, if ``newcomers`` is a pair.
        origin: settings of the result that trained: with them newcomers train alone when their gain
            is asked for, and their models can be used from a folder.

    Returns:
        a Result whose clients are the newcomers: models, and scores on their test samples.
    """
    known = source if isinstance(source, Trained) else trained(source, run)
    record = record_for(known)
    federation = _federation(newcomers, test, known, VAL if phases_on("val", record) else 0.0)
    if finetune_epochs:
        record = fine_tuned(record, known.task, Local(), epochs=finetune_epochs)
    if not rounds:
        record = changed(record, headline="pre")
    chosen = known.run
    hyper: dict[str, float | list[float]] = {k: float(np.mean(v)) for k, v in chosen.hyper.items()}
    if finetune_epochs:
        hyper.setdefault("ft_lr", hyper.get("local_lr", record.hyper["ft_lr"].default))
    again = Simulation(
        record,
        known.task,
        [federation],
        [Run(seed=chosen.seed, hyper=hyper, options=chosen.options)],
        known.make_engine,
        rounds=rounds,
        participation=Participation(),
        device=known.device,
        dtype=known.dtype,
        points=tuple(dict.fromkeys(("pre", record.use.headline))),
        measure=(origin or {}).get("measure"),
    )
    drive(again)
    # Newcomers are prepared like the clients that trained.
    recipes = {} if known.recipe is None else {str(chosen.seed): known.recipe}
    settings = dict(origin or {})
    facts = settings.get("rebuild", {}) | known.facts | {"preprocessing": recipes}
    kept = ("method", "local", "model", "dtype", "measure")
    config = {k: settings[k] for k in kept if k in settings} | {"rebuild": facts}
    config |= {"newcomers of": known.method.name, "rounds": rounds, "task": known.task.measured_as}
    config["data"] = federation.describe()
    if "local" not in settings or known.method.name == "local":
        return result_of(again, config)
    return result_of(again, config, lambda: _alone(known, federation, config))


def _alone(known: Trained, federation: Federation, config: Mapping[str, Any]) -> Result:
    """Train each newcomer alone, for as many rounds as the others trained."""
    record = build("local", known.task, Local(**config["local"]), {})
    rounds = max(known.past, 1)
    chosen = {k: float(np.mean(v)) for k, v in known.run.hyper.items() if k in record.hyper}
    single = Simulation(
        record,
        known.task,
        [federation],
        [Run(seed=known.run.seed, hyper=dict(chosen))],
        known.make_engine,
        rounds=rounds,
        participation=Participation(),
        device=known.device,
        dtype=known.dtype,
        eval_every=rounds,
        points=tuple(dict.fromkeys(("pre", record.use.headline))),
        measure=config.get("measure"),
    )
    drive(single)
    facts = {**config["rebuild"], "method": "local", "own_predict": False}
    return result_of(single, {**config, "method": "local", "rounds": rounds, "rebuild": facts})


def result_of(
    simulation: Simulation,
    config: Mapping[str, Any],
    baseline: Callable[[], Result] | None = None,
) -> Result:
    """Return everything that was measured, with the models and a way in for newcomers.

    ``baseline`` trains LocalTrain on the same allocations, when asked.
    """

    def newcomers(data: Any, **settings: Any) -> Result:
        return onboard(simulation, data, origin=config, **settings)

    def server(run: int) -> tuple[Tree, dict[str, Any]]:
        return stored_form(trained(simulation, run))

    method, log = simulation.method, simulation.log
    chosen = any("choice" in snap for snap in log.snapshots)
    return Result(
        method=method.name,
        headline=method.use.headline,
        runs=simulation.runs,
        clients=simulation.federations[0].names,
        scores=simulation.scores(),
        ledger=simulation.ledger(),
        label_counts=simulation.label_counts(),
        diverged=log.diverged,
        stopped=log.stopped,
        snapshots=log.snapshots,
        choices=method.show.names if chosen else (),
        config=config,
        models=simulation.network,
        baseline=baseline,
        newcomers=newcomers,
        server=server,
        writer=save_result,
    )


def trained(simulation: Simulation, run: int = 0) -> Trained:
    """Take from a simulation what newcomers meet."""
    server, _ = simulation.deployed()
    everybody, past = simulation.context.everybody, simulation.round_index
    server_ctx = simulation.context.server_ctx("evaluate", past, everybody)
    return Trained(
        simulation.method,
        simulation.task,
        tree.map(lambda leaf: leaf[run], server),
        ServerContext(*(tree.map(lambda leaf: leaf[run], part) for part in server_ctx)),
        simulation.context.arena.num_clients,
        past,
        simulation.runs[run],
        simulation.make_engine,
        simulation.context.arena.device,
        simulation.dtype,
        *_data_facts(simulation.federations[run]),
    )


def _data_facts(known: Any) -> tuple[dict[str, Any], Any]:
    """Return what newcomers' data must fit; nothing where the data is elsewhere."""
    if not isinstance(known, Federation):
        return {}, None
    facts = {
        "input_shape": known.input_shape,
        "num_classes": known.num_classes,
        "tokens": not known.x.is_floating_point(),
        "class_names": known.info.get("class_names", []),
    }
    return facts, known.info.get("preprocessing")


def stored_form(found: Trained) -> tuple[Tree, dict[str, Any]]:
    """Return the state of the server as a tree of tensors, and what goes with it as JSON."""
    state = {"server": found.server, "hub": found.server_ctx._asdict()}
    return state, {"clients": found.num_clients, "past": found.past}


def restored(result: Result, task: Task, run: int, state: Tree, facts: dict[str, Any]) -> Trained:
    """Return what newcomers meet from what :func:`stored_form` wrote and a result's settings."""
    about = dict(result.config["rebuild"])
    return Trained(
        record_of(result, task, run),
        task,
        state["server"],
        ServerContext(**state["hub"]),
        int(facts["clients"]),
        int(facts["past"]),
        result.runs[run],
        lambda arena: make_engine("auto", arena, None, task),
        torch.device("cpu"),
        getattr(torch, str(result.config["dtype"])),
        about | {"input_shape": tuple(about["input_shape"])},
        result.recipe(run),
    )


def _federation(newcomers: Data, test: float, known: Trained, val: float) -> Federation:
    """Return the newcomers as a federation whose samples look like those that trained."""
    shape, classes = tuple(known.facts["input_shape"]), int(known.facts["num_classes"])
    faults = []
    if not isinstance(newcomers, Federation):
        x, y = newcomers
        x, y = prepare(x, known.recipe), _numbered(y, known.facts["class_names"])
        kind = known.task.kind
        if kind == "regression" and "target" in (known.recipe or {}):
            step = known.recipe["target"]
            y = (np.asarray(y, dtype=np.float64) - step["mean"]) / step["scale"]
        newcomers = Federation.from_arrays(
            x,
            y,
            client=np.full(len(y), "newcomer"),
            test=test,
            val=val,
            task=kind,
            tokens=bool(known.facts["tokens"]),
            num_classes=classes if kind == "next-token" else None,
        )
    elif known.recipe is not None and newcomers.info.get("preprocessing") != known.recipe:
        faults.append(
            "newcomers were prepared with other constants than the clients that trained; give the "
            "table itself and the labels, onboard((x, y)), or make the newcomers' federation with "
            "like=federation.info, so that they are prepared alike."
        )
    if newcomers.input_shape != shape:
        faults.append(
            f"samples of newcomers have the shape {tuple(newcomers.input_shape)}, but the models "
            f"were trained on {shape}; give the features that the others have."
        )
    if newcomers.num_classes > classes:
        faults.append(
            f"newcomers have {newcomers.num_classes} classes, but the models know "
            f"{classes}; leave out what they cannot answer."
        )
    refuse(faults)
    return newcomers


def _numbered(y: Any, names: Sequence[str]) -> Any:
    """Number classes that are given by name as the clients that trained do."""
    if not names or np.asarray(y).dtype.kind not in "OUS":
        return y
    labels = [str(label) for label in np.asarray(y).tolist()]
    if strange := sorted(set(labels) - set(names)):
        raise ConfigError(
            f"newcomers have the classes {', '.join(strange[:5])}, but the models know "
            f"{', '.join(names[:10])}; leave out what they cannot answer."
        )
    place = {name: number for number, name in enumerate(names)}
    return np.array([place[label] for label in labels], dtype=np.int64)


def newcomer_record(simulation: Simulation, run: int = 0) -> Method:
    """Return the method of a simulation as newcomers meet it; see :func:`record_for`."""
    return record_for(trained(simulation, run))


def record_for(known: Trained) -> Method:
    """Return the method as newcomers meet it: a server that only answers."""
    method, server, server_ctx = known.method, known.server, known.server_ctx
    num, past = known.num_clients, known.past
    if has_own_messages(method) and method.newcomer.message is None:
        raise ConfigError(
            f"{method.name} has no rule for a client that joins after training; train again with "
            "it, or give it a model of its own with sartor.fit('local', ...)."
        )
    common = method.broadcast(server, server_ctx)
    own = method.newcomer.message(server, server_ctx) if method.newcomer.message is not None else {}

    def init_client(params: Tree, ctx: ClientContext) -> Tree:
        return newcomer_state(method, params, _later(ctx, num, past), server, server_ctx)

    return as_newcomer(
        method,
        num,
        past,
        init_server=lambda params, server_ctx: server,
        init_client=init_client,
        broadcast=lambda server, server_ctx: common,
        address=lambda server, index, server_ctx: own,
        aggregate=lambda server, uploads, server_ctx: server,
        private=lambda leaf: False,
    )


def as_newcomer(method: Method, num: int, past: int, **answers: Any) -> Method:
    """Return the method with the clients' part as a newcomer runs it; it uploads nothing.

    ``num`` clients trained ``past`` rounds before. ``answers`` is what a server does that only
    answers, in place of the method's own functions.
    """
    later = viewed(method, lambda ctx: _later(ctx, num, past), lambda server_ctx: server_ctx)
    after = method.schedule.after
    met = changed(
        later,
        init_client=method.init_client,
        finish=lambda client, work, ctx: (later.finish(client, work, ctx)[0], {}),
        centre=None,
        server=None,
        state=None,
        connected=None,
        sparse=wire.messages_of(method.wire.sparse),
        who="everyone",
        in_turn=False,
        before=None,
        after=None if after is None else as_newcomer(after, num, past, **answers),
        first=None,
    )
    return changed(met, **answers)


def _later(ctx: ClientContext, num: int, past: int) -> ClientContext:
    """Number a newcomer after the known clients, and count rounds after theirs.

    The learning rate stays that of the last round of training.
    """
    last = torch.full_like(ctx.rate_round, max(past - 1, 0))
    return ctx._replace(index=ctx.index + num, round=ctx.round + past, rate_round=last)
