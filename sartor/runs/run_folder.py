"""The folder of a run: its checkpoints, the final models and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sartor.core.errors import RunFolderError
from sartor.results.result import Result
from sartor.results.serving import tree_of
from sartor.runs import checkpoints
from sartor.runs.archive import (
    csv_text,
    ledger_rows,
    metric_rows,
    pack_result,
    to_numpy,
    unpack_result,
)
from sartor.runs.folder import Folder, slug
from sartor.runs.storage import (
    FORMAT,
    check_format,
    naming,
    read_json,
    read_state,
    write_json,
    write_state,
    write_text,
)

Checkpoint = tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]
"""The rounds behind it, trees, arrays and other values."""


class RunFolder(Folder):
    """The folder of one run (or of one sweep).

    Make one with :meth:`create` or :meth:`open`.

    Attributes:
        path: where it is.
        config: the resolved settings it was started with.
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
        return round_index, state.get("trees", {}), to_numpy(state.get("arrays", {})), meta

    # --- models ---------------------------------------------------------------------------------

    def write_models(
        self, names: Sequence[str], trees: Sequence[Mapping[str, Any]], run: int = 0
    ) -> Path:
        """Write the final weights, one safetensors file per client, and return their folder.

        Args:
            names: names of the clients.
            trees: one (nested) dict of tensors per client.
            run: index of the run in a sweep.
        """
        if len(names) != len(trees):
            raise RunFolderError(
                f"{len(names)} client names for {len(trees)} models; give one model per client."
            )
        folder = self.path / "models" / f"run-{run}"
        with naming(folder, "create"):
            folder.mkdir(parents=True, exist_ok=True)
        width = len(str(max(len(names) - 1, 0)))
        index = {}
        for position, (name, tree) in enumerate(zip(names, trees, strict=True)):
            file = f"{position:0{width}d}-{slug(name)}.safetensors"
            write_state(folder / file, tree, {"client": name})
            index[name] = file
        write_json(folder / "index.json", {"format": FORMAT, "clients": index})
        return folder

    def write_server(
        self, server: Mapping[str, Any], facts: Mapping[str, Any], run: int = 0
    ) -> None:
        """Write the state that newcomer messages are made from, beside the models of a run.

        Args:
            server: a nested dict of tensors.
            facts: JSON-able values.
            run: index of the run in a sweep.
        """
        folder = self.path / "models" / f"run-{run}"
        with naming(folder, "create"):
            folder.mkdir(parents=True, exist_ok=True)
        write_state(folder / "server.safetensors", server, facts)

    def read_server(self, run: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what :meth:`write_server` wrote."""
        file = self.path / "models" / f"run-{run}" / "server.safetensors"
        if not file.exists():
            raise RunFolderError(
                f"{self.path} holds no server of run {run} that newcomers could join; train again "
                "with this release, or use sartor onboard with the training data at hand."
            )
        return read_state(file)

    def read_models(self, run: int = 0) -> dict[str, dict[str, Tensor]]:
        """Return the final weights: client name -> dict of tensors, for ``load_state_dict``."""
        folder = self.path / "models" / f"run-{run}"
        if not (folder / "index.json").exists():
            raise RunFolderError(
                f"{self.path} holds no models of run {run}; they are written when a run ends."
            )
        index = read_json(folder / "index.json")
        check_format(index.get("format"), folder / "index.json")
        return {name: read_state(folder / file)[0] for name, file in index["clients"].items()}

    # --- result ---------------------------------------------------------------------------------

    @property
    def has_result(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "result.safetensors").exists()

    def write_result(self, result: Result) -> None:
        """Write the result: tables for people, and one exact file for Sartor."""
        write_text(self.path / "metrics.csv", csv_text(metric_rows(result)))
        write_text(self.path / "ledger.csv", csv_text(ledger_rows(result)))
        write_json(self.path / "summary.json", result.summaries())
        baseline = result.known_baseline
        if baseline is not None:
            write_state(self.path / "baseline.safetensors", *pack_result(baseline))
        write_state(self.path / "result.safetensors", *pack_result(result))

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
        result = unpack_result(*read_state(self.path / "result.safetensors"))
        if (self.path / "baseline.safetensors").exists():
            baseline = unpack_result(*read_state(self.path / "baseline.safetensors"))
            result.attach_baseline(baseline)
        return result


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
