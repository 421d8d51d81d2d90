"""``sartor advise``: read the flags, ask the adviser, print the answer and leave it in a folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from sartor import adviser
from sartor.adviser import Advice, words
from sartor.adviser.measured import table_of as measured_table
from sartor.cli import show, work
from sartor.cli.config import Experiment, build
from sartor.cli.flags import Json, Overwrite, option, with_flags
from sartor.cli.interruption import stoppable
from sartor.cli.settings import (
    federation_code,
    federation_of,
    given_flags,
    kind_of,
    local_of,
    model_of,
)
from sartor.core.errors import ConfigError, FederationError
from sartor.core.local import Local
from sartor.training.open_ended import FIXED
from sartor.training.progress import reporter
from sartor.training.schema import settings_on

MOST_CLIENTS = 20
"""Rows of the client table on a screen."""


@with_flags("advise")
def advise(
    features: Annotated[
        str | None, option("raw, scaled, pca:K; of the convex model. (scaled)", "KIND")
    ] = None,
    ridge: Annotated[
        float, option("ν of (ν/2)|w|², for theory or trial; else it is learned.", "X")
    ] = 0.0,
    basis: Annotated[
        str, option("evidence, theory, trial; auto: evidence, for networks trial.", "HOW")
    ] = "auto",
    budget_mb: Annotated[
        float | None, option("Megabytes that may be sent, both ways.", "MB")
    ] = None,
    budget_rounds: Annotated[int | None, option("Communication rounds at most.", "T")] = None,
    verify: Annotated[
        bool, option("Compare it with its rivals, on new divisions.", None, "--verify")
    ] = False,
    json: Json = False,
    overwrite: Overwrite = False,
    **flags: Any,
) -> None:
    """Say whether to federate, with which pull λ, and at what cost."""
    flags = {key: value for key, value in flags.items() if value is not None}
    experiment = build({"method": "fedprox"}, flags=flags)
    if experiment.model is not None and (features is not None or ridge):
        raise ConfigError(
            "--features and --ridge belong to the convex model, and --model names a network, "
            "which takes its inputs as they are; leave one or the other out. A network's ridge is "
            "--weight-decay."
        )
    if kind_of(experiment) == "a table" and "missing" not in flags:
        experiment = experiment.model_copy(update={"missing": "indicator"})
    # Own data are read whole, so that neither scaling nor the answer depends on a division.
    uses_all = basis in ("auto", "evidence") and experiment.model is None
    own = uses_all and kind_of(experiment) != "a data set"
    whole = experiment.model_copy(update={"test": 0.0}) if own else experiment
    federation = federation_of(whole)(experiment.seed)
    filled = [
        step["name"]
        for step in (federation.info.get("preprocessing") or {}).get("columns", ())
        if step.get("indicator")
    ]
    if filled:
        put = "median" if experiment.missing.startswith("median") else "mean"
        show.note(
            f"Empty cells of {len(filled)} columns ({', '.join(filled[:5])}"
            f"{', …' if len(filled) > 5 else ''}) count as the {put}, and a feature marks them."
        )
    out = work.free_folder(experiment, f"advice-{Path(experiment.data).name}", overwrite=overwrite)
    progress = reporter(plain=json)
    if experiment.model is None and basis != "trial" and federation.num_clients > 1:
        show.note(f"Solving for {federation.num_clients} clients, alone and together.")
    with stoppable("Stopped; nothing was kept."), _in_flags():
        advice = adviser.advise(
            federation,
            model=model_of(experiment, federation),
            features=features,
            ridge=ridge,
            basis=basis,  # type: ignore[arg-type]  # checked there
            budget_mb=budget_mb,
            budget_rounds=budget_rounds,
            local=_local(experiment, flags, ridge),
            rounds=experiment.rounds or FIXED,
            seed=experiment.seed,
            device=experiment.device,
            progress=progress,
            measure=experiment.measure,
        )
    carry_out = how_to(advice, experiment, features or "scaled", ridge)
    stored = experiment.stored()
    config = {
        **{key: stored[key] for key in settings_on("file", "advise") if key != "out"},
        "features": (features or "scaled") if experiment.model is None else None,
        "ridge": ridge,
        "basis": basis,
        "budget_mb": budget_mb,
        "budget_rounds": budget_rounds,
        "carry_out": carry_out,
    }
    folder = adviser.AdviceFolder.create(out, config, overwrite=overwrite)
    folder.write_advice(advice)
    show.say(f"{as_flags(advice.summary())}\n", quiet=json)
    rules = [words.rules_table(advice)] if advice.rules else []
    tables = [words.constants_table(advice), *rules, words.client_table(advice, MOST_CLIENTS)]
    tables += [measured_table(advice.measured)] if advice.measured else []
    show.tables(*tables, words.costs_table(advice), quiet=json)
    found = None
    if verify:
        with stoppable(f"Stopped. The advice is kept in {out}, without verification."):
            found = advice.verify(progress=progress)
        folder.write_verification(found)
        show.say(quiet=json)
        show.table(found.table(), quiet=json)
        show.say(found.summary(), quiet=json)
    indented = "".join(f"  {line}\n" for line in carry_out.splitlines())
    show.say(f"\nTo carry it out:\n{indented}", quiet=json)
    show.places(*work.write_page(out), quiet=json)
    if json:
        verification = None if found is None else found.to_dict()
        answer = {"verification": verification, "carry_out": carry_out, "out": out}
        show.json_line({**advice.to_dict(), **answer})


def as_flags(text: str) -> str:
    """Return a text of the library with its arguments as flags.

    >>> as_flags("fewer features, features='pca:2', or basis='trial'; budget_mb must be positive")
    'fewer features, --features pca:2, or --basis trial; --budget-mb must be positive'
    """
    text = re.sub(r"\b(features|basis|ridge|task)=(['\"]?)([\w:.]*\w)\2", r"--\1 \3", text)
    text = re.sub(r"\b(features|basis|ridge) must be", r"--\1 must be", text)
    return re.sub(r"\bbudget_(mb|rounds)\b", r"--budget-\1", text).replace("model=...", "--model")


@contextmanager
def _in_flags() -> Iterator[None]:
    """Turn the arguments that an error of the library names into flags."""
    try:
        yield
    except (ConfigError, FederationError) as error:
        raise type(error)(as_flags(str(error))) from error


def _local(experiment: Experiment, flags: dict[str, Any], ridge: float) -> Local | None:
    """Return local training as the flags describe it, with the ridge; None if they do not."""
    if not set(flags) & settings_on("advise", "local").keys():
        return None
    local = local_of(experiment)
    return replace(local, weight_decay=ridge) if ridge and not local.weight_decay else local


def how_to(advice: Advice, experiment: Experiment, features: str, ridge: float) -> str:
    """Return the command, or the Python, that carries an advice out.

    The theory's model, and principal components, have features of their own, which a command has
    not, so it is Python.
    """
    if advice.basis == "evidence" and "principal components" not in advice.model:
        words = ["sartor", "run", advice.method, "--data", experiment.data]
        words += given_flags(experiment, "data", "device", "out", "rounds")
        words += [] if experiment.model is not None else ["--model", "mclr"]
        words += ["--rounds", str(advice.settings["rounds"])]
        words += [w for k, v in advice.settings["options"].items() for w in ("--set", f"{k}={v}")]
        return shlex.join(words)
    pull = {"prox_strength": advice.prox_strength} if advice.strategy == "personalised" else {}
    if experiment.model is not None:
        words = ["sartor", "run", advice.method, "--data", experiment.data]
        words += given_flags(experiment, "data", "device", "out")
        words += [word for k, v in pull.items() for word in ("--set", f"{k}={v:.6g}")]
        return shlex.join(words)
    settings, local = advice.settings, advice.subject.local
    given = settings.get("local") or {
        key: getattr(local, key)
        for key in settings_on("advise", "local")
        if getattr(local, key) not in (None, 0.0)
    }
    arguments = {"rounds": settings.get("rounds", advice.plan.rounds if advice.plan else 20)}
    arguments |= {k: settings[k] for k in ("hyper", "options") if settings.get(k)}
    lines = [
        "import sartor",
        "from sartor.adviser.features import view",
        "",
        f"federation = {federation_code(experiment)}",
        f"seen = view(federation, {features!r}, ridge={ridge!r})",
        "result = sartor.fit(",
        f"    {advice.method!r}, seen.federation, model=seen.network(),",
        f"    local=sartor.Local({', '.join(f'{k}={v!r}' for k, v in given.items())}),",
        *(f"    {k}={v!r}," for k, v in arguments.items()),
        ")",
    ]
    return "\n".join(lines)
