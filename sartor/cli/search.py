"""``sartor search``: read the space, let trials train as lanes, print the best values."""

from __future__ import annotations

from typing import Annotated, Any

import sartor
from sartor.cli import completion, show
from sartor.cli.config import parse_pairs, parse_value
from sartor.cli.flags import Json, argument, option, read_experiment, with_flags
from sartor.cli.settings import check_names, federation_of, names_of, training_of
from sartor.core.errors import ConfigError, did_you_mean
from sartor.runs.storage import naming
from sartor.training.progress import reporter


def parse_space(words: list[str]) -> dict[str, Any]:
    """Read ``NAME=LOW:HIGH``, ``NAME=LOW:HIGH:log``, ``NAME=LOW:HIGH:int`` and ``NAME=A,B,C``.

    >>> parse_space(["prox_strength=0.01:10:log", "rule=normalized,uniform"])
    {'prox_strength': (0.01, 10, 'log'), 'rule': ['normalized', 'uniform']}
    """
    found: dict[str, Any] = {}
    for name, text in parse_pairs("--space", words).items():
        if ":" in text:
            found[name] = tuple(parse_value(part) for part in text.split(":"))
        else:
            found[name] = [parse_value(part.strip()) for part in text.split(",")]
    return found


@with_flags()
def search(
    target: Annotated[
        str, argument("A method, or a .toml or .yaml file.", "METHOD|FILE", completion.targets)
    ],
    space: Annotated[list[str], option("NAME=LOW:HIGH[:log], NAME=A,B; repeatable.", "WHAT")],
    trials: Annotated[int, option("How many values to try.", "N", min=1)] = 40,
    lanes: Annotated[int, option("Trials in one pass.", "N", min=1)] = 10,
    json: Json = False,
    **flags: Any,
) -> None:
    """Search good hyper-parameters on validation data, many at once."""
    experiment = read_experiment(target, flags, many=False)
    chosen = parse_space(space)
    check_names(experiment)
    if experiment.sweep:
        raise ConfigError(
            "sartor search chooses the values itself; leave --sweep out, or use sartor run."
        )
    known = names_of(experiment, experiment.method)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"{experiment.method}: no {name!r}{did_you_mean(name, known)}")
    federations = federation_of(experiment)
    found = sartor.search(
        experiment.method,
        federations,
        chosen,
        trials=trials,
        lanes=lanes,
        progress=reporter(plain=json),
        **training_of(experiment, experiment.method, federations),
    )
    show.table(found.table, quiet=json)
    words = " ".join(f"--set {name}={value}" for name, value in found.best.items())
    show.say(f"Best on validation data: {words}", quiet=json)
    value = f"validation_{found.measure.replace('-', '_')}"
    answer = {"method": found.method, "best": found.best, value: found.value}
    if experiment.out is not None:
        with naming(experiment.out, "create"):
            experiment.out.mkdir(parents=True, exist_ok=True)
        path = found.table.to_csv(experiment.out / "trials.csv")
        show.places(("Trials", path), quiet=json)
        answer["trials"] = str(path)
    if json:
        show.json_line(answer)
