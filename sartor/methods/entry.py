"""What a listed method is: its factory and its facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.methods.options import static_options

PAPERS = {
    "Yu": "Yu, He, Sun, Xue, Li, The Effect of Personalization in FedProx, 2024 (two versions)",
    "Chen": "Chen, Zheng, Long, Su, Minimax Estimation for Personalized FL, JMLR 2023",
    "FedAPA": "Sun, Sun, Pan, Fu, Guo, FedAPA, IJCAI 2025",
    "PRIOR": "Shi et al., PRIOR: Personalized Prior, NeurIPS 2023",
}
"""The papers that Sartor reproduces, by the short name of its lists."""

Factory = Callable[..., Method]


@dataclass(frozen=True)
class MethodEntry:
    """A method as it is listed.

    Attributes:
        factory: ``(task, local, *, options) -> Method``.
        summary: one line.
        citation: where it comes from.
        travels: what goes over the wire, per round and participant.
        family: "baseline", "regularised" or "collaborative"; ``compare`` takes ``all-FAMILY``.
        papers: in which of the papers that Sartor reproduces it appears; see :data:`PAPERS`.
    """

    factory: Factory
    summary: str
    citation: str
    travels: str
    family: str = "own"
    papers: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, tuple[Any, Any]]:
        """The static options: name -> (default, allowed values or type)."""
        return static_options(self.factory)

    @property
    def hyper(self) -> dict[str, Hyper]:
        """The sweepable hyper-parameters with default options and plain SGD."""
        head = nn.Linear(1, 1)
        return self.factory(Task(head), Local()).hyper
