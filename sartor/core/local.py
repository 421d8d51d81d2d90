"""Local training: mini-batch SGD with momentum, Adam and AdamW, written once for every method.

``Local`` holds what is static about it (how long, which batches, whether the optimiser survives the
round); the real numbers (rate, momentum, decay, clipping) are sweepable hyper-parameters.
``descend`` turns an objective into a phase: the objective is written once, and its gradient is
derived.

| symbol | here | meaning |
|---|---|---|
| g | slope | the gradient of the objective |
| C | clip_norm | g ← g · min(1, C/‖g‖), ‖·‖ over all trained leaves of an entry of work; 0 is off |
| d | weight_decay | g ← g + d·w |
| m, v | momentum, velocity | v ← m·v + g |
| β, u, k | betas, square, taken | Adam: k ← k + 1, v ← β₁v + (1−β₁)g, u ← β₂u + (1−β₂)g² |
| ε | eps | Adam: w ← w − η_t/(1−β₁^k) · v / (√u/√(1−β₂^k) + ε); AdamW: w ← (1 − η_t·d)w before |
| η_0, δ | local_lr, lr_decay | w ← w − η_t·v with η_t = η_0·δ^t·s(t) in round t; δ = 1 is steady |
| s | lr_schedule | steps, a cosine, a warm-up; see `sartor/core/schedule.py`. None is s = 1 |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError, ContractError, did_you_mean, refuse
from sartor.core.hyper import Hyper
from sartor.core.method import Batch, ClientContext, Phase
from sartor.core.schedule import Schedule, parse
from sartor.core.task import Task, grad
from sartor.core.tree import Tree

Objective = Callable[[Tree, Batch, ClientContext], Any]


@dataclass(frozen=True)
class Local:
    """How a client trains in a round.

    Attributes:
        epochs: passes over the client's training data.
        steps: mini-batch steps; when given, it replaces ``epochs``.
        batch: samples a batch; None takes all samples at once (full gradients).
        lr: default of the hyper-parameter ``local_lr``: 0.1, with Adam 0.001, if left out.
        momentum: default of the hyper-parameter ``momentum``; 0 leaves momentum out.
        weight_decay: default of the hyper-parameter ``weight_decay``; 0 leaves it out.
        clip_norm: default of the hyper-parameter ``clip_norm``, the longest gradient of a step
            before decay and momentum; 0 leaves clipping out. Models that are trained together are
            clipped apart, those of a stack too.
        lr_decay: default of the hyper-parameter ``lr_decay``: what is left of ``local_lr`` after a
            round; 1 leaves it out.
        lr_schedule: how ``local_lr`` also changes from round to round, such as "cosine",
            "step:30:0.1" or "warmup:5+cosine"; None leaves it as it is. See
            `sartor/core/schedule.py`.
        keep_optimiser: whether momentum, or what Adam remembers, survives the round as a private
            state of the client (else it starts at zero in every round).
        drop_last: whether the last incomplete batch of an epoch is dropped. A client with fewer
            samples than one batch still trains on the one batch it has.
        optimizer: "sgd", "adam" or "adamw", as torch.optim has them.
        betas: of Adam: how much is kept of the mean slope and of its mean square.
        eps: of Adam: what is added to the root of the mean square.
    """

    epochs: int = 5
    steps: int | None = None
    batch: int | None = 10
    lr: float = None  # type: ignore[assignment]  # follows from the optimizer
    momentum: float = 0.0
    weight_decay: float = 0.0
    keep_optimiser: bool = False
    drop_last: bool = False
    clip_norm: float = 0.0
    lr_decay: float = 1.0
    lr_schedule: str | None = None
    optimizer: str = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    later: ClassVar[dict[str, Any]] = {
        "optimizer": "sgd",
        "betas": [0.9, 0.999],
        "eps": 1e-8,
    }

    def __post_init__(self) -> None:
        """Refuse what cannot be right."""
        if self.optimizer not in RATES:
            hint = did_you_mean(str(self.optimizer), RATES)
            raise ConfigError(f"Unknown optimizer {self.optimizer!r}{hint}")
        object.__setattr__(self, "lr", RATES[self.optimizer] if self.lr is None else self.lr)
        object.__setattr__(self, "betas", tuple(self.betas))
        faults = [
            f"{name} must be a whole number >= 1, got {value!r}."
            for name, value in (
                ("epochs", self.epochs),
                ("steps", self.steps),
                ("batch", self.batch),
            )
            if value is not None and (not isinstance(value, int) or value < 1)
        ]
        numbers = {"lr": LR, **OPTIONAL}.items()
        faults += [f for k, spec in numbers if (f := spec.fault(k, float(getattr(self, k))))]
        if self.adapts and self.momentum:
            faults.append(
                f"momentum is of SGD, got {self.momentum:g} with optimizer={self.optimizer!r}; "
                "leave it out: Adam keeps betas[0] of the mean slope."
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            faults.append(f"betas must be two numbers >= 0 and < 1, got {self.betas!r}.")
        if not self.eps >= 0:
            faults.append(f"eps must be >= 0, got {self.eps!r}.")
        if self.lr_schedule is not None:
            try:
                parse(self.lr_schedule)
            except ConfigError as error:
                faults.append(str(error))
        refuse(faults)

    def over(self, rounds: int) -> Local:
        """Return the same for a run of so many rounds, which a schedule may have left open."""
        if self.lr_schedule is None:
            return self
        return replace(self, lr_schedule=str(parse(self.lr_schedule).over(rounds)))

    @property
    def adapts(self) -> bool:
        """Whether steps are those of Adam or AdamW."""
        return self.optimizer != "sgd"

    def only_sgd(self, owner: str, why: str) -> None:
        """Refuse Adam for a method whose formulas hold for steps of SGD."""
        if self.adapts:
            raise ConfigError(
                f"{owner} {why}, so optimizer={self.optimizer!r} does not go with it; leave "
                "optimizer out, or take a method such as fedavg, ditto or fedprox."
            )

    def one_past(self, owner: str) -> None:
        """Refuse to keep Adam's state for a method whose leaves are not all trained together.

        Adam counts its steps once for all of them.
        """
        if self.adapts and self.keep_optimiser:
            raise ConfigError(
                f"{owner} does not train all leaves at all times, and Adam counts its steps for "
                "all; leave keep_optimiser out, so that it starts anew in every round."
            )

    @property
    def _schedule(self) -> Schedule | None:
        return None if self.lr_schedule is None else parse(self.lr_schedule)

    @property
    def hyper(self) -> dict[str, Hyper]:
        """The hyper-parameters that local training brings to a method."""
        given = {k: replace(spec, default=getattr(self, k)) for k, spec in OPTIONAL.items()}
        on = {k: spec for k, spec in given.items() if spec.default != OPTIONAL[k].default}
        return {"local_lr": replace(LR, default=self.lr), **on}

    def without_rate(self, owner: str) -> dict[str, Hyper]:
        """Return the hyper-parameters for a method that computes its own step size.

        Raises:
            ConfigError: ``lr_decay`` or ``lr_schedule`` is on, and there is no ``local_lr`` that
                it could act on.
        """
        self.only_sgd(owner, "computes its own step size")
        on = {"lr_decay": self.lr_decay != 1.0, "lr_schedule": self.lr_schedule is not None}
        for name in (name for name, given in on.items() if given):
            raise ConfigError(
                f"{owner} computes its own step size, so {name} has nothing to act on; leave "
                f"{name} out, or take a preset with a local_lr."
            )
        return {name: spec for name, spec in self.hyper.items() if name != "local_lr"}

    @property
    def plain(self) -> Local:
        """The same batches with plain steps, for what is learnt beside the model."""
        return replace(
            self,
            momentum=0.0,
            weight_decay=0.0,
            clip_norm=0.0,
            lr_decay=1.0,
            lr_schedule=None,
            keep_optimiser=False,
            optimizer="sgd",
        )

    def fade(self, ctx: ClientContext) -> Tensor | float:
        """Return δ^t s(t), what decay and schedule have left of the rate."""
        left: Tensor | float = 1.0
        if self.lr_decay != 1.0:
            left = ctx.hyper["lr_decay"] ** ctx.rate_round
        if self._schedule is not None:
            left = left * self._schedule.share(ctx.rate_round, ctx.hyper["local_lr"].dtype)
        return left

    def rate(self, ctx: ClientContext) -> Tensor:
        """Return η_t = η_0 δ^t s(t)."""
        rate: Tensor = ctx.hyper["local_lr"]
        steady = self.lr_decay == 1.0 and self._schedule is None
        return rate if steady else rate * self.fade(ctx)

    def clipped(self, slope: Tree, ctx: ClientContext) -> Tree:
        """Return g · min(1, C/‖g‖), with the norm over all leaves; g itself to the bit if short."""
        if not self.clip_norm:
            return slope
        limit = ctx.hyper["clip_norm"]
        norm = tree.dot(slope, slope).sqrt()
        return tree.scale(slope, torch.where(limit > 0, limit / torch.maximum(norm, limit), 1.0))

    def clipped_apart(self, slopes: Tree, ctx: ClientContext) -> Tree:
        """Return the slopes of models on a leading axis, each clipped by itself."""
        number = tree.leaves(slopes)[0].shape[0]
        each = (tree.map(lambda leaf, m=m: leaf[m], slopes) for m in range(number))
        found: Tree = tree.stack([self.clipped(slope, ctx) for slope in each])
        return found

    @property
    def remembers(self) -> tuple[str, ...]:
        """What an optimiser remembers for every number that it trains: entries of work."""
        if self.adapts:
            return ("velocity", "square")
        return ("velocity",) if self.momentum else ()

    @property
    def keeps(self) -> bool:
        """Whether there is any optimiser state to keep between rounds."""
        return bool(self.remembers) and self.keep_optimiser

    def start(self, **trained: Tree) -> Tree:
        """Return the optimiser part of a new client's state, for the entries it trains."""
        return self.fresh(trained) if self.keeps else {}

    def fresh(self, trained: Tree) -> Tree:
        """Return what an optimiser remembers before its first step."""
        new: Tree = {name: tree.zeros_like(trained) for name in self.remembers}
        return {**new, "taken": tree.leaves(trained)[0].new_zeros(())} if self.adapts else new

    def kept(self, state: Tree) -> Tree:
        """Return the optimiser part of a client's state or work.

        What ``begin`` and ``finish`` hand over.
        """
        return {k: state[k] for k in (*self.remembers, *TAKEN) if k in state} if self.keeps else {}

    def adapted(self, work: Tree, slope: Tree) -> tuple[Tree, Tree, Tensor]:
        """Return what Adam remembers after a slope, its direction, and how much longer steps are.

        A round's k is small and β₂ almost 1, so 1 − β^k is formed without cancellation.
        """
        first, second = self.betas
        taken = work["taken"] + 1.0

        def missing(beta: float) -> Tensor:
            return -torch.expm1(taken * math.log(beta)) if beta else torch.ones_like(taken)

        velocity = tree.map(lambda v, g: v + (1.0 - first) * (g - v), work["velocity"], slope)
        square = tree.map(lambda u, g: second * u + (1.0 - second) * g * g, work["square"], slope)
        root = missing(second).sqrt()
        direction = tree.map(lambda v, u: v / (u.sqrt() / root + self.eps), velocity, square)
        kept = {"velocity": velocity, "square": square, "taken": taken}
        return kept, direction, 1.0 / missing(first)


RATES = {"sgd": 0.1, "adam": 0.001, "adamw": 0.001}
"""The optimizers, and the rate of each if none is given."""

TAKEN = ("taken",)
"""The number of steps that Adam has taken: one number for all that it trains."""

LR = Hyper(0.01, 0.0, note="the step size of local training")
OPTIONAL = {
    "momentum": Hyper(0.0, 0.0, 1.0, note="the share of the last update that is kept"),
    "weight_decay": Hyper(0.0, 0.0, note="the pull of local training towards zero"),
    "clip_norm": Hyper(0.0, 0.0, note="the longest gradient of local training; 0 does not clip"),
    "lr_decay": Hyper(1.0, 0.0, 1.0, True, "what is left of local_lr after a round; 1 keeps it"),
}
"""Hyper-parameters that a method has only where they differ from these defaults."""


def descend(
    task: Task,
    local: Local,
    objective: Objective | None = None,
    *,
    name: str = "train",
    over: tuple[str, ...] = ("params",),
    lr: str | dict[str, str] | Callable[[Tree, ClientContext], Tensor] = "local_lr",
    steps: Callable[[ClientContext], Tensor] | None = None,
    train: Callable[[str], bool] | None = None,
    aux: bool = False,
    after: Callable[[Tree, ClientContext], Tree] | None = None,
    data: str = "train",
    stacked: bool = False,
) -> Phase:
    """Build the phase that descends an objective by SGD or Adam.

    Args:
        task: the network and its loss.
        local: number of steps, batches and the optimiser.
        objective: ``(work, batch, ctx) -> 0-d loss``, whose gradient is derived; with ``aux``, a
            pair (loss, changed entries of work). If None, the plain loss of the trained entries:
            ``task.loss(work["params"], batch)``. A proximal term is added as :func:`half_square`.
        name: the phase's name and random stream. The main phase of every method is "train", so that
            all methods see the same batches and limit laws hold to the bit.
        over: the entries of ``work`` that are trained together.
        lr: the hyper-parameter that holds the rate, or one per entry, or a function of work and
            context that computes it. ``lr_decay`` and ``lr_schedule`` act on ``local_lr`` alone.
        steps: the number of steps as data; replaces that of ``local``.
        train: a predicate on leaf names; the others stay as they are.
        aux: whether the objective also returns entries of work to store.
        after: ``(work, ctx) -> work`` after every step, such as a projection.
        data: the split to train on.
        stacked: whether the entries are models on a leading axis, which are clipped apart.
    """
    is_trained = train or (lambda _: True)

    def plain(work: Tree, batch: Batch, ctx: ClientContext) -> Any:
        first, *others = (task.loss(work[entry], batch) for entry in over)
        return sum(others, start=first)

    def trained(work: Tree) -> Tree:
        return {entry: tree.select(work[entry], is_trained) for entry in over}

    def enter(work: Tree, ctx: ClientContext) -> Tree:
        if not local.remembers or local.keeps:
            return work
        return {**work, **local.fresh(trained(work))}

    def leave(work: Tree, ctx: ClientContext) -> Tree:
        if local.keeps:
            return work
        return {k: v for k, v in work.items() if k not in (*local.remembers, *TAKEN)}

    def slope_of(work: Tree, now: Tree, batch: Batch, ctx: ClientContext) -> tuple[Tree, Tree, Any]:
        """Return the derived slope, changed entries of work, and the pulls: {entry: (λ, c)}."""
        terms: dict[str, tuple[Tensor | float, Tree]] = {}

        def loss(parts: Tree) -> Any:
            moving = {entry: {**work[entry], **parts[entry]} for entry in over}
            found = (objective or plain)({**work, **moving}, batch, ctx)
            value, changes = found if aux else (found, {})
            if isinstance(value, Penalised):
                # λ and c do not depend on what is trained, so they may leave the derivative.
                terms.update(value.by_entry(moving, name))
                value = value.loss
            return (value, changes) if aux else value

        slope, changes = grad(loss, has_aux=True)(now) if aux else (grad(loss)(now), {})
        pulls = {}
        for entry, (lam, centre) in terms.items():
            strength = lam
            if not isinstance(lam, Tensor):
                strength = tree.leaves(now[entry])[0].new_full((), lam)
            pulls[entry] = strength, tree.select(centre, is_trained)
        return slope, changes, pulls

    def step(work: Tree, batch: Batch, ctx: ClientContext) -> Tree:
        now = trained(work)
        slope, changes, pulls = slope_of(work, now, batch, ctx)
        at_once = not (local.clip_norm or local.weight_decay or local.remembers)
        if not at_once:
            for entry, (strength, centre) in pulls.items():
                slope[entry] = tree.add_difference(slope[entry], now[entry], centre, strength)
        if local.clip_norm:
            clip = local.clipped_apart if stacked else local.clipped
            slope = {entry: clip(slope[entry], ctx) for entry in over}
        shrinks = local.weight_decay and local.optimizer == "adamw"
        if local.weight_decay and not shrinks:
            slope = tree.addcmul(slope, now, ctx.hyper["weight_decay"])
        longer: Tensor | float = 1.0
        if local.adapts:
            remembered, slope, longer = local.adapted(work, slope)
            changes = {**changes, **remembered}
        elif local.momentum:
            slope = tree.addcmul(slope, work["velocity"], ctx.hyper["momentum"])
            changes = {**changes, "velocity": slope}
        new = {}
        for entry in over:
            name_or_fn = lr[entry] if isinstance(lr, dict) else lr
            if name_or_fn == "local_lr":
                rate = local.rate(ctx)
            elif isinstance(name_or_fn, str):
                rate = ctx.hyper[name_or_fn]
            else:
                rate = name_or_fn(work, ctx)
            if shrinks:
                now[entry] = tree.scale(now[entry], 1.0 - rate * ctx.hyper["weight_decay"])
            if local.adapts:
                rate = rate * longer
            if at_once and entry in pulls:
                strength, centre = pulls[entry]
                moved = tree.pulled_step(now[entry], slope[entry], centre, rate, strength)
            else:
                moved = tree.addcmul(now[entry], slope[entry], -rate)
            new[entry] = {**work[entry], **moved}
        moved_on = {**work, **changes, **new}
        return moved_on if after is None else after(moved_on, ctx)

    return Phase(
        name=name,
        step=step,
        enter=enter,
        leave=leave,
        data=data,
        epochs=local.epochs,
        steps=steps or local.steps,
        batch=local.batch,
        drop_last=local.drop_last,
    )


@dataclass(frozen=True)
class Penalised:
    """A loss and proximal terms, as an objective adds them up; see :func:`half_square`."""

    loss: Any
    terms: tuple[tuple[Tensor | float, Tree, Tree], ...]

    def __add__(self, other: Any) -> Penalised:
        """Add another loss, or another term."""
        loss, terms = (other.loss, other.terms) if isinstance(other, Penalised) else (other, ())
        known = [value for value in (self.loss, loss) if value is not None]
        return Penalised(sum(known[1:], start=known[0]) if known else None, self.terms + terms)

    __radd__ = __add__

    def by_entry(
        self, trained: dict[str, Tree], phase: str
    ) -> dict[str, tuple[Tensor | float, Tree]]:
        """Return λ and c of the terms by the entry of work that each is a distance of.

        Args:
            trained: the entries that are trained, as the objective received them.
            phase: the name of the phase, for errors.
        """
        found: dict[str, tuple[Tensor | float, Tree]] = {}
        for strength, params, centre in self.terms:
            entries = [entry for entry, value in trained.items() if value is params]
            if not entries or entries[0] in found:
                raise ContractError(
                    f"half_square in the phase {phase!r} takes a trained entry of work as it is, "
                    f"work[...] with one of {sorted(trained)}, each once; for anything else write "
                    "0.5 * strength * tree.sqdist(...)."
                )
            found[entries[0]] = (strength, centre)
        return found


def half_square(strength: Tensor | float, params: Tree, centre: Tree) -> Any:
    """Return (λ/2)‖w − c‖² over the trained leaves, as a term of an objective of ``descend``.

    Its slope λ(w − c) is known, so it is added to the derived one, and the sum of squares is never
    formed.

    Args:
        strength: λ, 0-d.
        params: w, a trained entry of work.
        centre: c, which does not depend on what is trained.
    """
    return Penalised(None, ((strength, params, centre),))
