"""What tests of compiled operations share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sartor.engines.cpu import compiler, native


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is called of the compiled library."""
    calls: list[str] = []
    plain = compiler.function

    def watched(name: str, dtype: torch.dtype) -> Any:
        calls.append(name)
        return plain(name, dtype)

    monkeypatch.setattr(native, "function", watched)
    return calls
