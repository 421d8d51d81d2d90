"""Draws of class counts for every client, in the two protocols of ``sartor.data.partition``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.core.errors import ConfigError, FederationError
from sartor.data.split import Int, Ragged

TRAIN_SHARE = 0.75  # of every client, in protocol pfllib

_AUTHORS_TRAIN = 129  # "more than 128", and
_AUTHORS_TEST = 3  # "more than 2"
_ROOM = 5  # a floor is kept only if the mean client has this many times as much
_SCALE = 10  # otherwise the floor is this part of the mean client

Floats = npt.NDArray[np.float64]


@dataclass
class Draw:
    """What every way of drawing needs."""

    y: Int
    name: str
    kind: str
    value: float  # the concentration, or the number of classes a client
    clients: int
    classes: int
    rng: np.random.Generator
    max_tries: int
    info: dict[str, Any] = field(default_factory=dict)

    def lists(self, rows: Int | None = None) -> tuple[list[Int], Int]:
        """Return the rows (by default all) of every class, in their order, and their numbers."""
        rows = np.arange(len(self.y), dtype=np.int64) if rows is None else rows
        order = rows[np.argsort(self.y[rows], kind="stable")]
        sizes = np.bincount(self.y[rows], minlength=self.classes)
        return np.split(order, np.cumsum(sizes)[:-1]), sizes

    def mixed(self, lists: Sequence[Int]) -> list[Int]:
        """Shuffle each class."""
        return [self.rng.permutation(one) for one in lists]

    def whole_classes(self) -> int:
        """Return the number of classes a client, or say that there are fewer."""
        if self.value > self.classes:
            raise ConfigError(
                f"{self.name} asks for more classes a client than the {self.classes} there are; "
                "use a smaller number."
            )
        return int(self.value)

    def cut(self, lists: Sequence[Int], counts: Int) -> Ragged:
        """Hand out each class from the front: counts ``(classes, clients)``."""
        owner = np.concatenate(
            [np.repeat(np.arange(self.clients), row) for row in counts], dtype=np.int64
        )
        rows = np.concatenate([one[: row.sum()] for one, row in zip(lists, counts, strict=True)])
        return Ragged.from_owner(rows, owner, self.clients)


# ---------------------------------------------------------------------- protocol authors


def authors(
    draw: Draw, official: tuple[Int, Int], min_train: int | None, min_test: int | None
) -> tuple[Ragged, Ragged]:
    """Divide the official training and test samples by one matrix of class shares."""
    if draw.kind == "iid":
        return _even(draw, official[0]), _even(draw, official[1])
    floors = (
        _floor(draw, "min_train", min_train, _AUTHORS_TRAIN, len(official[0])),
        _floor(draw, "min_test", min_test, _AUTHORS_TEST, len(official[1])),
    )
    lists, sizes = zip(*(draw.lists(rows) for rows in official), strict=True)
    if draw.kind == "dirichlet":
        concentration = np.full(draw.clients, draw.value)

        def shares(tries: int) -> Floats:
            return draw.rng.dirichlet(concentration, size=(tries, draw.classes))
    else:
        takes = _greedy(draw, int(draw.clients * draw.value) // draw.classes)

        def shares(tries: int) -> Floats:
            parts: Floats = takes * draw.rng.uniform(0.3, 0.7, size=(tries, *takes.shape))
            return parts / parts.sum(-1, keepdims=True)

    def counts(tries: int) -> list[Int]:
        drawn = shares(tries)
        # The nudge keeps products that are whole numbers but for rounding noise.
        return [(drawn * size[:, None] + 1e-9).astype(np.int64) for size in sizes]

    train, test = _first(draw, counts, floors, f"{floors[0]} training and {floors[1]} test")
    return draw.cut(lists[0], train), draw.cut(lists[1], test)


def _greedy(draw: Draw, takers: int) -> npt.NDArray[np.bool_]:
    """Say which clients take which class: ``(classes, clients)``.

    Classes in order; each goes to the first ``takers`` clients that have room for a class.
    """
    wanted = draw.whole_classes()
    room = np.full(draw.clients, wanted)
    takes = np.zeros((draw.classes, draw.clients), dtype=np.bool_)
    for row in takes:
        row[np.flatnonzero(room > 0)[:takers]] = True
        room -= row
    if not takes.any(0).all():
        step = draw.classes // int(np.gcd(wanted, draw.classes))
        better = max(step, round(draw.clients / step) * step)
        raise FederationError(
            f"pathological:{wanted} leaves {int((~takes.any(0)).sum())} of {draw.clients} clients "
            f"without any class: each of the {draw.classes} classes goes to {takers} clients. "
            f"Use clients={better}, so that clients x classes a client is a multiple of "
            f"{draw.classes}, or protocol pfllib."
        )
    return takes


def _floor(draw: Draw, name: str, given: int | None, usual: int, samples: int) -> int:
    """Take the given floor, the protocol's, or a scaled one where data are few; note it."""
    mean = samples / draw.clients
    if given is None:
        value = usual if mean >= _ROOM * usual else max(min(1, samples), int(mean / _SCALE))
        value = min(usual, value)
        if value < usual:
            draw.info[f"{name}_note"] = (
                f"the protocol's {usual} was lowered to {value}: {samples} samples are "
                f"{mean:.0f} a client"
            )
    else:
        value = given
    if value < 0 or (name == "min_train" and value < 1):
        raise ConfigError(f"{name} must be >= {int(name == 'min_train')}, got {value}.")
    if value * draw.clients > samples:
        raise FederationError(
            f"{name}={value} for {draw.clients} clients needs {value * draw.clients} samples, but "
            f"there are {samples}; use at most {samples // max(value, 1)} clients or "
            f"{name}={samples // draw.clients}."
        )
    draw.info[name] = value
    return value


def _first(
    draw: Draw,
    counts: Callable[[int], Sequence[Int]],
    floors: Sequence[int],
    said: str,
) -> list[Int]:
    """Return the first draw in which every client has enough; tries are made in batches.

    ``counts`` draws so many matrices (classes, clients) for every floor.
    """
    batch = int(np.clip(2_000_000 // (draw.classes * draw.clients), 1, 64))
    tried, best = 0, 0
    while tried < draw.max_tries:
        batch = min(batch, draw.max_tries - tried)
        drawn = counts(batch)
        least = [one.sum(1).min(-1) for one in drawn]
        good = np.all([one >= floor for one, floor in zip(least, floors, strict=True)], axis=0)
        if good.any():
            at = int(np.argmax(good))
            draw.info["tries"] = tried + at + 1
            return [one[at] for one in drawn]
        tried, best = tried + batch, max(best, int(least[0].max()))
    raise FederationError(
        f"No draw of {draw.name} among {draw.clients} clients gave every client {said} samples "
        f"in {draw.max_tries} tries (in the best, the smallest client had {best} for training). "
        f"Use fewer clients, {'a larger concentration, ' if draw.kind == 'dirichlet' else ''}"
        "or a lower min_train or min_test."
    )


def _even(draw: Draw, rows: Int) -> Ragged:
    """Shuffle and deal out in near-equal numbers."""
    mixed = draw.rng.permutation(rows)
    if len(rows) < draw.clients:
        raise FederationError(
            f"{len(rows)} samples cannot be dealt to {draw.clients} clients; use fewer clients."
        )
    return Ragged.from_lists([np.sort(one) for one in np.array_split(mixed, draw.clients)])


# ---------------------------------------------------------------------- protocol pfllib


def pfllib(draw: Draw, min_train: int | None) -> Ragged:
    """Divide the merged samples; the split into train and test follows."""
    if draw.kind == "iid":
        return _even(draw, np.arange(len(draw.y), dtype=np.int64))
    mean = len(draw.y) / draw.clients
    least = int(min(10 / (1 - TRAIN_SHARE), mean / 2)) if min_train is None else min_train
    least = max(least, 1)
    draw.info["min_samples"] = least
    if least > mean:
        raise FederationError(
            f"min_train={least} for {draw.clients} clients needs {least * draw.clients} samples, "
            f"but there are {len(draw.y)}; lower it or use fewer clients."
        )
    lists, sizes = draw.lists()
    if draw.kind == "pathological":
        return draw.cut(lists, _pfllib_pathological(draw, sizes, least))
    (counts,) = _first(
        draw, lambda tries: [_pfllib_dirichlet(draw, sizes, tries)], [least], f"{least}"
    )
    return draw.cut(draw.mixed(lists), counts)


def _pfllib_dirichlet(draw: Draw, sizes: Int, tries: int) -> Int:
    """Draw counts ``(tries, classes, clients)``; a client at its fair size gets no more.

    A draw whose whole weight falls on full clients hands the class to no client, so that it is
    rejected unless every client has enough already.
    """
    counts = np.zeros((tries, draw.classes, draw.clients), dtype=np.int64)
    held = np.zeros((tries, draw.clients), dtype=np.int64)
    concentration = np.full(draw.clients, draw.value)
    for c, size in enumerate(sizes.tolist()):
        shares = draw.rng.dirichlet(concentration, size=tries)
        shares = shares * (held < len(draw.y) / draw.clients)
        total = shares.sum(-1, keepdims=True)
        shares = np.divide(shares, total, out=np.zeros_like(shares), where=total > 0)
        ends = (np.cumsum(shares, axis=-1) * size).astype(np.int64)
        ends[:, -1] = np.where(total[:, 0] > 0, size, 0)
        counts[:, c] = np.diff(np.minimum(ends, size), axis=-1, prepend=0)
        held += counts[:, c]
    return counts


def _pfllib_pathological(draw: Draw, sizes: Int, least: int) -> Int:
    """Draw counts: all takers but the last get a random number, the last one all the rest."""
    takes = _greedy(draw, int(np.ceil(draw.clients / draw.classes * draw.value)))
    counts = np.zeros(takes.shape, dtype=np.int64)
    for row, takers, size in zip(counts, takes, sizes.tolist(), strict=True):
        who = np.flatnonzero(takers)
        if len(who) == 0:
            continue  # every client has its classes already: the class is not used
        mean = size / len(who)
        if int(mean) < 1:
            raise FederationError(
                f"A class of {size} samples cannot be divided among {len(who)} clients; use fewer "
                "clients or fewer classes a client."
            )
        low = min(int(max(mean / 10, least / draw.classes)), int(mean) - 1)
        row[who[:-1]] = draw.rng.integers(low, int(mean), size=len(who) - 1)
        row[who[-1]] = size - row.sum()
    smallest = int(counts.sum(0).min())
    if smallest < 2:
        raise FederationError(
            f"The smallest client would have {smallest} samples, too few for training and test; "
            "use fewer clients."
        )
    return counts
