"""Keep the vocabulary plain: one word for one thing, and none of the words that were given up.

The text of code, tests and docs is read as words: identifiers are split at underscores and
capitals, and a phrase may run over a line break, a comment sign or the quotes of joined strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

GIVEN_UP = {
    "message": "letter, letters",
    "client context (ctx)": "site, sites",
    "server context (ctx)": "hub, hubs",
    "headline, headline metric": "yardstick, yardsticks",
    "newcomer message": "greet, greets, greeted, greeting, greetings",
    "fix": "mend, mends, mended, mending",
    "resume, continue": "go on, goes on, gone on, going on, went on",
    "record, log, count": "booked, books",
    "ledger, wall-clock": "the book",
    "say, report, print, receive": "told, tells",
    "run in parallel": (
        "side by side work, work side by side, works side by side, run side by side, "
        "runs side by side, train side by side, trained side by side"
    ),
    "show, unfold": "look closer, looks closer",
    "a client that does not": "who does not, who do not, who is not, who are not",
    "say it plainly": "have no door, has no door, be a child, as all chance by key",
}
"""What to use instead -> the words and phrases that were given up."""

FINE = [
    r"site-(\d|\{|packages)",  # names of clients, as NVFlare gives them; and Python's own folder
    r"""["'`](column:)?sites?["'`,]|--client site""",  # a column of a table: a patient's hospital
    r"""["'/]sites\b|\bsites?/""",  # a folder with a file per client; the built documentation
    r"(?<![a-z])(each|every|four)[ _]sites?(?![a-z])|\bsites?(\d|\(|\.csv)",  # hospitals
    r"[Gg]it[Hh]ub",  # one word, although it has a capital inside
    r"letter-spacing",  # CSS
    r"letters(,| and) digits",  # the alphabet
    r"\bunless[ _]told[ _]otherwise",  # an idiom
    r"(tell|tells|told)[ _].{0,60}apart",  # "these runs tell the two apart"
    r"\btells (\w+ ){1,4}from\b",  # "it tells a fault from a bug"
]
"""Contexts in which a given-up word is right in any file."""

ALLOWED: dict[str, list[str]] = {
    # A study of Optuna is asked for values and told the results.
    "bench/same_numbers.py": ["forgets what it is told"],
    # The documentation is built as a web site.
    "README.md": ["the documentation as a site"],
    "CONTRIBUTING.md": ["the documentation as a site"],
    "docs/conf.py": ["The site: Sphinx"],
    "docs/dependencies.md": ["the site of `make docs`"],
    "docs/generate.py": ["the site's navigation"],
    "tests/docs/test_links.py": ["without the site"],
    # Hospitals, whose tables are the data of an example.
    "tests/cli/test_advise.py": ['f"site{i}.csv"'],
    "tests/cli/test_commands.py": ['for site in ("north", "south")', "sites/{site}.csv"],
    "tests/cli/test_table.py": ["it has: site, id, age"],
    "tests/data/test_paper_partitions.py": ["sites = {", '"attributes": sites'],
    # Keys in files on disk, and the key of a random number.
    "sartor/training/onboarding.py": ['"hub": found.server_ctx', 'state["hub"]'],
    "sartor/results/log.py": ['"books": {name', 'arrays["books"]'],
    "sartor/methods/fedfomo.py": ['rng.fold(ctx.key, "greet")'],
    # The alphabet, Greek and Latin.
    "tests/cli/test_config.py": ["one letter too many"],
    "pyproject.toml": ["The letters of the papers"],
}
"""File -> lines in which a given-up word is right: the line must contain the text."""

SUFFIXES = {".py", ".md", ".html", ".css", ".cpp", ".h", ".cu", ".toml", ".cff", ".yml", ".js"}
SKIPPED = ("CHANGELOG.md", "docs/changelog.md", "tests/test_words.py")
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
GAP = re.compile(r"""[\s#"'_*`>/-]*|["']\s*f?["']""")
PHRASES = {
    tuple(phrase.split()): better
    for better, phrases in GIVEN_UP.items()
    for phrase in phrases.split(", ")
}
LONGEST = max(map(len, PHRASES))
CONTEXT = re.compile("|".join(f"(?:{context})" for context in FINE))


class Hit(NamedTuple):
    """A use of a given-up word."""

    file: str
    line: int
    word: str
    better: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word} -> {self.better}    {self.text.strip()[:100]}"


def find(file: str, text: str) -> Iterator[Hit]:
    """Return every use of a given-up word in a text."""
    lines = text.splitlines()
    found = list(WORD.finditer(text))
    words = [match[0].lower() for match in found]
    joined = [
        GAP.fullmatch(text, one.end(), two.start()) is not None for one, two in pairwise(found)
    ]
    number, at = 1, 0
    for place, match in enumerate(found):
        number, at = number + text.count("\n", at, match.start()), match.start()
        for length in range(1, min(LONGEST, len(words) - place) + 1):
            better = PHRASES.get(tuple(words[place : place + length]))
            if better is None or not all(joined[place : place + length - 1]):
                continue
            line = lines[number - 1]
            start = match.start() - text.rfind("\n", 0, match.start()) - 1
            if not any(fine.start() <= start < fine.end() for fine in CONTEXT.finditer(line)):
                yield Hit(file, number, " ".join(words[place : place + length]), better, line)


def files() -> Iterator[str]:
    """Return the files of the package, the tests, the benchmarks and the docs."""
    for path in sorted(ROOT.glob("*")):
        inside = (
            sorted(path.rglob("*")) if path.name in ("sartor", "bench", "tests", "docs") else []
        )
        for file in [path, *inside]:
            name = file.relative_to(ROOT).as_posix()
            hidden = any(part[0] in "._" for part in file.relative_to(ROOT).parts[:-1])
            if file.is_file() and file.suffix in SUFFIXES and not hidden and name not in SKIPPED:
                yield name


def hits() -> list[Hit]:
    """Return every use of a given-up word that is not allowed."""
    return [
        hit
        for file in files()
        for hit in find(file, (ROOT / file).read_text(encoding="utf-8"))
        if not any(text in hit.text for text in ALLOWED.get(file, ()))
    ]


def test_given_up_words_stay_given_up() -> None:
    found = hits()
    assert not found, f"{len(found)} words to replace:\n" + "\n".join(map(str, found))


def test_every_allowance_is_used() -> None:
    unused = [
        f"{file}: {text!r}"
        for file, texts in ALLOWED.items()
        for text in texts
        if not (ROOT / file).is_file()
        or not any(text in hit.text for hit in find(file, (ROOT / file).read_text("utf-8")))
    ]
    assert not unused, "Remove from ALLOWED:\n" + "\n".join(unused)


def test_finds_words_in_every_form() -> None:
    text = 'def greet_all(siteName):  # who does\n    # not\n    "it goes "\n    "on"'
    assert [(hit.line, hit.word) for hit in find("a.py", text)] == [
        (1, "greet"),
        (1, "site"),
        (1, "who does not"),
        (3, "goes on"),
    ]


def test_leaves_ordinary_words_alone() -> None:
    text = "Website, github, amend, bookmark; a run that tells two clients apart. He goes, on foot."
    assert not list(find("a.md", text))
