"""Laws of the experiment schema: files, flags and run folders are checked by the same rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sartor.cli.config import Experiment, build, keys, parse_pairs, parse_value, read_file
from sartor.cli.settings import check_names, local_of
from sartor.core.errors import ConfigError
from sartor.core.local import Local


def toml(values: dict[str, Any]) -> str:
    """Write a flat experiment as TOML; JSON scalars and lists are TOML as well."""
    flat = {k: v for k, v in values.items() if not isinstance(v, dict)}
    tables = {k: v for k, v in values.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in flat.items()]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


EXAMPLE: dict[str, Any] = {
    "method": "fedprox",
    "data": "digits",
    "clients": 7,
    "rounds": 3,
    "momentum": 0.9,
    "keep_optimiser": True,
    "participation": "at_least:0.6",
    "set": {"prox_strength": 0.1, "warm_start": True},
    "sweep": {"server_lr": [0.5, 1.0]},
}


def test_toml_yaml_and_flags_agree(tmp_path: Path) -> None:
    """The same keys make the same experiment, from TOML, from YAML and from flags."""
    (tmp_path / "a.toml").write_text(toml(EXAMPLE))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(EXAMPLE))
    flags = {k: str(v) for k, v in EXAMPLE.items() if k not in ("set", "sweep")}
    flags |= {"set": {"prox_strength": "0.1", "warm_start": "true"}}  # type: ignore[dict-item]
    flags |= {"sweep": {"server_lr": "0.5,1.0"}}  # type: ignore[dict-item]
    one, two = (build(read_file(tmp_path / f"a.{kind}")) for kind in ("toml", "yaml"))
    assert one == two == build({}, flags=flags)
    assert one.methods == ("fedprox",)


def test_flags_win_over_the_file_name_by_name() -> None:
    """A flag replaces a key of the file; in set and sweep it replaces that name alone."""
    made = build(
        EXAMPLE,
        flags={"rounds": "9", "set": {"warm_start": "false"}, "sweep": {"prox_strength": "1,2"}},
    )
    assert made.rounds == 9
    assert made.set == {"warm_start": False}
    assert made.sweep == {"server_lr": [0.5, 1.0], "prox_strength": [1, 2]}


@given(
    rounds=st.integers(1, 1000),
    seeds=st.integers(1, 20),
    lr=st.none() | st.floats(1e-6, 10),
    participation=st.integers(1, 9) | st.floats(0.1, 1.0) | st.just("at_least:0.6"),
    names=st.lists(st.sampled_from(["local", "fedavg", "fedapa"]), min_size=1, unique=True),
    table=st.dictionaries(
        st.sampled_from(["prox_strength", "preset", "share"]),
        st.booleans() | st.integers(-5, 5) | st.floats(-1, 1) | st.sampled_from(["paper", "all"]),
    ),
)
def test_an_experiment_survives_json(
    rounds: int,
    seeds: int,
    lr: float | None,
    participation: Any,
    names: list[str],
    table: dict[str, Any],
) -> None:
    """What a run folder stores as JSON builds the same experiment again, for any values."""
    made = build(
        {
            "methods": names,
            "rounds": rounds,
            "seeds": seeds,
            "lr": lr,
            "participation": participation,
            "set": table,
        }
    )
    again = build(json.loads(json.dumps(made.stored(), allow_nan=False)))
    assert again == made
    assert again.all_seeds == tuple(range(seeds))


def test_paths_are_stored_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run can be resumed from another working folder, because stored paths are absolute."""
    monkeypatch.chdir(tmp_path)
    stored = build(
        {"method": "local", "data": "./plants", "data_dir": "d", "out": "runs/a"}
    ).stored()
    assert stored["data"] == str(tmp_path / "plants")
    assert stored["data_dir"] == str(tmp_path / "d")
    assert stored["out"] == str(tmp_path / "runs/a")
    assert build({"method": "local"}).stored()["data"] == "digits"


@pytest.mark.parametrize("key", keys())
def test_a_misspelt_key_names_the_right_one(key: str) -> None:
    """Every key, with one letter too many, is an error that names the key."""
    with pytest.raises(ConfigError, match="unknown key") as caught:
        build({"method": "local", f"{key}x": 1}, source="a.toml")
    near = str(caught.value)
    assert f"'{key}'" in near.split("did you mean")[1]
    assert near.startswith("a.toml: ")


def test_all_faults_are_listed_at_once() -> None:
    """One message holds every fault: unknown keys, wrong types, values out of range, doubles."""
    with pytest.raises(ConfigError) as caught:
        build(
            {
                "method": "fedprox",
                "round": 3,
                "clients": 0,
                "val": "lots",
                "lr": 0.1,
                "set": {"local_lr": 0.2, "a": 1},
                "sweep": {"a": [1, 2]},
            },
            flags={"eval_every": "-1"},
            source="x.yaml",
        )
    message = str(caught.value)
    for part in (
        "x.yaml: 6 things to fix",
        "did you mean 'rounds'",
        "clients should be greater than or equal to 1, got 0",
        "val should be a valid number",
        "'lots'",
        "lr and set local_lr say the same thing",
        "a is both set and swept",
        "--eval-every should be",
    ):
        assert part in message, part


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({}, "no method is named"),
        ({"method": "a", "methods": ["b"]}, "either method or methods"),
        ({"methods": []}, "methods"),
        ({"method": "a", "set": 3}, "set"),
        ({"method": "a", "sweep": {"x": 3}}, "sweep.x"),
        ({"method": "a", "sweep": {"x": []}}, "sweep.x"),
        ({"method": "a", "lr": float("nan")}, "lr"),
        ({"method": "a", "seed": 1.5}, "seed"),
        ({"method": "a", "set": {"x": {"y": 1}}}, "set.x"),
    ],
)
def test_what_cannot_be_right_is_refused(values: dict[str, Any], part: str) -> None:
    """A fault is reported once, with the key at fault, and never passes silently."""
    with pytest.raises(ConfigError) as caught:
        build(values)
    assert part in str(caught.value)
    assert "things to fix" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.toml", "rounds = = 3", "not valid TOML"),
        ("a.yaml", "rounds: [1, 2", "not valid YAML"),
        ("a.yml", "- 1\n- 2\n", "keys and values"),
        ("a.yaml", "", "keys and values"),
        ("a.toml", "rounds = 3\nrounds = 4\n", "not valid TOML"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, part: str) -> None:
    """A file that cannot be parsed gives an error with its name and the reason."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=part) as caught:
        read_file(tmp_path / name)
    assert name in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    """A misspelt file name is answered with the file that is there."""
    (tmp_path / "experiment.toml").write_text("")
    with pytest.raises(ConfigError, match="did you mean 'experiment'"):
        read_file(tmp_path / "experimnt.toml")


def test_bytes_are_no_experiment(tmp_path: Path) -> None:
    """A binary file is refused with its name, not with a decoding traceback."""
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"a\.toml"):
        read_file(tmp_path / "a.toml")


@pytest.mark.parametrize("pair", ["x", "x=", "=1", ""])
def test_a_pair_needs_name_and_value(pair: str) -> None:
    """--set without a name, a value or an equals sign is an error that shows the right form."""
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_pairs("--set", [pair])


def test_a_pair_given_twice_is_refused() -> None:
    """A name given twice is an error: silently keeping one would hide a slip."""
    with pytest.raises(ConfigError, match="twice"):
        parse_pairs("--set", ["a=1", "a=2"])


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans())
def test_a_number_survives_the_command_line(value: float | bool) -> None:
    """Written as a word and read again, a number or a switch keeps its value and its type."""
    again = parse_value(str(value))
    assert again == value
    assert type(again) is type(value)


def test_yaml_exponents_are_numbers(tmp_path: Path) -> None:
    """1e-3 means a number in YAML too, although YAML 1.1 reads it as a word."""
    (tmp_path / "a.yaml").write_text(
        "method: local\nlr: 1e-3\nset: {x: 1e-3}\nsweep: {y: [1e-3]}\n"
    )
    made = build(read_file(tmp_path / "a.yaml"))
    assert (made.lr, made.set, made.sweep) == (0.001, {"x": 0.001}, {"y": [0.001]})


def test_an_experiment_cannot_be_changed() -> None:
    """An experiment is a value: what was checked stays as it was checked."""
    made = build({"method": "local"})
    with pytest.raises(ValueError, match="frozen"):
        made.rounds = 0
    assert isinstance(made, Experiment)


def test_flags_of_local_training_reach_it() -> None:
    """Clipping and the decay of the rate, as words, are those of ``Local``; 0 and 1 are off."""
    words = {"methods": "fedavg", "clip_norm": "0.5", "lr_decay": "0.9", "momentum": "0.8"}
    found = local_of(build({}, flags=words))
    assert (found.clip_norm, found.lr_decay, found.momentum) == (0.5, 0.9, 0.8)
    assert local_of(build({}, flags={"methods": "fedavg"})) == Local()
    off = build({}, flags={"methods": "fedavg", "clip_norm": "0", "lr_decay": "1"})
    assert local_of(off) == Local()
    swept = build({"method": "fedavg", "sweep": {"lr_decay": [0.9, 1.0]}, "set": {"clip_norm": 1}})
    check_names(swept)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"clip_norm": -1}, "clip_norm should be greater than or equal to 0, got -1"),
        ({"lr_decay": 0}, "lr_decay should be greater than 0, got 0"),
        ({"lr_decay": 1.5}, "lr_decay should be less than or equal to 1, got 1.5"),
        ({"lr_decay": 0.9, "set": {"lr_decay": 0.5}}, "lr_decay and set lr_decay say the same"),
        ({"clip_norm": 1, "sweep": {"clip_norm": [1]}}, "clip_norm and sweep clip_norm say"),
    ],
)
def test_faults_of_local_training_are_named(values: dict[str, Any], part: str) -> None:
    """The same checks as for momentum and weight decay."""
    with pytest.raises(ConfigError, match=part):
        build({"method": "fedavg", **values})
