"""Aggregation that a few bad uploads cannot carry away, for every method that averages.

A method says in `Wire.averaged` which branches of its uploads enter the server through a weighted
mean alone. `robust` puts one and the same tree u* into the place of these branches in all slots, so
that any weighted mean of them is u*, whatever the weights (``clip`` changes each slot on its own):

| rule | u* of the n present uploads u_i, at most f = ⌊share · n⌋ of them bad |
|---|---|
| median | the median of every coordinate |
| trimmed_mean | of every coordinate, the mean without the f lowest and the f highest values |
| krum | the u_i with the smallest sum of ‖u_i − u_j‖² over its n − f − 2 nearest j |
| multi_krum | the mean of the n − f uploads that are best by the same sum |
| clip | u_i ← c + (u_i − c) · min(1, τ / ‖u_i − c‖), c the median and τ the median of ‖u_i − c‖ |

Yin et al., Byzantine-Robust Distributed Learning, ICML 2018 (median, trimmed mean); Blanchard et
al., Machine Learning with Adversaries, NeurIPS 2017 (Krum); Karimireddy et al., Learning from
History, ICML 2021 (clipping around a centre, with their centre replaced by the median).

With ``mix`` every upload is first replaced by the mean of the n − f uploads nearest to it, itself
among them (nearest-neighbour mixing; Allouah et al., Fixing by Mixing, AISTATS 2023). The bad ones
are far from the good ones or harmless, so good uploads mix with good ones, and what a rule then
selects or trims is an average already: where Krum alone ends with the model of one client, it ends
with the mean of n − f of them. Krum therefore mixes by default. Ties go to the client with the
smallest number, as in Krum's paper; without mixing they are common, as two clients that are each
other's nearest are equally near.

These rules do not weigh clients by their samples, and where clients differ much they also push away
what is merely different; hence an option, and off unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.method import Method, ServerContext, changed
from sartor.core.mixing import at
from sartor.core.tree import Tree

Rule = Literal["none", "median", "trimmed_mean", "krum", "multi_krum", "clip"]


def robust(method: Method, rule: Rule, share: float = 0.2, mix: bool | None = None) -> Method:
    """Let the server of a method average robustly.

    Args:
        method: a method that averages.
        rule: see the table above; "none" changes nothing.
        share: the share of the present clients that may be bad, below one half.
        mix: whether every upload is mixed with its nearest neighbours first; by default for Krum
            alone, which otherwise takes over the model of a single client.

    Raises:
        ConfigError: the method does not average, or the share is out of range.
    """
    if rule == "none":
        return method
    if not 0.0 <= share < 0.5:
        raise ConfigError(
            f"robust_share must be in [0, 0.5), got {share}; no rule withstands a bad majority."
        )
    if not method.wire.averaged:
        raise ConfigError(
            f"{method.name} does not average the uploads of its clients, so robust={rule!r} has "
            "no meaning for it; use a method that does, such as fedavg, ditto or fedper."
        )
    pick = _RULES[rule]
    mixes = rule == "krum" if mix is None else mix

    def wrap(record: Method) -> Method:
        if not record.wire.averaged:
            return record

        def aggregate(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
            # Ties go to the smallest number of a client; slots are ordered by local work.
            order = server_ctx.cohort.argsort()
            branch = {k: v for k, v in uploads.items() if k in record.wire.averaged}
            branch = tree.map(lambda leaf: leaf.index_select(0, order), branch)
            there = server_ctx.present.index_select(0, order)
            if mixes:
                branch, there = mixed(branch, there, share)
            picked, back = pick(branch, there, share), order.argsort()
            picked = tree.map(lambda leaf: leaf.index_select(0, back), picked)
            return record.aggregate(server, {**uploads, **picked}, server_ctx)

        return changed(record, aggregate=aggregate)

    warm = method.schedule.first
    return changed(
        wrap(method),
        before=None if method.schedule.before is None else wrap(method.schedule.before),
        first=None if warm is None else replace(warm, method=wrap(warm.method)),
    )


def coordinate_median(uploads: Tree, present: Tensor, share: float = 0.0) -> Tree:
    """Return the median of every coordinate over the present slots, in all slots."""
    num = present.sum()

    def one(leaf: Tensor) -> Tensor:
        ranked = _ranked(leaf, present)
        low, high = ((num - 1).clamp(min=0) // 2, num // 2)
        middle = 0.5 * (at(ranked, low) + at(ranked, high.clamp(max=leaf.shape[0] - 1)))
        return middle.expand_as(leaf)

    return tree.map(one, uploads)


def trimmed_mean(uploads: Tree, present: Tensor, share: float) -> Tree:
    """Return the mean of every coordinate without its lowest and highest values, in all slots."""
    num = present.sum()
    cut = _bad(num, share)

    def one(leaf: Tensor) -> Tensor:
        ranked = _ranked(leaf, present)
        rank = torch.arange(leaf.shape[0], device=leaf.device)
        inside = _tall((rank >= cut) & (rank < num - cut), leaf)
        total = torch.where(inside, ranked, 0.0).sum(0)
        return (total / (num - 2 * cut).clamp(min=1)).expand_as(leaf)

    return tree.map(one, uploads)


def krum(uploads: Tree, present: Tensor, share: float) -> Tree:
    """Return the upload with the closest neighbours, in all slots."""
    best = _crowding(uploads, present, share).argmin()
    return tree.map(lambda leaf: at(leaf, best).expand_as(leaf), uploads)


def multi_krum(uploads: Tree, present: Tensor, share: float) -> Tree:
    """Return the mean of the n − f uploads with the closest neighbours, in all slots."""
    num = present.sum()
    order = torch.argsort(_crowding(uploads, present, share), dim=0, stable=True)
    rank = torch.argsort(order, dim=0)
    chosen = (rank < num - _bad(num, share)) & present

    def one(leaf: Tensor) -> Tensor:
        kept = torch.where(_tall(chosen, leaf), leaf, 0.0)
        return (kept.sum(0) / chosen.sum().clamp(min=1)).expand_as(leaf)

    return tree.map(one, uploads)


def clipped(uploads: Tree, present: Tensor, share: float = 0.0) -> Tree:
    """Pull every upload to the median until it is no farther from it than the median upload."""
    centre = coordinate_median(uploads, present)
    off = tree.sub(uploads, centre)
    squares = [leaf.square().reshape(leaf.shape[0], -1).sum(1) for leaf in tree.leaves(off)]
    far = torch.stack(squares).sum(0).sqrt()
    bound = coordinate_median({"far": far}, present)["far"]
    factor = (bound / far.clamp(min=torch.finfo(far.dtype).tiny)).clamp(max=1.0)

    def one(middle: Tensor, away: Tensor) -> Tensor:
        moved = away * _tall(factor, away)
        return middle + torch.where(torch.isfinite(moved), moved, 0.0)

    return tree.map(one, centre, off)


def mixed(uploads: Tree, present: Tensor, share: float) -> tuple[Tree, Tensor]:
    """Replace every upload by the mean of the n − f nearest to it, itself among them.

    Returns:
        the mixtures, and the slots that have one: present ones whose numbers are all finite.
    """
    sound = present & torch.isfinite(tree.flat(uploads, 1)).all(1)
    num = sound.sum()
    apart = torch.where(sound[:, None] & sound, _distances(uploads, sound), torch.inf)
    rank = torch.argsort(torch.argsort(apart, dim=1, stable=True), dim=1)
    near = (rank < num - _bad(num, share)) & sound

    def one(leaf: Tensor) -> Tensor:
        flat = torch.where(sound[:, None], leaf.reshape(leaf.shape[0], -1), 0.0)
        weight = near.to(flat.dtype)
        mean = weight @ flat / weight.sum(1, keepdim=True).clamp(min=1)
        return mean.reshape(leaf.shape)

    return tree.map(one, uploads), sound


def _distances(uploads: Tree, present: Tensor) -> Tensor:
    """Return squared distances between the uploads of all slots; the absent count as zeros."""
    rows = torch.where(present[:, None], tree.flat(uploads, 1), 0.0)
    # Differences, not a Gram matrix: a huge row would drown the others' distances in rounding.
    return torch.stack([(rows - row).square().sum(1) for row in rows.unbind(0)])


def _crowding(uploads: Tree, present: Tensor, share: float) -> Tensor:
    """Return each slot's sum of squared distances to its n − f − 2 nearest; infinite if absent."""
    apart = _distances(uploads, present)
    same = torch.eye(len(apart), dtype=torch.bool, device=apart.device)
    known = present[:, None] & present & ~same & torch.isfinite(apart)
    nearest = torch.sort(torch.where(known, apart, torch.inf), dim=1).values
    num = present.sum()
    few = (num - _bad(num, share) - 2).clamp(min=1)
    counted = torch.arange(len(apart), device=apart.device) < few
    score = torch.where(counted, nearest, 0.0).sum(1)
    return torch.where(present, torch.where(num == 1, 0.0, score), torch.inf)


def _bad(num: Tensor, share: float) -> Tensor:
    # In double precision: share · 150 must not fall below a whole number by rounding.
    return (num.double() * share + 1e-9).floor().to(num.dtype)


def _ranked(leaf: Tensor, present: Tensor) -> Tensor:
    """Sort the slots of every coordinate; the absent, and what is not a number, come last."""
    there = _tall(present, leaf) & ~torch.isnan(leaf)
    return torch.sort(torch.where(there, leaf, torch.inf), dim=0).values


def _tall(values: Tensor, leaf: Tensor) -> Tensor:
    return values.reshape((-1,) + (1,) * (leaf.dim() - 1))


_RULES: dict[str, Callable[[Tree, Tensor, float], Tree]] = {
    "median": coordinate_median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "clip": clipped,
}
