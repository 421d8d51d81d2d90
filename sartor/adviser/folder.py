"""The folder of an advice: ``advice.json`` and, once it was verified, ``verification.json``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sartor.adviser.advice import Advice
from sartor.adviser.verification import Verification
from sartor.core.errors import RunFolderError
from sartor.runs.folder import Folder
from sartor.runs.storage import FORMAT, check_format, read_json, write_json

T = TypeVar("T")


class AdviceFolder(Folder):
    """A folder with an advice, and with its verification if there was one."""

    kind = "advice"

    def write_advice(self, advice: Advice) -> None:
        """Write advice.json."""
        write_json(self.path / "advice.json", {"format": FORMAT, **advice.to_dict()})

    def write_verification(self, verification: Verification) -> None:
        """Write verification.json."""
        content = {"format": FORMAT, **verification.to_dict()}
        write_json(self.path / "verification.json", content)

    def read_advice(self) -> tuple[Advice, Verification | None]:
        """Return the advice, to be read but not verified, and its verification if there is one.

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        found = self._read("advice.json", Advice.from_dict)
        if not (self.path / "verification.json").exists():
            return found, None
        return found, self._read("verification.json", Verification.from_dict)

    def _read(self, name: str, make: Callable[[dict[str, Any]], T]) -> T:
        content = read_json(self.path / name)
        check_format(content.pop("format", None), self.path / name)
        try:
            return make(content)
        except (KeyError, TypeError) as error:
            raise RunFolderError(
                f"{self.path / name} is not whole ({error}); make it anew with sartor advise."
            ) from error
