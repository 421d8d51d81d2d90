"""Clients that join after training: the server stays as it is, and they get models by its rule.

A newcomer receives the letters that the trained server would send (its own one by the method's
``greet``), starts its kept state from the global model where there is one (else from the common
initial model), and takes some rounds of the method's own local work. Nothing is uploaded, and
nobody else's model changes. It is numbered after the clients that were there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sartor import tree, wire
from sartor.cohort import Participation
from sartor.compose import fine_tuned
from sartor.data.federation import Federation
from sartor.errors import ConfigError
from sartor.local import Local
from sartor.method import Hub, Method, Phase, Site, endings, has_own_letters, newcomer
from sartor.result import Result
from sartor.scores import Run
from sartor.simulation import Simulation
from sartor.tree import Tree

Data = Federation | tuple[Any, Any]
VAL = 0.2
"""The share of a newcomer's samples that is held out where its method decides by such."""


def onboard(
    simulation: Simulation,
    newcomers: Data,
    *,
    rounds: int = 5,
    finetune_epochs: int = 0,
    run: int = 0,
    test: float = 0.25,
) -> Result:
    """Give newcomers their models.

    Args:
        simulation: a trained federation.
        newcomers: their data: a federation, or the pair (x, y) of one client.
        rounds: rounds of the method's local work on the newcomers; 0 takes what the server sends.
        finetune_epochs: passes of plain fine-tuning after that; the way for methods that would give
            every client the same model.
        run: whose server, in a sweep.
        test: the share held out for testing, if ``newcomers`` is a pair.

    Returns:
        a Result whose clients are the newcomers: models, and scores on their test samples.
    """
    record = newcomer_record(simulation, run)
    federation = _federation(
        newcomers, test, simulation.federations[run], _needs_validation(record)
    )
    if finetune_epochs:
        record = fine_tuned(record, simulation.task, Local(), epochs=finetune_epochs)
    if not rounds:
        record = replace(record, headline="pre")
    chosen = simulation.runs[run]
    hyper: dict[str, float | list[float]] = {k: float(np.mean(v)) for k, v in chosen.hyper.items()}
    if finetune_epochs:
        hyper.setdefault("ft_lr", hyper.get("local_lr", record.hyper["ft_lr"].default))
    again = Simulation(
        record,
        simulation.task,
        [federation],
        [Run(seed=chosen.seed, hyper=hyper, options=chosen.options)],
        simulation.make_engine,
        rounds=rounds,
        participation=Participation(),
        device=simulation.rounds.arena.device,
        dtype=simulation.dtype,
        points=tuple(dict.fromkeys(("pre", record.headline))),
    )
    if not rounds:
        again.score_start()
    while not again.finished:
        again.step()
    return again.result({"newcomers of": simulation.method.name, "rounds": rounds})


def _needs_validation(record: Method) -> bool:
    phases = [p for r in (record, *endings(record)) for p in (*r.phases, *r.adapt)]
    return any(phase.data == "val" for phase in phases)


def _federation(newcomers: Data, test: float, known: Federation, validate: bool) -> Federation:
    """Return the newcomers as a federation whose samples look like those that trained."""
    if not isinstance(newcomers, Federation):
        x, y = newcomers
        names = np.full(len(y), "newcomer")
        val = VAL if validate else 0.0
        newcomers = Federation.from_arrays(x, y, client=names, test=test, val=val)
    faults = []
    if newcomers.input_shape != known.input_shape:
        faults.append(
            f"samples of newcomers have the shape {tuple(newcomers.input_shape)}, but the models "
            f"were trained on {tuple(known.input_shape)}."
        )
    if newcomers.num_classes > known.num_classes:
        faults.append(
            f"newcomers have {newcomers.num_classes} classes, but the models know "
            f"{known.num_classes}; leave out what they cannot answer."
        )
    if faults:
        raise ConfigError("\n".join(faults))
    return newcomers


def newcomer_record(simulation: Simulation, run: int = 0) -> Method:
    """Return the method as newcomers meet it: a server that only answers."""
    method = simulation.method
    server, _ = simulation.deployed()
    server = tree.map(lambda leaf: leaf[run], server)
    num = simulation.rounds.arena.num_clients
    past = simulation.round_index
    everybody = simulation.rounds.everybody
    hub = simulation.rounds.hub("evaluate", past, everybody, np.ones_like(everybody, dtype=bool))
    hub = Hub(*(tree.map(lambda leaf: leaf[run], part) for part in hub))
    if has_own_letters(method) and method.greet is None:
        raise ConfigError(
            f"{method.name} has no rule for a client that joins after training; train again with "
            "it, or give it a model of its own with sartor.fit('local', ...)."
        )
    common = method.broadcast(server, hub)
    own = method.greet(server, hub) if method.greet is not None else {}

    def init_client(params: Tree, site: Site) -> Tree:
        return newcomer(method, params, _later(site, num, past), server, hub)

    return as_newcomer(
        method,
        num,
        past,
        init_server=lambda params, hub: server,
        init_client=init_client,
        broadcast=lambda server, hub: common,
        address=lambda server, index, hub: own,
        aggregate=lambda server, uploads, hub: server,
        private=lambda leaf: False,
    )


def as_newcomer(method: Method, num: int, past: int, **answers: Any) -> Method:
    """Return the method with the clients' part as a newcomer runs it; it uploads nothing.

    Args:
        method: the method.
        num: how many clients were there before.
        past: how many rounds they trained.
        **answers: what a server does that only answers, in place of the method's own functions.
    """

    def seen(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: fn(*args[:-1], _later(args[-1], num, past))

    def phases(given: Sequence[Phase]) -> tuple[Phase, ...]:
        return tuple(
            replace(
                p,
                step=seen(p.step),
                enter=seen(p.enter),
                leave=seen(p.leave),
                steps=seen(p.steps) if callable(p.steps) else p.steps,
                when=seen(p.when) if p.when is not None else None,
                stop=seen(p.stop) if p.stop is not None else None,
            )
            for p in given
        )

    def finish(given: Method) -> Callable[[Tree, Tree, Site], tuple[Tree, Tree]]:
        return lambda client, work, site: (
            given.finish(client, work, _later(site, num, past))[0],
            {},
        )

    def meets(given: Method) -> Method:
        look = given.inspect_client
        changed = replace(
            given,
            begin=seen(given.begin),
            phases=phases(given.phases),
            finish=finish(given),
            model=seen(given.model),
            adapt=phases(given.adapt),
            centre=None,
            inspect=None,
            inspect_client=None if look is None else seen(look),
            join=None,
            connected=None,
            sparse=wire.letters_of(given.sparse),
            everyone=True,
            train_all=False,
            one_by_one=False,
            prologue=None,
            epilogue=None if given.epilogue is None else meets(given.epilogue),
            warmup=None,
        )
        return replace(changed, **answers)

    return meets(method)


def _later(site: Site, num: int, past: int) -> Site:
    """Number a newcomer after the known clients, and go on counting rounds."""
    return site._replace(index=site.index + num, round=site.round + past)
