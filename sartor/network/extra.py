"""The packages that only a federation over a network needs, and what to say without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sartor.core.errors import MissingExtraError


@contextmanager
def network_extra() -> Iterator[None]:
    """Name the extra where an import inside finds a package of it missing."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            "A federation over a network needs NVIDIA FLARE and cryptography; install them with "
            "pip install 'sartor[network]'."
        ) from error
