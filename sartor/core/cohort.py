"""The clients that participate in a round, drawn from (seed, round): the same in every engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sartor.core import rng
from sartor.core.errors import ConfigError


@dataclass(frozen=True)
class Participation:
    """A rule of participation.

    Attributes:
        kind: "all", "fraction", "number", or "at_least" (a size drawn uniformly from ⌈f·M⌉ .. M).
        value: the fraction f, or the number of clients.
    """

    kind: str = "all"
    value: float = 1.0

    @classmethod
    def parse(cls, rule: Participation | str | float) -> Participation:
        """Read ``1.0``, ``0.1`` (a fraction), ``10`` (a number), ``"all"`` or ``"at_least:0.6"``.

        >>> Participation.parse("at_least:0.6")
        Participation(kind='at_least', value=0.6)
        >>> Participation.parse(5)
        Participation(kind='number', value=5)
        """
        if isinstance(rule, Participation):
            return rule
        help_ = "use 'all', a fraction such as 0.1, a whole number such as 10, or 'at_least:0.6'"
        kind, value = "", rule
        if isinstance(rule, str):
            if rule == "all":
                return cls()
            kind, _, text = rule.rpartition(":")
            try:
                value = int(text) if text.isdigit() else float(text)
            except ValueError:
                raise ConfigError(f"Participation {rule!r} is not understood; {help_}.") from None
        if not isinstance(value, (int, float)) or kind not in ("", "at_least"):
            raise ConfigError(f"Participation {rule!r} is not understood; {help_}.")
        if kind == "" and isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ConfigError(f"Participation must be at least 1 client, got {value}; {help_}.")
            return cls("number", value)
        if not 0.0 < value <= 1.0:
            raise ConfigError(f"A share of clients must be in (0, 1], got {value}; {help_}.")
        if kind == "at_least":
            return cls("at_least", value)
        return cls() if value == 1.0 else cls("fraction", value)

    def slots(self, num_clients: int) -> int:
        """Return the largest cohort this rule can draw."""
        if self.kind == "fraction":
            return max(1, round(self.value * num_clients))
        if self.kind == "number":
            if self.value > num_clients:
                raise ConfigError(
                    f"Participation asks for {self.value:g} clients a round, but there are only "
                    f"{num_clients}; use a smaller number or 'all'."
                )
            return int(self.value)
        return num_clients

    def draw(self, seed: int, round_index: int, num_clients: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the cohort of a round.

        Returns:
            ids (slots,), distinct, in random order; and present (slots,), false for the absent
            clients that only pad a cohort of varying size.
        """
        slots = self.slots(num_clients)
        if self.kind == "all":
            return np.arange(num_clients), np.ones(num_clients, dtype=bool)
        key = rng.fold_host(rng.key(seed).numpy()[None], "cohort", round_index)

        def drawn(name: str) -> np.ndarray:
            return rng.fold_host(key, name)[0]

        order = rng.sample_host(drawn("who"), num_clients, slots)
        size = slots
        if self.kind == "at_least":
            least = max(1, math.ceil(self.value * num_clients - 1e-9))
            draw = float(rng.uniform(torch.from_numpy(drawn("size")), (1,), torch.float64)[0])
            size = least + int(draw * (num_clients - least + 1))
        return order, np.arange(slots) < size
