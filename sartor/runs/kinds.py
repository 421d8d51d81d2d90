"""The other kinds of folders, of a comparison and of an advice; and opening whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sartor.adviser.advice import Advice
from sartor.core.errors import RunFolderError
from sartor.results.comparison import Comparison
from sartor.runs.folder import Folder, folder_kind, slug
from sartor.runs.run_folder import RunFolder
from sartor.runs.storage import FORMAT, check_format, read_json, write_json

if TYPE_CHECKING:
    from sartor.adviser.verification import Verification

T = TypeVar("T")


class ComparisonFolder(Folder):
    """A folder with one run folder per method, and ``comparison.json``."""

    kind = "comparison"

    def run_path(self, name: str) -> Path:
        """Return where the run folder of a method stands, or will."""
        return self.path / slug(name)

    def write_comparison(self, comparison: Comparison) -> None:
        """Write comparison.json, and the results of methods that have no run folder yet."""
        folders = {name: self.run_path(name).name for name in comparison}
        if len(set(folders.values())) != len(folders):
            raise RunFolderError(
                f"Two methods would share a folder: {folders}; give them names that differ in "
                "letters and digits."
            )
        for name, result in comparison.items():
            path = self.path / folders[name]
            known = (path / "folder.json").exists()
            run = RunFolder.open(path) if known else RunFolder.create(path, result.config)
            if not run.has_result:
                run.write_result(result)
        content = {"format": FORMAT, "folders": folders, **comparison.summary()}
        write_json(self.path / "comparison.json", content)

    def read_comparison(self) -> Comparison:
        """Return the comparison.

        Raises:
            RunFolderError: it has not ended, or a part is missing or damaged.
        """
        if not (self.path / "comparison.json").exists():
            raise RunFolderError(
                f"{self.path} has no comparison yet: it did not come to its end. Go on with "
                f"sartor resume {self.path}."
            )
        content = read_json(self.path / "comparison.json")
        check_format(content.get("format"), self.path / "comparison.json")
        results = {
            name: RunFolder.open(self.path / folder).read_result()
            for name, folder in content["folders"].items()
        }
        return Comparison(results, reference=content.get("reference"), config=self.config)


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
        from sartor.adviser.verification import Verification

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


def open_folder(path: str | Path) -> RunFolder | ComparisonFolder | AdviceFolder:
    """Open the folder of a run, a comparison or an advice, whichever it is."""
    kinds = {kind.kind: kind for kind in (ComparisonFolder, AdviceFolder)}
    return kinds.get(folder_kind(path), RunFolder).open(path)
