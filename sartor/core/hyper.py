"""Sweepable hyper-parameters: a default, a legal range, and the tensors that a sweep is made of.

A hyper-parameter is a real number that enters the method as a 0-d tensor; a sweep is one more axis
of it, and a value per client (λ_i) yet another. Everything else (counts, sizes, names of variants)
is a static option.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sartor.core.errors import did_you_mean, refuse

Value = float | Sequence[float]
"""One number for all clients of a run, or one number per client."""


@dataclass(frozen=True)
class Hyper:
    """A sweepable hyper-parameter.

    Attributes:
        default: the value when none is given.
        low: the smallest legal value.
        high: the largest legal value.
        open_low: whether ``low`` itself is excluded.
        note: what the parameter does, and what its ends mean; shown in errors and listings.
        server: whether the server alone uses it, so that a value per client has no meaning.
    """

    default: float
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    note: str = ""
    server: bool = False

    def fault(self, name: str, value: float, where: str = "") -> str | None:
        """Return a sentence that says why ``value`` is illegal, or None."""
        bad_low = value <= self.low if self.open_low else value < self.low
        if math.isfinite(value) and not bad_low and value <= self.high:
            return None
        wanted = []
        if self.low > -math.inf:
            wanted.append(f"{'>' if self.open_low else '>='} {self.low:g}")
        if self.high < math.inf:
            wanted.append(f"<= {self.high:g}")
        rule = " and ".join(wanted) or "a finite number"
        return (
            f"{name} must be {rule}, got {value:g}{where}{f'; {self.note}' if self.note else ''}."
        )


def stack_hypers(
    specs: Mapping[str, Hyper],
    runs: Sequence[Mapping[str, Value]],
    num_clients: int,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Check the values of all runs and stack them.

    (runs,) per name, or (runs, clients) for per-client values.

    Raises:
        ConfigError: listing every unknown name and illegal value at once.
    """
    faults: list[str] = []
    for name in dict.fromkeys(name for run in runs for name in run):
        if name not in specs:
            faults.append(f"Unknown hyper-parameter {name!r}{did_you_mean(name, specs)}")
    for r, run in enumerate(runs):
        where = f" in run {r} of the sweep" if len(runs) > 1 else ""
        for name in specs.keys() & run.keys():
            value = run[name]
            if isinstance(value, Sequence) and specs[name].server:
                faults.append(
                    f"{name} belongs to the server, so it has one value for all clients{where}; "
                    f"got {len(value)} values."
                )
            elif isinstance(value, Sequence) and len(value) != num_clients:
                faults.append(
                    f"{name} has {len(value)} values{where}, but there are {num_clients} clients; "
                    "give one number, or one per client."
                )
            numbers = value if isinstance(value, Sequence) else [value]
            bad = (specs[name].fault(name, float(v), where) for v in numbers)
            faults.extend(fault for fault in bad if fault)
    refuse(faults)
    stacked = {}
    for name, spec in specs.items():
        values = [run.get(name, spec.default) for run in runs]
        if any(isinstance(v, Sequence) for v in values):
            rows = [list(v) if isinstance(v, Sequence) else [v] * num_clients for v in values]
            stacked[name] = torch.tensor(rows, dtype=dtype)
        else:
            stacked[name] = torch.tensor(values, dtype=dtype)
    return stacked
