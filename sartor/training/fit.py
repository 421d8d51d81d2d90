"""Train one method: from its name and a federation to a result.

A grid of hyper-parameters × seeds trains as lanes of one pass; static options make separate passes.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from sartor import methods
from sartor.core.cohort import Participation
from sartor.core.errors import ConfigError, DivergedError, FederationError, RunFolderError
from sartor.core.hyper import Value, stack_hypers
from sartor.core.local import Local
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.engines import client_work, make_engine
from sartor.engines.shard import processes
from sartor.results.joined import join
from sartor.results.result import Result
from sartor.runs import ComparisonFolder, RunFolder
from sartor.training import auto, open_ended
from sartor.training.callbacks import Listeners
from sartor.training.driver import drive
from sartor.training.misplaced import guided, refuse_misplaced
from sartor.training.networks import say_of_network
from sartor.training.onboarding import result_of, stored_form, trained
from sartor.training.progress import Progress
from sartor.training.schema import documented, settings_on
from sartor.training.settings import (
    Federations,
    Settings,
    Sweep,
    balanced_weights,
    checked_rows,
    federation_of,
    federations_of,
    list_runs,
    make_task,
    resolved,
    rows_of,
    warn_of_lost_weights,
    weights_of,
    with_held_out,
    with_static_parts,
)
from sartor.training.simulation import Simulation
from sartor.training.stopping import EarlyStopping

WIDE = 5.0
"""The deviation of targets above which a rate for standardised ones is likely to diverge."""

K = TypeVar("K", RunFolder, ComparisonFolder)


@guided
@documented
def fit(  # noqa: D417  (the decorator adds the other arguments)
    method: str | methods.Factory,
    federation: Federations,
    *,
    model: nn.Module | None = None,
    rounds: int | None = None,
    seeds: Sequence[int] | int = (0,),
    hyper: Mapping[str, Value] | None = None,
    sweep: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Value]] | None = None,
    options: Mapping[str, Any] | None = None,
    local: Local | None = None,
    participation: Participation | str | float = 1.0,
    do_no_harm: bool = False,
    class_weights: str | Sequence[float] | None = None,
    engine: str = "auto",
    chunk: int | None = None,
    device: str | torch.device = "auto",
    dtype: str = "float32",
    compute: str | None = None,
    store: str = "memory",
    eval_every: int = 1,
    points: Sequence[str] = ("pre", "post"),
    out: str | Path | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    reopen: bool = False,
    progress: Progress | bool | None = None,
    callbacks: Sequence[Any] = (),
    early_stopping: EarlyStopping | int | None = None,
    measure: str | None = None,
) -> Result:
    """Train a model for every client of a federation.

    Args:
        method: a name of ``sartor.methods.METHODS``, or a factory of your own.
        federation: the data; or one federation per seed; or a function from seed to federation.
        model: a network with the name of its head in an attribute ``head``; chosen from the data if
            None.
        rounds: communication rounds, exactly so many; if None, until the validation loss stops
            falling, with the models of the best evaluation. See ``sartor.training.open_ended``.
        seeds: one run per seed (and per value of the sweep); a single number is one seed.
        hyper: values of sweepable hyper-parameters: one number, or one number per client.
        sweep: name -> values. All combinations × all seeds train as lanes of one pass; the values
            of static options are allowed too, and make separate passes. Or a list of rows, each a
            dict of hyper-parameters, which are the combinations to train.
        options: static options of the method.
        local: local training: epochs or steps, batch, rate, momentum.
        participation: 1.0 (all), a fraction, a number of clients, or "at_least:0.6".
        do_no_harm: let every client end with the best of {trained alone, FedAvg's model, the
            method's model} by its held-out loss, staying alone unless another is better by
            ``harm_margin`` standard errors (a hyper-parameter, 1 by default). The same as the
            option of that name; see ``sartor.compose.harm`` for what it costs.
        class_weights: "balanced", or a number for every class: how much their losses count in
            training. See ``sartor.compose.weighting``.

    Other Args:
        engine: and more, for rare needs; ``help(sartor.fit)`` lists them all.

    Returns:
        a Result: accuracy, gain over LocalTrain, costs and models.

    Raises:
        ConfigError: for anything that cannot be right, all faults at once.
        DivergedError: if the only run became NaN; in a sweep that is recorded in its row instead.

    >>> import sartor
    >>> fed = sartor.Federation.from_dataset("digits", clients=5)
    >>> result = sartor.fit("fedavg", fed, rounds=2)
    >>> len(result.per_client().rows)
    5
    """
    settings = Settings.read(locals())
    if method == "auto":
        auto.refuse_settings(
            local, hyper, sweep, options, settings, do_no_harm, class_weights is not None
        )
        return _fit_auto(federation, settings, out, resume, reopen)
    factory = methods.find(method)
    static = methods.static_options(factory)
    refuse_misplaced(method, hyper, sweep, options)
    if class_weights is not None:
        options = {**(options or {}), "class_weights": weights_of(class_weights)}
    if do_no_harm:
        options = {**(options or {}), "do_no_harm": True}
    rows = None if sweep is None or isinstance(sweep, Mapping) else checked_rows(sweep, static)
    grid = {**sweep} if isinstance(sweep, Mapping) else {}
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"sweep[{name!r}] must be a list of values, got {values!r}.")
    outer = {k: v for k, v in grid.items() if k in static}
    inner: Sweep = rows or {k: v for k, v in grid.items() if k not in static}
    results = []
    combinations = list(itertools.product(*outer.values()))
    if out and len(combinations) > 1 and not resume and (Path(out) / "folder.json").exists():
        raise RunFolderError(f"{out} already holds a run; choose another folder, or resume it.")
    for number, values in enumerate(combinations):
        chosen = {**(options or {}), **dict(zip(outer, values, strict=True))}
        part = Path(out) / f"part-{number}" if out and len(combinations) > 1 else out
        results.append(
            _fit_lanes(
                method, federation, settings, chosen, hyper or {}, inner, part, resume, reopen
            )
        )
    if len(results) == 1:
        return results[0]
    merged = join(results)
    if out and processes.is_first():
        save_or_warn(
            lambda: RunFolder.create(out, merged.config, overwrite=resume).write_result(merged),
            Path(out),
        )
    return merged


def _fit_auto(
    federation: Federations,
    settings: Settings,
    out: str | Path | None,
    resume: bool,
    reopen: bool,
) -> Result:
    """Choose by trials what `auto` consists of, and train that on all samples."""
    if settings.open_ended:  # its trials choose the rounds, up to that
        settings = replace(settings, rounds=open_ended.FIXED, open_ended=False, early_stopping=None)
    federations = {seed: federation_of(federation, settings.seeds, seed) for seed in settings.seeds}
    there = out is not None and (Path(out) / "folder.json").exists()
    if there and not resume:
        raise RunFolderError(f"{out} already holds a run; choose another folder, or resume it.")
    found = RunFolder.open(str(out)).config.get("selection") if there else None
    if found is None:
        found = auto.select(
            federations,
            settings,
            lambda one: make_task(settings.model, one, settings.compute, settings.measure),
        )
    local = Local(**found["local"])
    settings = replace(settings, rounds=found["rounds"], local=local, points=("pre",))
    settings = replace(settings, eval_every=max(settings.eval_every, found["rounds"] // auto.LOOKS))

    def alone() -> Result:
        quiet = replace(settings, progress=None, callbacks=())
        own = {"parts": ("local",)}
        result = _fit_lanes(
            "auto",
            federations.__getitem__,
            quiet,
            own,
            {},
            {},
            None,
            False,
            selection=found,
            trials=False,
        )
        result.method = "local"
        return result

    parts = {"parts": tuple(found["parts"])}
    return _fit_lanes(
        "auto",
        federations.__getitem__,
        settings,
        parts,
        {},
        {},
        out,
        resume,
        reopen,
        selection=found,
        baseline=alone,
    )


def _fit_lanes(
    method: str | methods.Factory,
    federation: Federations,
    settings: Settings,
    options: dict[str, Any],
    hyper: Mapping[str, Value],
    sweep: Sweep,
    out: str | Path | None,
    resume: bool,
    reopen: bool = False,
    *,
    selection: dict[str, Any] | None = None,
    trials: bool = True,
    baseline: Callable[[], Result] | None = None,
) -> Result:
    """Train all runs of one program in one pass.

    ``selection`` is what ``auto.select`` found, and ``trials`` whether their cost is this result's;
    ``baseline`` trains LocalTrain, if not as always.
    """
    federations = federations_of(federation, settings)
    for seed, fed in federations.items():
        if not len(fed.test.rows):
            raise FederationError(
                f"The federation of seed {seed} has no test samples, so no model could be scored; "
                "hold some out, for example with Federation.from_arrays(..., test=0.25)."
            )
    local = with_static_parts(settings.local, hyper, sweep)
    task = make_task(
        settings.model, federations[settings.seeds[0]], settings.compute, settings.measure
    )
    warn_of_lost_weights(settings.model)
    say_of_network(task, local, [*federations.values()], settings.engine)
    options = with_held_out(
        method, task, local, options, list(federations.values()), settings.measure
    )
    record = methods.build(method, task, local, options)
    points = tuple(dict.fromkeys((*settings.points, record.use.headline)))
    if options.get("do_no_harm"):  # the choice follows the last round: there is no "post" model
        points = tuple(point for point in points if point != "post")
    runs = list_runs(record, options, hyper, sweep, settings.seeds)
    if options.get("class_weights") == "balanced":
        given = {*hyper, *(name for row in rows_of(sweep) for name in row)}
        for run in runs:
            own = balanced_weights(federations[run.seed])
            for name in own.keys() - given:
                run.hyper[name] = own[name]
    config = resolved(method, record, settings, local, task, options, hyper, sweep, federations)
    if selection is not None:
        for run in runs:
            run.hyper.update(auto.hyper_of(selection, options["parts"], run.seed))
        config["selection"] = selection
    # Everything that can be refused is refused before a folder is made.
    clients = federations[runs[0].seed].num_clients
    stack_hypers(record.hyper, [run.hyper for run in runs], clients, torch.float64)
    folder, checkpoint = _open(out, config, resume)
    if folder is not None and resume and not reopen and processes.first(lambda: folder.has_result):
        return folder.read_result()
    finished = folder is not None and folder.has_result
    where = _scratch(folder) if settings.store == "mapped" else None
    simulation = Simulation(
        record,
        task,
        [federations[run.seed] for run in runs],
        runs,
        lambda arena: make_engine(settings.engine, arena, settings.chunk, task),
        rounds=settings.rounds,
        participation=settings.participation,
        device=processes.device_for(settings.device),
        dtype=settings.dtype,
        eval_every=settings.eval_every,
        points=points,
        store_folder=where,
        clients=client_work(processes.current()),
        stopping=settings.early_stopping,
        measure=settings.measure,
    )
    if where is not None:  # mapped states live as long as models can be asked for
        weakref.finalize(simulation, shutil.rmtree, where, ignore_errors=True)
    if checkpoint is not None:
        simulation.load(*checkpoint[1:])
    listeners, result = Listeners(settings.callbacks), None

    def write_checkpoint() -> None:
        if folder is not None and processes.is_first():
            state = (simulation.round_index, *simulation.state())
            save_or_warn(lambda: folder.write_checkpoint(*state), folder.path)

    try:
        listeners.start(simulation, config)
        drive(
            simulation,
            progress=settings.progress,
            title=record.name + (f" ({len(runs)} runs)" if len(runs) > 1 else ""),
            asks_to_stop=lambda: processes.first(lambda: listeners.round(simulation)),
            checkpoint=write_checkpoint,
            checkpoint_every=settings.checkpoint_every,
        )
        if len(runs) == 1 and simulation.log.diverged[0] is not None:
            raise _diverged(simulation)
        if baseline is None and method != "local":
            baseline = _lazily_local(federations, settings, local, hyper)
        if baseline is not None and folder is not None:
            baseline = _kept(baseline, folder)
        result = result_of(simulation, config, baseline)
        if selection is not None and trials:
            auto.add_cost(result, selection)
        if folder is not None and not (reopen and finished):
            # The result is written last: a folder that has one is not resumed.
            save_or_warn(lambda: _write_models(folder, simulation), folder.path)
            if processes.is_first():
                save_or_warn(lambda: folder.write_result(result), folder.path)
    finally:
        listeners.end(result)
    return result


def _scratch(folder: RunFolder | None) -> Path:
    """Make a folder for mapped client states: in the run folder, or among temporary files."""
    home = None if folder is None else folder.path / "states"

    def prepare() -> None:
        if home is not None:
            # What a killed run left behind; its checkpoint holds the states.
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()

    try:
        processes.first(prepare)
        return Path(tempfile.mkdtemp(prefix="sartor-", dir=home))
    except OSError as error:
        raise RunFolderError(
            f"Cannot make a folder for client states: {error}; use store='memory'."
        ) from error


def save_or_warn(write: Callable[[], object], path: Path) -> None:
    """Write to a folder; if the disk is full or gone, warn: the result is still in memory."""
    try:
        write()
    except RunFolderError as error:
        warnings.warn(
            f"{error} Training continues and the result stays in memory, but {path} is not "
            "up to date.",
            stacklevel=5,
        )


def _write_models(folder: RunFolder, simulation: Simulation) -> None:
    names, writes = simulation.federations[0].names, processes.is_first()
    # Models that take an epilogue first are worked out by all processes.
    if len(names) <= 1000 and (writes or simulation.pending):
        for run in range(len(simulation.runs)):
            trees = [simulation.params(client, run) for client in range(len(names))]
            if writes:
                folder.write_models(names, trees, run)
            if writes and processes.current() is None:
                folder.write_server(*stored_form(trained(simulation, run)), run)


def _lazily_local(
    federations: dict[int, Federation], settings: Settings, local: Local, hyper: Mapping[str, Value]
) -> Callable[[], Result]:
    """Train LocalTrain on the same allocations when the gain is asked for."""
    same = {name: value for name, value in hyper.items() if name in local.hyper}

    def train() -> Result:
        quiet = replace(settings, progress=None, callbacks=())
        return _fit_lanes("local", federations.__getitem__, quiet, {}, same, {}, None, False)

    settings = replace(settings, local=local)
    return train


def _kept(baseline: Callable[[], Result], folder: RunFolder) -> Callable[[], Result]:
    """Leave what clients reach alone in the run folder, once it is trained."""

    def train() -> Result:
        found = baseline()
        if processes.is_first() and folder.has_result:
            save_or_warn(lambda: folder.write_baseline(found), folder.path)
        return found

    return train


def _diverged(simulation: Simulation) -> DivergedError:
    seen = simulation.log.diverged[0] or {}
    rate = simulation.runs[0].hyper.get("local_lr")
    name, at = str(seen.get("client")), int(seen.get("round", 0))
    text = f"The loss became NaN or infinite in round {at}, first at client {name}"
    text += "." if rate is None else f", with local_lr={rate}; try a smaller local_lr."
    y = simulation.federations[0].y
    spread = float(y.double().std()) if simulation.task.measured_as == "regression" else 0.0
    if spread > WIDE:
        text += (
            f" Or standardise the targets: their deviation is {spread:.4g}, and the slope of a "
            "squared error grows with it."
        )
    return DivergedError(text, run=0, round=at, client=name)


def _open(
    out: str | Path | None, config: dict[str, Any], resume: bool
) -> tuple[RunFolder | None, tuple[int, dict[str, Tree], dict[str, Any], dict[str, Any]] | None]:
    if out is None:
        if resume:
            raise ConfigError("resume=True needs out=..., the run folder to resume from.")
        return None, None
    folder, there = begin_folder(RunFolder, out, config, resume)
    if not there:
        return folder, None
    folder.check_config(config, ignore=(*settings_on("fit", "free"), "data", "task", "rebuild"))
    return folder, folder.read_checkpoint()


def begin_folder(
    kind: type[K], out: str | Path, config: Mapping[str, Any], resume: bool
) -> tuple[K, bool]:
    """Make a folder, or with ``resume`` open the one that is there; say whether it was."""

    def prepare() -> bool:
        there = resume and (Path(out) / "folder.json").exists()
        if there:
            kind.open(out).tidy()
        else:
            kind.create(out, config)
        return there

    there = processes.first(prepare)
    return kind.open(out), there
