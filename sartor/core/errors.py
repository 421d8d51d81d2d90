"""Every error that Sartor raises on purpose, drawn as one tree.

::

    PFLError
    ├── ConfigError        an option, key or value that cannot be right     (also a ValueError)
    ├── FederationError    data that cannot make a federation               (also a ValueError)
    │   └── MissingDataError   a data set that is not on this machine
    ├── ModelError         a network that cannot be trained over lanes      (also a ValueError)
    ├── ContractError      a method broke its record                        (also a ValueError)
    ├── DivergedError      a loss or a model became NaN or infinite
    ├── CallbackError      a callback that failed before the first round
    ├── RunFolderError     a run folder that cannot be read or written
    ├── NetworkError       a federation over a network that cannot start or continue
    │   └── MessageError       a message that is refused
    ├── ProcessError       processes of one sharded simulation that cannot start or continue
    └── MissingExtraError  an optional package is not installed             (also an ImportError)

A message says what was wrong, what was expected, and how to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PFLError(Exception):
    """The root: catch this to catch everything that Sartor raises on purpose."""


class ConfigError(PFLError, ValueError):
    """An option, key or value that cannot be right."""


class FederationError(PFLError, ValueError):
    """Data that cannot make a federation.

    Attributes:
        faults: every fault, one sentence each, where several were looked for.
    """

    faults: tuple[str, ...] = ()


class MissingDataError(FederationError):
    """A data set that is not on this machine; the message says how to get it."""


class ModelError(PFLError, ValueError):
    """A network that cannot be trained over lanes."""


class ContractError(PFLError, ValueError):
    """A method broke its record."""


class DivergedError(PFLError):
    """A loss or a model became NaN or infinite.

    Attributes:
        run: index of the run in the sweep.
        round: the round in which it was seen.
        client: the name of the first client at fault.
    """

    def __init__(self, message: str, *, run: int, round: int, client: str) -> None:
        super().__init__(message)
        self.run = run
        self.round = round
        self.client = client


class CallbackError(PFLError):
    """A callback that failed before the first round."""


class RunFolderError(PFLError):
    """A run folder that cannot be read or written."""


class NetworkError(PFLError):
    """A federation over a network that cannot start or continue."""


class MessageError(NetworkError):
    """A message that is refused; the text is the reason that the record of a run gives."""


class ProcessError(PFLError):
    """Processes of one sharded simulation that cannot start or continue."""


class MissingExtraError(PFLError, ImportError):
    """An optional package is not installed; the message names the pip extra."""


def below(least: float, advice: str, **values: float | None) -> list[str]:
    """List the values that are too small, one sentence each; None is no value.

    >>> below(1, "the default is 5.", steps=0, epochs=2, batch=None)
    ['steps must be >= 1, got 0; the default is 5.']
    """
    return [
        f"{name} must be >= {least:g}, got {value:g}; {advice}"
        for name, value in values.items()
        if value is not None and not value >= least
    ]


def refuse(faults: Iterable[str]) -> None:
    """Raise one ConfigError with all faults, if there are any."""
    if text := "\n".join(faults):
        raise ConfigError(text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known word, or the list of all of them.

    >>> did_you_mean("fedpox", ["fedprox", "local"])
    "; did you mean 'fedprox'?"
    >>> did_you_mean("zzz", ["b", "a"])
    '; known: a, b'
    """
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
