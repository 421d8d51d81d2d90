"""Laws of the schema: files, flags, plans and ``fit`` have the settings that it declares."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

import sartor
from sartor.core.errors import ConfigError
from sartor.core.local import Local
from sartor.training import schema
from sartor.training.schema import SETTINGS, Setting, settings_on
from sartor.training.settings import Settings

SIGNATURES = {
    "fit": "method federation model=None rounds=None seeds=(0,) hyper=None sweep=None options=None "
    "local=None participation=1.0 do_no_harm=False class_weights=None engine='auto' chunk=None "
    "device='auto' dtype='float32' compute=None store='memory' eval_every=1 points=('pre', 'post') "
    "out=None checkpoint_every=10 resume=False reopen=False progress=None callbacks=() "
    "early_stopping=None measure=None",
    "compare": "names federation baselines=True hyper=None options=None do_no_harm=False "
    "equal=None out=None resume=False **settings",
    "search": "method federation space trials=40 lanes=10 measure=None seeds=(0,) hyper=None "
    "options=None study=None sampler_seed=0 **settings",
}
"""The public calls of version 0.1.0; rounds was 20; class_weights, equal and measure are new."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_public_calls_are_those_of_the_first_version(name: str) -> None:
    """Names, order and defaults are the same; what follows the data is given by keyword."""
    found = inspect.signature(getattr(sartor, name)).parameters.values()
    words = [
        f"**{p.name}"
        if p.kind is p.VAR_KEYWORD
        else p.name
        if p.default is p.empty
        else f"{p.name}={p.default!r}"
        for p in found
    ]
    assert " ".join(words) == SIGNATURES[name]
    given = [p for p in found if p.default is not p.empty]
    assert all(p.kind is p.KEYWORD_ONLY for p in given)


def test_fit_takes_the_settings_of_the_schema() -> None:
    """Names, defaults and order of the keywords; every one is described."""
    keywords = list(inspect.signature(sartor.fit).parameters.values())[2:]
    declared = settings_on("fit").values()
    assert [(p.name, p.default) for p in keywords] == [(s.name, s.default) for s in declared]
    text = " ".join((sartor.fit.__doc__ or "").split())
    for setting in declared:
        assert f" {setting.name}: " in text
        assert " ".join(setting.about.split()) in text
    assert text.count(" engine: ") == 1
    assert "Returns:" in text
    assert {field.name for field in fields(Settings)} - {"open_ended"} <= settings_on("fit").keys()


def test_a_name_is_declared_once_for_each_place() -> None:
    """Where a file and ``fit`` mean different things by a name, each has its own row."""
    for place in ("fit", "file", "plan"):
        names = [setting.name for setting in SETTINGS if setting.is_on(place)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("surface", ["file", "plan"])
def test_defaults_pass_their_own_checks(surface: str) -> None:
    """No default is a value that would be refused."""
    for setting in settings_on(surface).values():
        if setting.name != "methods":
            assert setting.fault(setting.default_on(surface)) is None


def test_local_training_has_the_settings_of_its_class() -> None:
    """Every attribute of ``Local`` is a key of files, and no other key says it is one.

    The constants of Adam, which nobody changes often, are for Python alone.
    """
    attributes = {field.name for field in fields(Local)} - {"betas", "eps"}
    assert set(settings_on("file", "local")) == attributes
    assert set(settings_on("plan", "local")) == attributes - {"lr_schedule", "optimizer"}


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        (Setting("rounds", "whole", 1, low=1), 0, "rounds must be a whole number >= 1, got 0."),
        (Setting("rounds", "whole", 1, low=1), True, "rounds must be a whole number >= 1, got Tr"),
        (Setting("p", "number", 0.5, low=0, below=1), 1.0, "p must be a number >= 0 and < 1, got"),
        (Setting("p", "number", 0.5, above=0), float("nan"), "p must be a number > 0, got nan."),
        (Setting("dtype", "word", choices={"float32": 1}), "flot32", "did you mean 'float32'?"),
        (Setting("points", "names", choices={"pre": 1}), ["per"], "Unknown point 'per'"),
        (Setting("rounds", "whole", 1), None, "rounds must be a whole number, got None."),
    ],
)
def test_what_cannot_be_right_is_named(setting: Setting, value: object, words: str) -> None:
    """A fault says which setting, what was expected and what was given."""
    assert words in str(setting.fault(value))
    with pytest.raises(ConfigError):
        setting.read(value)


def test_a_value_that_may_be_left_open_is_read_as_none() -> None:
    """None is read as None where it is the default or declared to be allowed."""
    assert Setting("chunk", "whole").read(None) is None
    assert Setting("batch", "whole", 32, optional=True).read(None) is None
    assert settings_on("fit")["dtype"].read("float64") is schema.DTYPES["float64"]


ADDED = """
from sartor.training import schema

row = schema.Setting("patches", "whole", 3, "Patches of an image.", "file plan advise", "N", low=1)
schema.SETTINGS = (*schema.SETTINGS, schema.replace(row, group="Data"))

from sartor.cli import main
from sartor.cli.config import build
from sartor.core.errors import ConfigError
from sartor.reproduce.plan import SETTINGS, read


def fault(make):
    try:
        make()
    except ConfigError as error:
        return str(error)


print(build({"method": "local", "patches": 5}).patches, build({"method": "local"}).patches)
print(fault(lambda: build({"method": "local", "patches": 0})))
print(fault(lambda: build({"method": "local", "patchs": 1})))
content = {"title": "", "paper": "", "item": "", "tables": [], "settings": {"patches": "few"}}
print(SETTINGS["patches"], fault(lambda: read("new", content)))
print("--patches N" in schema.flag_tables())
for command in ("run", "compare", "search", "advise"):
    main([command, "--help-all"])
main(["run", "local", "--patches", "0"])
"""


def test_a_row_of_the_schema_is_all_that_a_setting_takes() -> None:
    """Added before anything else is loaded, it is a key, a flag, a key of plans, and is checked."""
    done = subprocess.run([sys.executable, "-c", ADDED], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "5 3",
        "patches should be greater than or equal to 1, got 0",
        "unknown key 'patchs'; did you mean 'patches'?",
        "3 Reproduction new: settings: patches must be a whole number >= 1, got 'few'.",
        "True",
    ]
    assert done.stdout.count("Patches of an image. (3)") == 4
    assert "--patches should be greater than or equal to 1, got '0'" in done.stderr
