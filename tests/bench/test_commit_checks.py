"""The checks of a commit."""

from __future__ import annotations

from pathlib import Path

from bench.commit_checks import MOST_BYTES, MOST_CHARACTERS, main


def test_a_subject_has_at_most_72_characters(tmp_path: Path) -> None:
    """The 72nd character is allowed, the 73rd is not, and neither is an empty subject."""
    message = tmp_path / "message"
    for length, status in ((MOST_CHARACTERS, 0), (MOST_CHARACTERS + 1, 1), (0, 1)):
        message.write_text("x" * length + "\n\n" + "y" * 200)
        assert main(["subject", str(message)]) == status


def test_a_large_file_is_refused(tmp_path: Path, capsys) -> None:
    """One byte over the limit names the file."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"x" * MOST_BYTES)
    large.write_bytes(b"x" * (MOST_BYTES + 1))
    assert main(["size", str(small)]) == 0
    assert main(["size", str(small), str(large)]) == 1
    assert str(large) in capsys.readouterr().out
