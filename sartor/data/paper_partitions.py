"""Partitions of single papers: exact classes, lognormal sizes, equal sizes, and grouped users.

| partition | from | what it does |
| --- | --- | --- |
| ``classes:s`` | the analyses of FedProx (Yu et al.) | s classes and one size for every client |
| ``lognormal:k`` | pFedBreD, after pFedMe | classes (i + j) mod C for j < k, sizes of heavy tail |
| ``dirichlet:a:equal`` | pFedBreD, its study of heterogeneity | class shares Dir(a), equal sizes |
| ``grouped:a`` | pFedBreD, for Sent140 | users dealt to clients whose numbers of users are Dir(a) |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.core.errors import ConfigError, FederationError
from sartor.data.draws import Draw
from sartor.data.split import Int, Ragged

FEW = 20
"""Up to this number of clients the sizes of ``lognormal`` are doubled."""

LEAST = 10
"""Samples of each class that every client of ``lognormal`` has; users of one of ``grouped``."""


def exact_classes(
    draw: Draw, official: tuple[Int, Int], samples: int | None, *, all_tests: bool
) -> tuple[Ragged, Ragged]:
    """Give every client s classes and n training samples, as evenly over its classes as can be.

    A client takes the s classes that were taken least so far (ties at random), so that each class
    has ⌊m s / C⌋ or ⌈m s / C⌉ holders. Test samples are not divided: a client is tested on all
    official test samples of its classes, or on all (``all_tests``). ``samples`` is m n, training
    samples in all; by default as many as the scarcest class allows.
    """
    wanted = draw.whole_classes()
    holders = np.zeros(draw.classes, dtype=np.int64)
    held = np.zeros((draw.clients, wanted), dtype=np.int64)
    for row in held:
        row[:] = np.lexsort((draw.rng.random(draw.classes), holders))[:wanted]
        holders[row] += 1
    lists, sizes = draw.lists(official[0])
    taken = holders > 0
    each = int((sizes[taken] // holders[taken]).min()) * wanted
    if samples is not None:
        if samples < draw.clients * wanted:
            raise ConfigError(
                f"samples={samples} leaves {draw.clients} clients of {wanted} classes without a "
                f"sample of each; use at least {draw.clients * wanted}."
            )
        each = samples // draw.clients
    counts = np.zeros((draw.classes, draw.clients), dtype=np.int64)
    for client, row in enumerate(held):
        counts[row, client] = each // wanted
        counts[row[: each % wanted], client] += 1
    short = np.flatnonzero(counts.sum(1) > sizes)
    if len(short) or each == 0:
        most = int((sizes[taken] // holders[taken]).min()) * wanted * draw.clients
        need, scarce = int(counts.sum(1).max()), int(sizes[taken].min())
        raise FederationError(
            f"{draw.name} with {draw.clients} clients of {each} samples needs {need} samples of a "
            f"class, but one has {scarce}; use samples={most} or fewer, or fewer clients."
        )
    draw.info |= {"samples_per_client": each, "classes_per_client": wanted}
    mine = np.zeros((draw.clients, draw.classes), dtype=np.bool_)
    np.put_along_axis(mine, held, True, axis=1)
    tests = [official[1] if all_tests else official[1][row[draw.y[official[1]]]] for row in mine]
    return draw.cut(draw.mixed(lists), counts), Ragged.from_lists(tests)


def lognormal(draw: Draw, rule: str) -> tuple[Ragged, Int | None]:
    """Deal out the merged samples as pFedBreD's generators do.

    Client i holds the classes l = (i + j) mod C, j < k: ten samples of each at first, then, while
    the class lasts,

        MNIST and its kin:  n = ⌊p_l,⌊iC/m⌋,j⌋ · U{1..10} + U{10..200}
        CIFAR:              n = ⌊p_l,⌊iC/m⌋,j⌋ + U{300..600}

    more, twice as many if there are no more than 20 clients. p_l are lognormal(0, 2) numbers, one
    for each client and j, scaled to sum to what class l has (less 10 m, for CIFAR less m). Clients
    of one tenth share their p, as published. What does not fit into a class is left out whole.

    Rule ``mislabelled``: the published generator for MNIST labels the first ten samples of every
    class j instead of l (2700 wrong labels for 100 clients). Then all labels are returned, too.
    """
    wanted = draw.whole_classes()
    lists, sizes = draw.lists()
    client, j = np.indices((draw.clients, wanted)).reshape(2, -1)
    label = (client + j) % draw.classes
    need = LEAST * np.bincount(label, minlength=draw.classes)
    if (need > sizes).any():
        raise FederationError(
            f"{draw.name} gives {draw.clients} clients {LEAST} samples of each of their classes, "
            f"{int(need.max())} of a class, but one has {int(sizes.min())}; use fewer clients."
        )
    shares = draw.rng.lognormal(0.0, 2.0, (draw.classes, draw.clients, wanted))
    room = np.maximum(sizes - draw.clients * (1 if rule == "cifar" else LEAST), 0)
    shares *= room[:, None, None] / shares.sum((1, 2), keepdims=True)
    group = client // max(draw.clients // draw.classes, 1)
    more = shares[label, group, j].astype(np.int64)
    if rule == "cifar":
        more += draw.rng.integers(300, 600, len(more), endpoint=True)
    else:
        more *= draw.rng.integers(1, 10, len(more), endpoint=True)
        more += draw.rng.integers(10, 200, len(more), endpoint=True)
    if draw.clients <= FEW:
        more *= 2
    rows: list[list[Int]] = [[] for _ in range(draw.clients)]
    labels = draw.y.copy()
    used = np.zeros(draw.classes, dtype=np.int64)
    for i, k, c in zip(client, j, label, strict=True):
        first = lists[c][used[c] : used[c] + LEAST]
        rows[i].append(first)
        labels[first] = k
        used[c] += LEAST
    for i, c, number in zip(client, label, more, strict=True):
        if used[c] + number < sizes[c]:
            rows[i].append(lists[c][used[c] : used[c] + number])
            used[c] += number
    draw.info["samples"] = int(used.sum())
    found = Ragged.from_lists([np.concatenate(parts) for parts in rows])
    if rule != "mislabelled":
        return found, None
    draw.info["wrong_labels"] = int((labels != draw.y).sum())
    return found, labels


def equal_sizes(draw: Draw) -> Ragged:
    """Give every client ⌊N/m⌋ of the merged samples, with class shares drawn from Dir(a, ..., a).

    Clients choose in random order. Where a class is used up, the rest of a client's wish goes to
    its other classes in their shares (and, where those have none, to what is left).
    """
    each = len(draw.y) // draw.clients
    if each < 2:
        raise FederationError(
            f"{len(draw.y)} samples give {draw.clients} clients {each} each, too few for training "
            "and test; use fewer clients."
        )
    lists, left = draw.lists()
    lists = draw.mixed(lists)
    counts = np.zeros((draw.classes, draw.clients), dtype=np.int64)
    for client in draw.rng.permutation(draw.clients):
        wish = draw.rng.dirichlet(np.full(draw.classes, draw.value))
        need = each
        while need > 0:
            open_wish = wish * (left > 0)
            weights = open_wish if open_wish.sum() > 0 else left.astype(np.float64)
            part = np.minimum(_rounded(weights / weights.sum() * need, need), left)
            counts[:, client] += part
            left -= part
            need -= int(part.sum())
    draw.info["samples_per_client"] = each
    return draw.cut(lists, counts)


def _rounded(parts: npt.NDArray[np.float64], total: int) -> Int:
    """Round to whole numbers with the given sum: the largest remainders are rounded up."""
    whole = np.floor(parts).astype(np.int64)
    missing = max(total - int(whole.sum()), 0)
    whole[np.argsort(whole - parts, kind="stable")[:missing]] += 1
    return whole


def grouped(columns: Mapping[str, Any], draw: Draw, least: int | None) -> tuple[Int, str]:
    """Return the client of every sample, and the column that names the users: the first.

    Every client gets ``least`` users (10) with all their samples, and of the other users shares
    drawn from Dir(a, ..., a); what rounding leaves goes to clients at random.
    """
    if not columns:
        raise ConfigError(
            f"{draw.name} deals out users, but the data have no column that names them; use "
            "femnist or sent140, or another partition."
        )
    column = next(iter(columns))
    floor = LEAST if least is None else least
    names, user = np.unique(np.asarray(columns[column]), return_inverse=True)
    spare = len(names) - floor * draw.clients
    if floor < 1 or spare < 0:
        raise FederationError(
            f"{draw.name} gives each of {draw.clients} clients at least {floor} users, but there "
            f"are {len(names)}; use at most {len(names) // max(floor, 1)} clients, or a min_train "
            f"of 1 to {len(names) // draw.clients}."
        )
    shares = draw.rng.dirichlet(np.full(draw.clients, draw.value))
    sizes = floor + (shares * spare).astype(np.int64)
    lucky = draw.rng.integers(0, draw.clients, len(names) - int(sizes.sum()))
    sizes += np.bincount(lucky, minlength=draw.clients)
    owner = np.empty(len(names), dtype=np.int64)
    owner[draw.rng.permutation(len(names))] = np.repeat(np.arange(draw.clients), sizes)
    draw.info |= {"users": len(names), "min_users": floor}
    return owner[user], column
