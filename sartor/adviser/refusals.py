"""What the adviser refuses: values that cannot be right, and data the theory does not hold for."""

from __future__ import annotations

from torch import nn

from sartor.adviser.estimates import ENOUGH, Estimates, doubts
from sartor.adviser.features import View
from sartor.core.errors import ConfigError, FederationError
from sartor.data.federation import Federation
from sartor.theory.linear_models import Clients


def check(
    federation: Federation,
    budget_mb: float | None,
    budget_rounds: int | None,
    accuracy: float | None,
    rounds: int,
    draws: int,
    basis: str,
) -> None:
    """Refuse values of ``advise`` that cannot be right, all of them in one message."""
    if federation.num_clients < 2:
        raise FederationError(
            "Advice needs at least two clients, got one: with nobody to borrow from, the answer is "
            "to train alone, with the method local."
        )
    faults = [
        f"{name} must be positive, got {value:g}"
        + ("; leave it out for no limit." if name.startswith("budget") else ".")
        for name, value in (
            ("budget_mb", budget_mb),
            ("budget_rounds", budget_rounds),
            ("accuracy", accuracy),
            ("rounds", rounds),
        )
        if value is not None and not value > 0
    ]
    if draws < 0 or draws == 1:
        faults.append(f"draws must be at least 2, or 0 for no calibration, got {draws}.")
    if basis not in ("auto", "evidence", "theory", "trial"):
        faults.append(f"basis must be 'auto', 'evidence', 'theory' or 'trial', got {basis!r}.")
    if faults:
        raise ConfigError("\n".join(faults))


def refusal(federation: Federation, clients: Clients, found: Estimates) -> list[str]:
    """Say why the estimates cannot be trusted; nothing if they can."""
    each = doubts(clients, found.fits, found.noise)
    bad = [(name, why) for name, why in zip(federation.names, each, strict=True) if why]
    return _in_words(bad, len(each))


def too_few(federation: Federation, clients: Clients) -> list[str]:
    """Say before any fit which clients have fewer samples than the model has parameters."""
    if clients.ridge:
        return []
    p = clients.num_params
    bad = [
        (name, [f"has {n:.0f} samples for {p} parameters (at least {ENOUGH * p:.0f} are needed)"])
        for name, n in zip(federation.names, clients.sizes.tolist(), strict=True)
        if n < p
    ]
    return _in_words(bad, federation.num_clients)


def _in_words(bad: list[tuple[str, list[str]]], total: int) -> list[str]:
    if not bad:
        return []
    shown = "; ".join(f"{name} {' and '.join(why)}" for name, why in bad[:3])
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    return [
        f"the theory does not hold for {len(bad)} of {total} clients ({shown}{more}), so R̂ and "
        "the expected errors would be wrong."
    ]


def ways_out(
    federation: Federation, seen: View | None, model: nn.Module | None = None
) -> list[str]:
    """Say what would make the theory hold: fewer features, a ridge term, fewer clients."""
    ways: list[str] = []
    if seen is None:
        return ways
    least = float(federation.train.sizes.min())
    outputs = seen.num_classes - 1 if seen.family == "softmax" else 1
    keep = int(least // (ENOUGH * outputs)) - 1
    width = seen.federation.input_shape[0] - 1
    if 1 <= keep < width:
        ways.append(f"fewer features, features='pca:{keep}', suit the smallest client.")
    if not seen.ridge:
        ways.append(
            "a ridge term, such as ridge=0.1, makes every fit exist (R is then that of the ridge "
            "solutions)."
        )
    small = [
        name
        for name, size in zip(federation.names, federation.train.sizes.tolist(), strict=True)
        if size < ENOUGH * outputs * 2
    ]
    if small and len(small) < federation.num_clients - 1:
        ways.append(f"leave out clients with very few samples ({', '.join(small[:5])}).")
    if model is None:
        ways.append(
            "a trained network that is frozen up to a linear head with few inputs, as model= (see "
            "sartor.models.pretrained)."
        )
    return ways
