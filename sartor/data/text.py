"""Texts as rows of token ids: files, words, the vocabulary, and fixed lengths.

The vocabulary is made of training samples alone. Id 0 fills texts up to their full length, id 1
stands for every word that the vocabulary does not have, and words follow by falling frequency.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sartor.core.errors import ConfigError, FederationError
from sartor.core.task import PADDING
from sartor.data.readers import Leaf, leaf_users, reading, unzipped

UNKNOWN = 1
"""The id of every word that the vocabulary does not have."""

LENGTH = 25
"""Tokens of a text, as in LEAF: longer ones lose their end."""

VOCABULARY = 10_000
"""Token ids in all, padding and unknown words included."""

_TOKENS = re.compile(r"(?P<link>https?://\S+|www\.\S+)|(?P<user>@\w+)|\w+(?:'\w+)*|[^\w\s]")
_TEXT = 4  # where a record of LEAF's Sent140 has the tweet


# ---------------------------------------------------------------------- files


def read_lines(path: Path) -> Leaf:
    """Read JSON lines with ``user``, ``text`` and ``label``, gzipped or not."""
    with reading(path):
        # Bytes are cut at line ends alone; text would be cut at other separators in tweets, too.
        rows = [json.loads(line) for line in unzipped(path).splitlines() if line.strip()]
        found = [(str(row["text"]), _label(row["label"]), str(row["user"])) for row in rows]
    return _joined(found, [path])


def read_leaf_texts(paths: Sequence[Path]) -> Leaf:
    """Read LEAF's JSON of Sent140: records (or plain texts) and labels of every user."""
    found: list[tuple[str, int, str]] = []
    for path in paths:
        with reading(path):
            for user, records, labels in leaf_users(path):
                texts = [one if isinstance(one, str) else str(one[_TEXT]) for one in records]
                found += [(t, _label(y), user) for t, y in zip(texts, labels, strict=True)]
    return _joined(found, paths)


def _label(value: Any) -> int:
    """Return 1 for a positive text, which Sent140 also writes as 4, and 0 for a negative one."""
    number = int(value)
    if number not in (0, 1, 4):
        raise ValueError(f"a label is {value!r}, not 0, 1 or 4")
    return min(number, 1)


def _joined(found: Sequence[tuple[str, int, str]], paths: Sequence[Path]) -> Leaf:
    if not found:
        raise FederationError(f"No samples in {', '.join(map(str, paths))}.")
    texts, labels, users = zip(*found, strict=True)
    return Leaf(tuple(texts), np.array(labels, dtype=np.int64), np.array(users))


# ---------------------------------------------------------------------- token ids


def tokenise(text: str) -> list[str]:
    """Split a text into lower-case words and single marks; links and names of users are alike.

    >>> tokenise("@ann I'm LATE!! http://t.co/x")
    ['<user>', "i'm", 'late', '!', '!', '<link>']
    """
    return [
        f"<{found.lastgroup}>" if found.lastgroup else found.group()
        for found in _TOKENS.finditer(text.lower())
    ]


def make_vocabulary(texts: Iterable[Sequence[str]], size: int = VOCABULARY) -> dict[str, int]:
    """Number the most frequent words from 2 on, so that there are at most ``size`` ids.

    >>> make_vocabulary([["b", "a"], ["b"]], size=3)
    {'b': 2}
    """
    if size < 3:
        raise ConfigError(
            f"vocabulary must be >= 3 (padding, unknown words and one word), got {size}."
        )
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], UNKNOWN + 1)}


def encode(
    texts: Sequence[Sequence[str]], vocabulary: dict[str, int], length: int = LENGTH
) -> npt.NDArray[np.int64]:
    """Return token ids ``(texts, length)``: the first ``length`` words of each, then padding.

    A text without any word counts as one unknown word.

    >>> encode([["b", "c"], []], {"b": 2}, length=3).tolist()
    [[2, 1, 0], [1, 0, 0]]
    """
    if length < 1:
        raise ConfigError(f"length must be >= 1 token, got {length}.")
    ids = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        known = [vocabulary.get(word, UNKNOWN) for word in text[:length]] or [UNKNOWN]
        row[: len(known)] = known
    return ids
