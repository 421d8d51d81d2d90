"""What an advice is about: kept beside it, so that it can be verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from sartor.adviser.features import View
from sartor.adviser.plan import Plan
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.theory.linear_models import Clients


@dataclass(frozen=True)
class Subject:
    """What an advice is about, for its verification.

    Attributes:
        federation: the data, with the features that the model takes.
        view: how the convex model sees them; None for a trial.
        clients: the clients' samples as a linear model has them; None for a trial.
        model: the network of a trial; None for the theory, where ``view`` has it.
        local: local training of a trial.
        rounds: of the recommendation, or of the trial.
        seed: of the runs.
        device: where to train.
        plans: steps and costs, by strategy; empty for a trial.
        centres: the exact global models, by strategy; empty for a trial.
    """

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
