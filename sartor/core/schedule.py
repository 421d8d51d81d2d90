"""How the local rate changes from round to round: one line of text, one factor per round.

A schedule is a text such as ``"cosine"`` or ``"warmup:5+step:30:0.1"``, so that it stands unchanged
in a file, in a run folder and on the command line. It gives s(t), and the rate of round t is
η_t = η_0 · δ^t · s(t). The round is a tensor, so s(t) is data: one factor for every run and engine.

| text | s(t), with u = t − W rounds after the warm-up |
|---|---|
| ``constant`` | 1 |
| ``warmup:W`` | min(1, (t + 1)/W), before whatever follows |
| ``step:S:G`` | G^⌊u/S⌋: the share G is left after every S rounds |
| ``cosine:T:F`` | F + (1 − F)·½(1 + cos(π u/(T − W))); T the rounds of the run, F = 0 if left out |

Exponential decay is ``lr_decay`` (δ), which can be swept. Work after the last round (extra rounds,
the adaptation before use, the rounds of newcomers) takes the rate of the last round; before the
first round it is that of round 0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sartor.core.errors import ConfigError

FORMS = "constant, warmup:W, step:S:G, cosine, cosine:T, cosine:T:F; two of them as warmup:W+cosine"


@dataclass(frozen=True)
class Schedule:
    """A schedule that was read from its text.

    Attributes:
        warmup: rounds W in which the rate rises from 1/W of itself.
        kind: "constant", "step" or "cosine".
        every: S, rounds a step.
        factor: G, what a step leaves.
        total: T, the rounds of the run; None where it is left to the run.
        floor: F, the share at the end of the cosine.
    """

    warmup: int = 0
    kind: str = "constant"
    every: int = 1
    factor: float = 1.0
    total: int | None = None
    floor: float = 0.0

    def __str__(self) -> str:
        """Return the text that :func:`parse` reads."""
        main = {
            "constant": "constant",
            "step": f"step:{self.every}:{self.factor!r}",
            "cosine": "cosine"
            + (f":{self.total}" if self.total is not None else "")
            + (f":{self.floor!r}" if self.floor else ""),
        }[self.kind]
        if not self.warmup:
            return main
        return f"warmup:{self.warmup}" + (f"+{main}" if self.kind != "constant" else "")

    def over(self, rounds: int) -> Schedule:
        """Return the schedule of a run of ``rounds`` rounds, where its length was left open."""
        if self.kind != "cosine" or self.total is not None:
            return self
        found = replace(self, total=rounds)
        _check(found, str(self))
        return found

    def share(self, round_index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return s(t).

        Args:
            round_index: t, an integer tensor, usually 0-d.
            dtype: of the factor.

        >>> t = torch.arange(4)
        >>> parse("warmup:2+step:1:0.5").share(t, torch.float64).tolist()
        [0.5, 1.0, 1.0, 0.5]
        """
        t = torch.as_tensor(round_index)
        after = (t - self.warmup).clamp(min=0).to(dtype)
        found = torch.ones_like(after)
        if self.kind == "step":
            steps = torch.div(after, self.every, rounding_mode="floor")
            found = torch.full_like(after, self.factor) ** steps
        elif self.kind == "cosine":
            if self.total is None:
                raise ConfigError(
                    "the schedule 'cosine' does not know how many rounds there are; write "
                    "'cosine:T', or take Local.over(rounds), as sartor.fit does."
                )
            length = self.total - self.warmup
            turn = math.pi * after.clamp(max=length - 1) / length
            found = self.floor + (1.0 - self.floor) * 0.5 * (1.0 + torch.cos(turn))
        if self.warmup:
            found = found * ((t + 1).to(dtype) / self.warmup).clamp(max=1.0)
        return found


@functools.cache
def parse(text: str) -> Schedule:
    """Read a schedule.

    >>> str(parse("warmup:5+cosine"))
    'warmup:5+cosine'

    Raises:
        ConfigError: the text is none of the forms above, or its numbers cannot be right.
    """
    found = Schedule()
    for number, part in enumerate(str(text).split("+")):
        name, *rest = (word.strip() for word in part.split(":"))
        try:
            if name == "warmup" and len(rest) == 1 and number == 0:
                found = replace(found, warmup=int(rest[0]))
                _need(found.warmup >= 1)
            elif found.kind != "constant" or number > 1:
                raise ValueError
            elif name == "constant" and not rest:
                pass
            elif name == "step" and len(rest) == 2:
                found = replace(found, kind="step", every=int(rest[0]), factor=float(rest[1]))
                _need(found.every >= 1 and 0.0 < found.factor <= 1.0)
            elif name == "cosine" and len(rest) <= 2:
                total = int(rest[0]) if rest else None
                floor = float(rest[1]) if len(rest) == 2 else 0.0
                found = replace(found, kind="cosine", total=total, floor=floor)
                _need((total is None or total >= 1) and 0.0 <= floor <= 1.0)
            else:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"cannot read the schedule {text!r} at {part!r}; known: {FORMS}, with whole "
                "numbers W, S and T of at least 1, 0 < G <= 1 and 0 <= F <= 1."
            ) from None
    _check(found, text)
    return found


def _need(holds: bool) -> None:
    if not holds:
        raise ValueError


def _check(found: Schedule, text: str) -> None:
    if found.total is not None and found.total <= found.warmup:
        raise ConfigError(
            f"the schedule {text!r} warms up for {found.warmup} rounds, and there are only "
            f"{found.total}; take fewer of them, or more rounds."
        )
