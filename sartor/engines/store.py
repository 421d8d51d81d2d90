"""Where the clients' kept states are between rounds: in memory, or in memory-mapped files.

Only the cohort's states are gathered to the device, so with mapped files memory grows with the
cohort and not with the population. A mapped store starts empty: the state of a client that never
participated is made from its key when it is needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import RunFolderError
from sartor.core.tree import Tree
from sartor.engines.arena import on_device

Make = Callable[[np.ndarray], Tree]
"""``(cohort (runs, slots)) -> states (runs, slots, ...)`` of clients that have not trained yet."""


class Lanes(Protocol):
    """Kept states that clients read when they work, and write when they are done."""

    def gather(self, cohort: np.ndarray, run: int = 0) -> Tree:
        """Return the states of a cohort of the runs ``run, run+1, ...``: (runs, slots, ...)."""

    def scatter(self, cohort: np.ndarray, states: Tree, present: np.ndarray, run: int = 0) -> None:
        """Put the states of the present members of a cohort back."""


class States(Lanes, Protocol):
    """The kept states of all clients, wherever they are: one tree per client and run."""

    def fork(self) -> States:
        """Return states that begin as these; writing to them changes only the copy."""

    def dump(self) -> Tree:
        """Return what a checkpoint must hold."""

    def load(self, state: Tree) -> None:
        """Restore a checkpoint."""


class Store:
    """Kept states on this machine.

    Args:
        make: makes the states of new clients.
        runs: number of runs.
        clients: number of clients.
        device: where gathered states go, and where a store in memory lives.
        folder: a folder for memory-mapped files; None keeps everything in memory.
    """

    def __init__(
        self, make: Make, runs: int, clients: int, device: torch.device, folder: Path | None = None
    ) -> None:
        self.make, self.shape, self.device, self.folder = make, (runs, clients), device, folder
        self.touched = np.zeros((runs, clients), dtype=bool)
        first = make(np.zeros((runs, 1), dtype=np.int64))
        if folder is None:
            self.table: Tree = make(np.tile(np.arange(clients), (runs, 1)))
            self.table = tree.map(lambda leaf: leaf.contiguous().clone(), self.table)
        else:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.table = tree.map(self._mapped, first)
            except OSError as error:
                raise RunFolderError(
                    f"Cannot make files for client states in {folder}: {error}; free some space "
                    "there, choose another folder with out=, or use store='memory'."
                ) from error

    def _mapped(self, leaf: Tensor) -> Tensor:
        shape = (*self.shape, *leaf.shape[2:])
        dtype = {torch.bfloat16: torch.int16}.get(leaf.dtype, leaf.dtype)
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".state", delete=False) as file:
            path = file.name
        return torch.from_numpy(np.memmap(path, dtype=kind, mode="w+", shape=shape)).view(
            leaf.dtype
        )

    def gather(self, cohort: np.ndarray, run: int = 0) -> Tree:
        """Return the states of a cohort of the runs ``run, run+1, ...``.

        (runs, slots, ...), on the device.
        """
        if not tree.leaves(self.table):
            return self.table
        index = self._index(cohort, run)
        if self.folder is not None:
            return self._gather_mapped(cohort, run, index)
        return tree.map(lambda leaf: leaf[index], self.table)

    def _gather_mapped(self, cohort: np.ndarray, run: int, index: tuple[Tensor, Tensor]) -> Tree:
        """Read the states that were put from their files, and make the others."""
        block = slice(run, run + len(cohort))
        seen = self.touched[np.arange(run, block.stop)[:, None], cohort]
        full = np.zeros((self.shape[0], cohort.shape[1]), dtype=np.int64)
        full[block] = cohort
        if not seen.any():
            return tree.map(lambda leaf: leaf[block], self.make(full))
        found: Tree = tree.map(lambda leaf: leaf[index].to(self.device), self.table)
        if seen.all():
            return found
        fresh = tree.map(lambda leaf: leaf[block], self.make(full))
        return tree.where(on_device(seen, self.device), found, fresh)

    def scatter(self, cohort: np.ndarray, states: Tree, present: np.ndarray, run: int = 0) -> None:
        """Put the states of the present members of a cohort back."""
        block, slot = np.nonzero(present)
        held = tree.leaves(states)
        picked = tuple(on_device(i, held[0].device) for i in (block, slot)) if held else ()
        rows = tree.map(lambda new: new[picked], states)
        self.put(block + run, cohort[present], rows)

    def put(self, run: np.ndarray, client: np.ndarray, rows: Tree) -> None:
        """Put single states: row j is that of ``client[j]`` in ``run[j]``."""
        self.touched[run, client] = True
        home = self._home
        index = tuple(on_device(i, home) for i in (run, client))

        def put(leaf: Tensor, new: Tensor) -> None:
            leaf[index] = new

        # First what may fail for want of memory, so that a state is never half new.
        ready = tree.map(lambda leaf, new: new.to(home, leaf.dtype), self.table, rows)
        tree.map(put, self.table, ready)  # empty states must still agree in structure

    def rows(self, run: np.ndarray, client: np.ndarray) -> Tree:
        """Return single states that were put, (rows, ...), on the device; see `put`."""
        home = self._home
        index = tuple(on_device(i, home) for i in (run, client))
        found: Tree = tree.map(lambda leaf: leaf[index].to(self.device), self.table)
        return found

    def fork(self) -> Store:
        """Return a store in memory that begins as this one is; writing to it changes only it."""
        return Store(self.gather, *self.shape, self.device)

    def _index(self, cohort: np.ndarray, run: int) -> tuple[Tensor, Tensor]:
        runs = torch.arange(run, run + len(cohort), device=self._home)[:, None]
        return runs, on_device(cohort, self._home)

    @property
    def _home(self) -> torch.device:
        """Where the states are kept."""
        return torch.device("cpu") if self.folder is not None else self.device

    def dump(self) -> Tree:
        """Return what a checkpoint must hold.

        The rows of clients that have trained, and which they are.
        """
        run, client = np.nonzero(self.touched)
        index = (torch.from_numpy(run), torch.from_numpy(client))
        rows = tree.map(
            lambda leaf: leaf[index[0].to(leaf.device), index[1].to(leaf.device)], self.table
        )
        return {"rows": rows, "touched": torch.from_numpy(self.touched.copy())}

    def load(self, state: Tree) -> None:
        """Restore a checkpoint; a client that has not trained in it is new again."""
        if self.folder is None and self.touched.any():
            everybody = np.tile(np.arange(self.shape[1]), (self.shape[0], 1))
            self.table = tree.map(lambda leaf: leaf.contiguous().clone(), self.make(everybody))
        self.touched = state["touched"].numpy().astype(bool).copy()
        index = tuple(torch.from_numpy(a) for a in np.nonzero(self.touched))

        def put(leaf: Tensor, rows: Tensor) -> None:
            leaf[index[0].to(leaf.device), index[1].to(leaf.device)] = rows.to(leaf.device)

        tree.map(put, self.table, state["rows"])
