"""The folder of a run, with its checkpoints, models and result; and that of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sartor.core.errors import RunFolderError
from sartor.results.comparison import Comparison
from sartor.results.result import Result
from sartor.results.serving import tree_of
from sartor.runs import archive, checkpoints, storage
from sartor.runs.folder import Folder, slug

Checkpoint = tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]
"""The rounds behind it, trees, arrays and other values."""


class RunFolder(Folder):
    """The folder ``path`` of one run (or sweep), started with the resolved settings ``config``.

    Make one with :meth:`create` or :meth:`open`.
    """

    kind = "run"

    # --- checkpoints ----------------------------------------------------------------------------

    def write_checkpoint(
        self,
        round_index: int,
        trees: Mapping[str, Any],
        arrays: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint atomically and drop all but the last two.

        Args:
            round_index: the number of rounds behind it.
            trees: nested dicts of tensors; any dtype, empty dicts included.
            arrays: nested dicts of numpy arrays.
            meta: JSON-able values.

        Raises:
            RunFolderError: it cannot be written; earlier checkpoints are untouched.
        """
        state = {"trees": trees, "arrays": arrays or {}}
        return checkpoints.write(self.path / "checkpoints", round_index, state, meta or {})

    def read_checkpoint(self) -> Checkpoint | None:
        """Return (round_index, trees, arrays, meta) of the newest whole checkpoint, or None.

        A damaged one is passed over with a warning.

        Raises:
            RunFolderError: there are checkpoints, but none of them is whole.
        """
        found = checkpoints.read(self.path / "checkpoints")
        if found is None:
            return None
        round_index, state, meta = found
        return round_index, state.get("trees", {}), archive.to_numpy(state.get("arrays", {})), meta

    # --- models ---------------------------------------------------------------------------------

    def write_models(
        self, names: Sequence[str], trees: Sequence[Mapping[str, Any]], run: int = 0
    ) -> Path:
        """Write the final weights, one safetensors file per client, and return their folder.

        Every client has a name and a (nested) dict of tensors; ``run`` is that of a sweep.
        """
        if len(names) != len(trees):
            raise RunFolderError(
                f"{len(names)} client names for {len(trees)} models; give one model per client."
            )
        folder = storage.make_folder(self._models(run))
        width = len(str(max(len(names) - 1, 0)))
        index = {}
        for position, (name, tree) in enumerate(zip(names, trees, strict=True)):
            file = f"{position:0{width}d}-{slug(name)}.safetensors"
            storage.write_state(folder / file, tree, {"client": name})
            index[name] = file
        storage.write_json(folder / "index.json", {"format": storage.FORMAT, "clients": index})
        return folder

    def write_server(
        self, server: Mapping[str, Any], facts: Mapping[str, Any], run: int = 0
    ) -> None:
        """Write what newcomer messages are made from beside the models: tensors and facts."""
        folder = storage.make_folder(self._models(run))
        storage.write_state(folder / "server.safetensors", server, facts)

    def read_server(self, run: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what :meth:`write_server` wrote."""
        file = self._models(run) / "server.safetensors"
        if not file.exists():
            raise RunFolderError(
                f"{self.path} holds no server of run {run} that newcomers could join; train again "
                "with this release, or use sartor onboard with the training data at hand."
            )
        return storage.read_state(file)

    def read_models(self, run: int = 0) -> dict[str, dict[str, Tensor]]:
        """Return the final weights: client name -> dict of tensors, for ``load_state_dict``."""
        folder = self._models(run)
        if not (folder / "index.json").exists():
            raise RunFolderError(
                f"{self.path} holds no models of run {run}; they are written when a run ends."
            )
        index = storage.read_ours(folder / "index.json")
        return {
            name: storage.read_state(folder / file)[0] for name, file in index["clients"].items()
        }

    def _models(self, run: int) -> Path:
        return self.path / "models" / f"run-{run}"

    # --- result ---------------------------------------------------------------------------------

    @property
    def has_result(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "result.safetensors").exists()

    def write_result(self, result: Result) -> None:
        """Write the result: tables for people, and one exact file for Sartor."""
        storage.write_text(self.path / "metrics.csv", archive.metrics_csv(result))
        storage.write_text(self.path / "ledger.csv", archive.ledger_csv(result))
        storage.write_json(self.path / "summary.json", result.summaries())
        if result.known_baseline is not None:
            self.write_baseline(result.known_baseline)
        storage.write_state(self.path / "result.safetensors", *archive.pack_result(result))

    def write_baseline(self, baseline: Result) -> None:
        """Write the LocalTrain result that the result is compared with."""
        storage.write_state(self.path / "baseline.safetensors", *archive.pack_result(baseline))

    def read_result(self) -> Result:
        """Return the result, with its numbers to the last bit.

        Raises:
            RunFolderError: the run has not ended, or the file is damaged.
        """
        if not self.has_result:
            raise RunFolderError(
                f"{self.path} has no result yet: the run did not come to its end. Resume it with "
                f"sartor resume {self.path}."
            )
        result = self._unpacked("result.safetensors")
        if (self.path / "baseline.safetensors").exists():
            result.attach_baseline(self._unpacked("baseline.safetensors"))
        return result

    def _unpacked(self, name: str) -> Result:
        return archive.unpack_result(*storage.read_state(self.path / name))


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
        content = {"format": storage.FORMAT, "folders": folders, **comparison.summary()}
        storage.write_json(self.path / "comparison.json", content)

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
        content = storage.read_ours(self.path / "comparison.json")
        results = {
            name: RunFolder.open(self.path / folder).read_result()
            for name, folder in content["folders"].items()
        }
        return Comparison(results, reference=content.get("reference"), config=self.config)


def save_result(result: Result, path: str | Path, overwrite: bool = False) -> Path:
    """Write a result with the models of all clients to a new folder; see ``Result.save``."""
    folder = RunFolder.create(path, result.config, overwrite=overwrite)
    for run in range(len(result.runs)):
        trees = [tree_of(result.model(client, run)) for client in range(len(result.clients))]
        folder.write_models(result.clients, trees, run)
        if result.has_server:
            folder.write_server(*result.server_state(run), run)
    folder.write_result(result)
    return folder.path
