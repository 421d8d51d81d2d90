"""What an advice is about: kept beside it, so that it can be verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from sartor.adviser.features import View
from sartor.adviser.plan import Plan
from sartor.data.federation import Federation
from sartor.local import Local
from sartor.theory.linear_models import Clients


@dataclass(frozen=True)
class Subject:
    """What an advice is about, for its verification."""

    federation: Federation
    view: View | None
    clients: Clients | None
    model: nn.Module | None
    local: Local | None
    rounds: int
    seed: int
    device: str
    plans: dict[str, Plan] = field(default_factory=dict)
    centres: dict[str, Tensor] = field(default_factory=dict)
