"""Federations: what they hold, how they are divided, and where their data come from."""

from __future__ import annotations

from sartor.data.federation import Federation
from sartor.data.split import Ragged

__all__ = ["Federation", "Ragged"]
