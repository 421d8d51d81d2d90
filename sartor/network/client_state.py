"""Where a client keeps its private states: one for every upload that the server took.

A client cannot know whether its upload arrived in time. So it keeps the state from before and the
state from after, each under the number of the order that made it, and every order says which one
to resume from. A server that goes back to a checkpoint finds the clients' states of that time, and
a client whose answer was lost resumes as if it had never been asked.

On a disk a state is one safetensors file, written under another name, flushed and renamed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from sartor.core.errors import MessageError, RunFolderError
from sartor.core.tree import Tree
from sartor.runs.storage import naming, read_state, write_state

FIRST = 0
"""The number of a client that has not been asked yet; its state is made, never stored."""


class ClientState:
    """The numbered states of one client, in a folder or, without one, in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.memory: dict[int, Tree] = {}
        if folder is not None:
            with naming(folder, "create"):
                folder.mkdir(parents=True, exist_ok=True)

    def numbers(self) -> set[int]:
        """Return the numbers of all states that there are."""
        found = set(self.memory)
        if self.folder is not None:
            for path in self.folder.glob("state-*.safetensors"):
                number = path.stem.removeprefix("state-")
                found |= {int(number)} if number.isdecimal() else set()
        return found

    def read(self, number: int) -> Tree:
        """Return a state; a MessageError says that it is not there, or damaged."""
        if number in self.memory:
            return self.memory[number]
        if self.folder is not None and self._path(number).exists():
            try:
                return read_state(self._path(number))[0]
            except RunFolderError as error:
                raise MessageError(f"the client cannot read its state: {error}") from error
        raise MessageError(
            f"the client has no state number {number} (it has {sorted(self.numbers())}); its "
            "folder was lost or belongs to another federation"
        )

    def write(self, number: int, state: Tree, lasting: bool = True) -> None:
        """Keep a state, on the disk if it is lasting; if it cannot be, the earlier ones stay."""
        if self.folder is None or not lasting:
            self.memory[number] = state
            return
        try:
            write_state(self._path(number), state, {"number": number})
        except RunFolderError as error:
            raise MessageError(f"the client cannot keep its state: {error}") from error

    def prune(self, base: int, floor: int) -> None:
        """Drop what is not needed again: what is before ``floor``, and what came after ``base``."""
        for number in self.numbers():
            if number < floor or number > base:
                self.memory.pop(number, None)
                if self.folder is not None:
                    with suppress(OSError):
                        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"state-{number:09d}.safetensors"
