"""What a first fit does to the user's process: nothing that was not asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sartor.core.errors import ConfigError
from sartor.engines.cpu import acceleration

PROGRAM = """
import ctypes, os, subprocess, sys
import sartor, torch
from sartor.engines.cpu import traces

def never(*args, **kwargs):
    raise AssertionError("not asked for")

if "asked" not in sys.argv:
    os.fork = subprocess.run = subprocess.Popen = never
    ctypes.CDLL = never
switches = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled())
threads, before = torch.get_num_threads(), set(os.listdir(os.environ["XDG_CACHE_HOME"]))
if "asked" in sys.argv:
    sartor.accelerate()
federation = sartor.Federation.from_dataset("digits", clients=4)
result = sartor.fit("fedavg", federation, model=sartor.models.lenet5(federation), rounds=2)
now = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled())
assert now == switches
assert torch.get_num_threads() == threads
made = set(os.listdir(os.environ["XDG_CACHE_HOME"])) - before
print(float(result.accuracy), sorted(made))
"""


def _program(tmp_path: Path, *words: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "SARTOR_ACCELERATE"}
    env |= {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_first_fit_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """No fork, no compiler, no library of C loaded, no file written, no switch left turned."""
    assert _program(tmp_path).endswith("[]\n")


def test_the_environment_wins_over_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """By words, all or none; without the variable nothing is on until it is asked for."""
    monkeypatch.delenv("SARTOR_ACCELERATE")
    monkeypatch.setattr(acceleration, "_asked", frozenset())
    assert not any(map(acceleration.is_on, acceleration.WORDS))
    acceleration.accelerate("compile")
    assert list(map(acceleration.is_on, acceleration.WORDS)) == [True, False]
    acceleration.accelerate()
    assert all(map(acceleration.is_on, acceleration.WORDS))
    for text, wanted in (
        ("none", []),
        ("compile, allocator", ["compile", "allocator"]),
        ("allocator", ["allocator"]),
    ):
        monkeypatch.setenv("SARTOR_ACCELERATE", text)
        assert [word for word in acceleration.WORDS if acceleration.is_on(word)] == wanted


def test_an_unknown_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the nearest known one."""
    with pytest.raises(ConfigError, match="did you mean 'compile'"):
        acceleration.accelerate("compiled")
    monkeypatch.setenv("SARTOR_ACCELERATE", "compiler")
    with pytest.raises(ConfigError, match="did you mean 'compile'"):
        acceleration.is_on("allocator")


def test_what_was_done_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line a process."""
    acceleration._logged.discard("allocator")
    with caplog.at_level("INFO", "sartor"):
        acceleration.log_once("allocator", "kept")
        acceleration.log_once("allocator", "kept")
    assert [record.message for record in caplog.records] == ["kept"]
