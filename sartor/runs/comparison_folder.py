"""The folder of a comparison: one run folder per method, and ``comparison.json``."""

from __future__ import annotations

from pathlib import Path

from sartor.core.errors import RunFolderError
from sartor.results.comparison import Comparison
from sartor.runs.folder import Folder, slug
from sartor.runs.run_folder import RunFolder
from sartor.runs.storage import FORMAT, check_format, read_json, write_json


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
                f"{self.path} has no comparison yet: it did not come to its end. Resume it with "
                f"sartor resume {self.path}."
            )
        content = read_json(self.path / "comparison.json")
        check_format(content.get("format"), self.path / "comparison.json")
        results = {
            name: RunFolder.open(self.path / folder).read_result()
            for name, folder in content["folders"].items()
        }
        return Comparison(results, reference=content.get("reference"), config=self.config)
