"""What pFedMe and pFedBreD share: proximal solves on one batch after the other, and steps of w."""

from __future__ import annotations

from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local


def check_proximal(name: str, local: Local, prox_steps: int) -> None:
    """Refuse what a proximal solve of K plain steps cannot honour."""
    local.only_sgd(name, "takes plain gradient steps")
    faults = below(1, "the paper takes 5.", prox_steps=prox_steps)
    if local.momentum:
        faults.append(
            f"{name} takes plain gradient steps, so it has no use for momentum={local.momentum:g}; "
            "set momentum = 0."
        )
    refuse(faults)


def proximal_hyper(local: Local) -> dict[str, Hyper]:
    """Return the hyper-parameters of a method that alternates proximal solves and steps of w."""
    return {
        **local.hyper,
        "prox_strength": Hyper(15.0, 0.0, note="0 leaves the global model where it is"),
        "personal_lr": Hyper(
            0.05, 0.0, note="the step of the proximal solve; keep it below 2/(prox_strength + L)"
        ),
        "relax": Hyper(1.0, 0.0, note="1 is plain averaging, 2 is the AM trick", server=True),
    }
