"""Training without a number of rounds: until the validation loss stops falling.

| what | without ``rounds`` |
|---|---|
| stops | after PATIENCE evaluations whose validation loss is not below the best by LEAST of it |
| at most | CAP rounds |
| models | those of the best evaluation; those of the last, if states are in mapped files |
| judged on | the validation samples; if no client has any, HELD of each one's training samples |

What is held out for this depends on names and numbers of samples alone, so that all methods and all
seeds of one federation leave out the same samples. ``rounds=50`` is exactly 50, on all samples.
What cannot stop early (a search, a network) takes FIXED rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sartor.data.federation import Federation
from sartor.data.split import carve_val
from sartor.training.stopping import EarlyStopping

CAP = 100
PATIENCE = 10
LEAST = 0.01
HELD = 0.2
FIXED = 20


def rule(store: str) -> EarlyStopping:
    """Return when to stop; a copy of mapped states would fill the memory, so none is kept."""
    return EarlyStopping(patience=PATIENCE, min_share=LEAST, restore=store == "memory")


def with_validation(federation: Federation) -> Federation:
    """Hold validation samples out of the training samples, if no client has any."""
    if len(federation.val.rows):
        return federation
    train, val = carve_val(federation.train, federation.names, HELD, seed=0)
    info: dict[str, Any] = {**federation.info, "held_out_for_stopping": HELD}
    return replace(federation, train=train, val=val, info=info)
