"""From the settings of a cell to its federation and network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor import models
from sartor.core.errors import ConfigError, did_you_mean
from sartor.core.task import Task
from sartor.data.federation import Federation
from sartor.data.split import Ragged
from sartor.data.synthetic import Logistic, logistic, logistic_loss, logistic_radii, logistic_radius
from sartor.engines.arena import build_arena
from sartor.engines.parts import Arena, Split
from sartor.training.schema import settings_on
from sartor.training.settings import make_task

SYNTHETIC = ("logistic-theory", "logistic-literal", "logistic-radius")
"""Problems with known true models, made by ``sartor.data.synthetic``."""


@dataclass(frozen=True)
class Problem:
    """A federation, and the true models of its clients (clients, dim) where they are known."""

    federation: Federation
    truth: Tensor | None = None


def make_problem(settings: Mapping[str, Any], seed: int) -> Problem:
    """Make the federation that the settings name for one seed."""
    name = settings["data"]
    if name not in SYNTHETIC:
        given = _given(settings, "dataset")
        federation = Federation.from_dataset(name, seed=seed, **given)
        if settings["test_samples"] is not None:
            federation = _fewer_tests(federation, settings["test_samples"], seed)
        return Problem(federation)
    given = _given(settings, "synthetic")
    if name == "logistic-radius":
        federation, truth = logistic_radius(settings["radius"], seed=seed, **given)
    else:
        mode = name.removeprefix("logistic-")
        federation, truth = logistic(mode, spread=settings["spread"], seed=seed, **given)
    return Problem(federation, truth.w)


def make_problems(wanted: Sequence[tuple[Mapping[str, Any], int]]) -> list[Problem]:
    """Make the problems of several (settings, seed), each once.

    Those that differ in their radius alone share their features, so that lanes share them too.
    """
    radii: dict[str, list[float]] = {}
    for settings, seed in wanted:
        if settings["data"] == "logistic-radius":
            mine = radii.setdefault(_same({**settings, "radius": None}, seed), [])
            mine += [settings["radius"]] * (settings["radius"] not in mine)
    made: dict[str, Problem] = {}
    for settings, seed in wanted:
        if _same(settings, seed) in made:
            continue
        group = radii.get(_same({**settings, "radius": None}, seed), ())
        if len(group) < 2:
            made[_same(settings, seed)] = make_problem(settings, seed)
            continue
        found = logistic_radii(group, seed=seed, **_given(settings, "synthetic"))
        for radius, (federation, truth) in zip(group, found, strict=True):
            made[_same({**settings, "radius": radius}, seed)] = Problem(federation, truth.w)
    return [made[_same(settings, seed)] for settings, seed in wanted]


def _same(settings: Mapping[str, Any], seed: int) -> str:
    return json.dumps([seed, dict(settings)], sort_keys=True)


def _given(settings: Mapping[str, Any], surface: str) -> dict[str, Any]:
    names = settings_on("plan", surface)
    return {name: settings[name] for name in names if settings[name] is not None}


def _fewer_tests(federation: Federation, most: int, seed: int) -> Federation:
    """Keep at most so many test samples of every client, drawn by the seed."""
    lists = []
    for client in range(federation.num_clients):
        own = federation.test.of(client).numpy()
        lists.append(np.sort(np.random.default_rng([seed, client]).permutation(own)[:most]))
    return replace(federation, test=Ragged.from_lists(lists))


def make_network(settings: Mapping[str, Any], federation: Federation) -> Task:
    """Return the network of a cell, with its loss."""
    name = settings["model"]
    if settings["data"] in SYNTHETIC and name is None:
        return Task(Logistic(federation.x.shape[1]), criterion=logistic_loss)
    if name is not None and name not in models.MODELS:
        raise ConfigError(f"unknown model {name!r}{did_you_mean(name, models.MODELS)}")
    network = None if name is None else models.MODELS[name](federation)
    return make_task(network, federation, None)


def make_arena(
    federations: list[Federation], device: torch.device, dtype: torch.dtype, everyone: int
) -> Arena:
    """Put the data on the device; with ``everyone``, the split "val" is a test for all.

    It holds ``everyone`` test samples of all clients of the run together (or all of them), the
    same for every client: what a model knows of the classes that its client never sees.
    """
    arena = build_arena(federations, device, dtype)
    if not everyone:
        return arena
    test = arena.splits["test"]
    rows, start, size = [], np.zeros_like(test.start), np.zeros_like(test.size)
    filled, known = 0, {}
    for run, federation in enumerate(federations):
        if id(federation) not in known:
            spans = zip(test.start[run], test.size[run], strict=True)
            own = torch.cat([test.rows[a : a + n] for a, n in spans]).unique()
            order = np.random.default_rng(0).permutation(len(own))[:everyone]
            rows.append(own[torch.from_numpy(np.sort(order)).to(own.device)])
            known[id(federation)] = (filled, len(rows[-1]))
            filled += len(rows[-1])
        start[run], size[run] = known[id(federation)]
    split = Split(torch.cat(rows), start, size, int(size.max(initial=0)))
    return replace(arena, splits={**arena.splits, "val": split})
