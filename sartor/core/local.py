"""Local training: mini-batch SGD with momentum and weight decay, written once for every method.

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
| η_0, δ | local_lr, lr_decay | w ← w − η_t·v with η_t = η_0·δ^t·s(t) in round t; δ = 1 is steady |
| s | lr_schedule | steps, a cosine, a warm-up; see `sartor/core/schedule.py`. None is s = 1 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError, ContractError
from sartor.core.hyper import Hyper
from sartor.core.method import Batch, Phase, Site
from sartor.core.schedule import Schedule, parse
from sartor.core.task import grad
from sartor.core.tree import Tree

Objective = Callable[[Tree, Batch, Site], Any]
Pull = Callable[[Tree, Site], Mapping[str, tuple[Tensor | float, Tree]]]


@dataclass(frozen=True)
class Local:
    """How a client trains in a round.

    Attributes:
        epochs: passes over the client's training data.
        steps: mini-batch steps; when given, it replaces ``epochs``.
        batch: samples a batch; None takes all samples at once (full gradients).
        lr: default of the hyper-parameter ``local_lr``.
        momentum: default of the hyper-parameter ``momentum``; 0 leaves momentum out.
        weight_decay: default of the hyper-parameter ``weight_decay``; 0 leaves it out.
        clip_norm: default of the hyper-parameter ``clip_norm``, the longest gradient of a step
            before decay and momentum; 0 leaves clipping out. Models that are trained together are
            clipped apart.
        lr_decay: default of the hyper-parameter ``lr_decay``: what is left of ``local_lr`` after a
            round; 1 leaves it out.
        lr_schedule: how ``local_lr`` changes from round to round beside that, such as "cosine",
            "step:30:0.1" or "warmup:5+cosine"; None leaves it as it is. See `sartor/core/schedule.py`.
        keep_optimiser: whether momentum survives the round (else it starts at zero in every round).
        drop_last: whether the last incomplete batch of an epoch is dropped. A client with fewer
            samples than one batch still trains on the one batch it has.
    """

    epochs: int = 1
    steps: int | None = None
    batch: int | None = 32
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    keep_optimiser: bool = False
    drop_last: bool = False
    clip_norm: float = 0.0
    lr_decay: float = 1.0
    lr_schedule: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be right."""
        faults = [
            f"{name} must be a whole number >= 1, got {value!r}."
            for name, value in (
                ("epochs", self.epochs),
                ("steps", self.steps),
                ("batch", self.batch),
            )
            if value is not None and (not isinstance(value, int) or value < 1)
        ]
        specs = {
            "lr": LR,
            "momentum": MOMENTUM,
            "weight_decay": DECAY,
            "clip_norm": CLIP,
            "lr_decay": FADE,
        }
        faults += [f for k, spec in specs.items() if (f := spec.fault(k, float(getattr(self, k))))]
        if self.lr_schedule is not None:
            try:
                parse(self.lr_schedule)
            except ConfigError as error:
                faults.append(str(error))
        if faults:
            raise ConfigError("\n".join(faults))

    def over(self, rounds: int) -> Local:
        """Return the same for a run of so many rounds, which a schedule may have left open."""
        if self.lr_schedule is None:
            return self
        return replace(self, lr_schedule=str(parse(self.lr_schedule).over(rounds)))

    @property
    def _schedule(self) -> Schedule | None:
        return None if self.lr_schedule is None else parse(self.lr_schedule)

    @property
    def hyper(self) -> dict[str, Hyper]:
        """The hyper-parameters that local training brings to a method."""
        found = {"local_lr": Hyper(self.lr, LR.low, LR.high, LR.open_low, LR.note)}
        if self.momentum:
            found["momentum"] = Hyper(self.momentum, 0.0, 1.0, note=MOMENTUM.note)
        if self.weight_decay:
            found["weight_decay"] = Hyper(self.weight_decay, 0.0, note=DECAY.note)
        if self.clip_norm:
            found["clip_norm"] = Hyper(self.clip_norm, 0.0, note=CLIP.note)
        if self.lr_decay != 1.0:
            found["lr_decay"] = Hyper(self.lr_decay, 0.0, 1.0, open_low=True, note=FADE.note)
        return found

    def without_rate(self, owner: str) -> dict[str, Hyper]:
        """Return the hyper-parameters for a method that computes its own step size.

        Raises:
            ConfigError: ``lr_decay`` or ``lr_schedule`` is on, and there is no ``local_lr`` that
                it could act on.
        """
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
        )

    def fade(self, site: Site) -> Tensor | float:
        """Return δ^t s(t), what decay and schedule have left of the rate in this round."""
        left: Tensor | float = 1.0
        if self.lr_decay != 1.0:
            left = site.hyper["lr_decay"] ** site.round
        if self._schedule is not None:
            left = left * self._schedule.share(site.round, site.hyper["local_lr"].dtype)
        return left

    def rate(self, site: Site) -> Tensor:
        """Return η_t = η_0 δ^t s(t)."""
        rate: Tensor = site.hyper["local_lr"]
        steady = self.lr_decay == 1.0 and self._schedule is None
        return rate if steady else rate * self.fade(site)

    def clipped(self, slope: Tree, site: Site) -> Tree:
        """Return g · min(1, C/‖g‖), with the norm over all leaves; g itself to the bit if short."""
        if not self.clip_norm:
            return slope
        limit = site.hyper["clip_norm"]
        norm = tree.dot(slope, slope).sqrt()
        return tree.scale(slope, torch.where(limit > 0, limit / torch.maximum(norm, limit), 1.0))

    @property
    def keeps(self) -> bool:
        """Whether there is any optimiser state to keep between rounds."""
        return bool(self.momentum) and self.keep_optimiser

    def start(self, **trained: Tree) -> Tree:
        """Return the optimiser part of a new client's state, for the entries it trains."""
        return {"velocity": tree.zeros_like(trained)} if self.keeps else {}

    def kept(self, state: Tree) -> Tree:
        """Return the optimiser part of a client's state or work.

        What ``begin`` and ``finish`` hand over.
        """
        return {"velocity": state["velocity"]} if self.keeps else {}


LR = Hyper(0.01, 0.0, note="the step size of local training")
MOMENTUM = Hyper(0.0, 0.0, 1.0, note="the share of the last update that is kept")
DECAY = Hyper(0.0, 0.0, note="the pull of local training towards zero")
CLIP = Hyper(0.0, 0.0, note="the longest gradient of local training; 0 does not clip")
FADE = Hyper(
    1.0, 0.0, 1.0, open_low=True, note="what is left of local_lr after a round; 1 keeps it"
)


def descend(
    objective: Objective,
    local: Local,
    *,
    name: str = "train",
    over: tuple[str, ...] = ("params",),
    lr: str | dict[str, str] | Callable[[Tree, Site], Tensor] = "local_lr",
    steps: Callable[[Site], Tensor] | None = None,
    train: Callable[[str], bool] | None = None,
    aux: bool = False,
    after: Callable[[Tree, Site], Tree] | None = None,
    data: str = "train",
    pull: Pull | None = None,
) -> Phase:
    """Build the phase that descends an objective by SGD.

    Args:
        objective: ``(work, batch, site) -> 0-d loss``; with ``aux``, a pair (loss, changed entries
            of work).
        local: number of steps, batches and the optimiser.
        name: the phase's name and random stream. The main phase of every method is "train", so that
            all methods see the same batches and limit laws hold to the bit.
        over: the entries of ``work`` that are trained together.
        lr: the hyper-parameter that holds the rate, or one per entry, or a function of work and
            site that computes it. ``lr_decay`` and ``lr_schedule`` act on ``local_lr`` alone.
        steps: the number of steps as data; replaces that of ``local``.
        train: a predicate on leaf names; the others stay as they are.
        aux: whether the objective also returns entries of work to store.
        after: ``(work, site) -> work`` after every step, such as a projection.
        data: the split to train on.
        pull: ``(work, site) -> {entry: (λ, c)}``: adds (λ/2)‖work[entry] − c‖² over the trained
            leaves to the objective. Its slope λ(w − c) is known, so nothing is derived, and the
            sum of squares is never formed.
    """
    is_trained = train or (lambda _: True)

    def trained(work: Tree) -> Tree:
        return {entry: tree.select(work[entry], is_trained) for entry in over}

    def pulled(work: Tree, site: Site) -> Mapping[str, tuple[Tensor | float, Tree]]:
        found = {} if pull is None else pull(work, site)
        if not isinstance(found, Mapping) or not found.keys() <= set(over):
            keys = sorted(found) if isinstance(found, Mapping) else type(found).__name__
            raise ContractError(
                f"pull of the phase {name!r} must return {{entry: (strength, centre)}} for entries "
                f"that are trained, {sorted(over)}, got {keys}."
            )
        return found

    def drawn(now: Tree, strength: Tensor | float, centre: Tree) -> tuple[Tensor, Tree]:
        """Return λ as a tensor, and the trained leaves of the centre."""
        if not isinstance(strength, Tensor):
            strength = tree.leaves(now)[0].new_full((), strength)
        return strength, tree.select(centre, is_trained)

    def enter(work: Tree, site: Site) -> Tree:
        if not local.momentum or local.keeps:
            return work
        return {**work, "velocity": tree.zeros_like(trained(work))}

    def leave(work: Tree, site: Site) -> Tree:
        return work if local.keeps else {k: v for k, v in work.items() if k != "velocity"}

    def step(work: Tree, batch: Batch, site: Site) -> Tree:
        def loss(parts: Tree) -> Any:
            return objective({**work, **{k: {**work[k], **parts[k]} for k in over}}, batch, site)

        now = trained(work)
        slope, changes = grad(loss, has_aux=True)(now) if aux else (grad(loss)(now), {})
        pulls = {k: drawn(now[k], *at) for k, at in pulled(work, site).items()}
        at_once = not (local.clip_norm or local.weight_decay or local.momentum)
        if not at_once:
            for entry, (strength, centre) in pulls.items():
                slope[entry] = tree.add_difference(slope[entry], now[entry], centre, strength)
        if local.clip_norm:
            slope = {entry: local.clipped(slope[entry], site) for entry in over}
        if local.weight_decay:
            decay = site.hyper["weight_decay"]
            slope = tree.addcmul(slope, now, decay)
        if local.momentum:
            mu = site.hyper["momentum"]
            slope = tree.addcmul(slope, work["velocity"], mu)
            changes = {**changes, "velocity": slope}
        new = {}
        for entry in over:
            name_or_fn = lr[entry] if isinstance(lr, dict) else lr
            if name_or_fn == "local_lr":
                rate = local.rate(site)
            elif isinstance(name_or_fn, str):
                rate = site.hyper[name_or_fn]
            else:
                rate = name_or_fn(work, site)
            if at_once and entry in pulls:
                strength, centre = pulls[entry]
                moved = tree.pulled_step(now[entry], slope[entry], centre, rate, strength)
            else:
                moved = tree.addcmul(now[entry], slope[entry], -rate)
            new[entry] = {**work[entry], **moved}
        moved_on = {**work, **changes, **new}
        return moved_on if after is None else after(moved_on, site)

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
