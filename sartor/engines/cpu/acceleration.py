"""What makes a CPU faster and reaches beyond the call: off in a program, on at the command line.

| word | what it does to the process |
|---|---|
| compile | runs the C++ compiler once per machine (``-march=native``, 5 s), loads the library |
| allocator | asks glibc to keep freed memory, for the rest of the process (``mallopt``) |

Results are the same within rounding. A program asks for them with ``sartor.accelerate()``; the
commands of ``sartor`` do so by themselves. The environment variable ``SARTOR_ACCELERATE`` decides
where it is set: "all", "none", or some of the words with commas.
"""

from __future__ import annotations

import logging
import os

from sartor.core.errors import ConfigError, did_you_mean

VARIABLE = "SARTOR_ACCELERATE"
WORDS = ("compile", "allocator")
_LOG = logging.getLogger("sartor")
_asked: frozenset[str] = frozenset()
_logged: set[str] = set()


def accelerate(*words: str) -> None:
    """Let training on a CPU change this process for speed, from now on.

    Args:
        words: "compile", "allocator"; both if none is named. See
            ``sartor.engines.cpu.acceleration`` for what each does.

    Raises:
        ConfigError: a word is none of these.

    >>> import sartor
    >>> sartor.accelerate("compile")
    """
    global _asked
    _asked = _checked(words or WORDS)


def is_on(word: str) -> bool:
    """Say whether a way of acceleration was asked for; the environment wins over the program."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return word in _asked
    if text in ("all", "none"):
        return text == "all"
    return word in _checked(tuple(part.strip() for part in text.split(",") if part.strip()))


def log_once(word: str, text: str) -> None:
    """Log once per process what was done to it."""
    if word not in _logged:
        _logged.add(word)
        _LOG.info(text)


def _checked(words: tuple[str, ...]) -> frozenset[str]:
    for word in words:
        if word not in WORDS:
            raise ConfigError(
                f"There is no acceleration {word!r}{did_you_mean(word, WORDS)}; {VARIABLE} may "
                "also be 'all' or 'none'."
            )
    return frozenset(words)
