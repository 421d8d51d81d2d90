"""Checks of a commit that ruff and mypy do not make; `.pre-commit-config.yaml` calls them.

python -m bench.commit_checks size FILE...       no file over a megabyte
python -m bench.commit_checks subject MESSAGE    the subject has at most 72 characters
"""

from __future__ import annotations

import sys
from pathlib import Path

MOST_BYTES = 1_000_000
MOST_CHARACTERS = 72


def size(paths: list[str]) -> list[str]:
    """Return a sentence for every file that is too large to be committed."""
    found = [(path, Path(path).stat().st_size) for path in paths if Path(path).is_file()]
    return [
        f"{path} has {count:,} bytes, over {MOST_BYTES:,}; data stays out of the repository."
        for path, count in found
        if count > MOST_BYTES
    ]


def subject(paths: list[str]) -> list[str]:
    """Return a sentence if the first line of a commit message is empty or too long."""
    first = Path(paths[0]).read_text(encoding="utf-8").partition("\n")[0]
    if not first.strip():
        return ["The commit has no subject; say what it does, such as 'fedapa: clip the weights'."]
    if len(first) > MOST_CHARACTERS:
        return [f"The subject has {len(first)} characters; {MOST_CHARACTERS} is the most."]
    return []


def main(words: list[str]) -> int:
    """Run one check; the exit status is 1 if it finds a fault."""
    checks = {"size": size, "subject": subject}
    if not words or words[0] not in checks:
        print(__doc__)
        return 2
    faults = checks[words[0]](words[1:])
    print("\n".join(faults), end="\n" if faults else "")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
