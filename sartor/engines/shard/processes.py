"""The processes of one sharded program: their ranks, and what they exchange.

``torchrun --nproc-per-node k program`` starts k copies of a program and sets the place of each in
its environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR). Everything that reads those is here.
All copies run the same program on the same input; the first (rank 0) alone writes and prints.
Without torchrun `current` is None and nothing here does anything.

Two channels: tensors go through collective calls (gloo on CPUs, NCCL on GPUs), as flat bytes
whose lengths all sides know beforehand, so nothing is pickled; small decisions, and which process
prints an error, go through the key-value store that torchrun holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ConfigError, ProcessError
from sartor.core.tree import Tree

TIMEOUT = "SARTOR_TIMEOUT"
"""Seconds that a process waits for the others, in the environment; 1800 if it is not there."""

_PIECE = 1 << 30  # bytes in one call
_JOINED: list[Processes] = []
_ALONE: list[bool] = []


class Processes:
    """All processes of this program, seen from one of them.

    Args:
        rank: which one this is.
        size: how many there are.
        store: torchrun's key-value store.
        local_rank: which one on this machine.
    """

    def __init__(self, rank: int, size: int, store: Any, local_rank: int = 0) -> None:
        self.rank, self.size, self.store, self.local_rank = rank, size, store, local_rank
        self._decisions = 0

    def first(self, decide: Callable[[], Any]) -> Any:
        """Let rank 0 decide; all get its answer, which must be JSON-able.

        Raises:
            ProcessError: rank 0 failed; it has the message.
        """
        self._decisions += 1
        key = f"decision/{self._decisions}"
        if self.rank == 0:
            try:
                answer = decide()
            except BaseException:
                self.claim()
                self.store.set(key, json.dumps({"failed": True}))
                raise
            self.store.set(key, json.dumps({"answer": answer}))
            return answer
        with self._waiting():
            found = json.loads(self.store.get(key))
        if "answer" not in found:
            raise ProcessError("Process 0 failed; its message says why.")
        return found["answer"]

    def swap(
        self, mine: Mapping[str, Tree], rows: Sequence[Mapping[str, int]]
    ) -> list[dict[str, Tree]]:
        """Give every process the trees of all.

        Every leaf of part p of process r has rows[r][p] rows; all else about it is the same
        everywhere. The bytes of process r travel once, in one flat buffer without padding.

        Args:
            mine: part -> tree of leaves (rows, ...).
            rows: per process, part -> number of rows.
        """
        parts = [(name, leaf) for name, leaf in tree.items(dict(mine))]
        # Wide types first: every leaf then begins at a multiple of its own width.
        order = sorted(range(len(parts)), key=lambda k: -parts[k][1].element_size())
        device = parts[0][1].device if parts else torch.device("cpu")
        shapes = [
            [(count[name.partition("/")[0]], *leaf.shape[1:]) for name, leaf in parts]
            for count in rows
        ]
        sizes = [
            [leaf.element_size() * _product(s) for s, (_, leaf) in zip(shape, parts, strict=True)]
            for shape in shapes
        ]
        buffers = [
            torch.empty(sum(size), dtype=torch.uint8, device=device)
            if r != self.rank
            else torch.cat([_bytes(parts[k][1]) for k in order] or [_no_bytes(device)])
            for r, size in enumerate(sizes)
        ]
        self._send(buffers)
        found = []
        for buffer, shape, size in zip(buffers, shapes, sizes, strict=True):
            cut = dict(zip(order, buffer.split([size[k] for k in order]), strict=True))
            leaves = iter(
                cut[k].view(leaf.dtype).reshape(shape[k]) for k, (_, leaf) in enumerate(parts)
            )
            found.append(tree.map(lambda _, it=leaves: next(it), dict(mine)))
        return found

    def _send(self, buffers: list[Tensor]) -> None:
        """Broadcast buffer r from process r, all at once."""
        with self._waiting():
            pending = [
                dist.broadcast(piece, src=r, async_op=True)
                for r, buffer in enumerate(buffers)
                for piece in (buffer.split(_PIECE) if len(buffer) else ())
            ]
            for work in pending:
                work.wait()

    def agreed(self, state: Tree) -> Tree:
        """Return a state that is the same to the bit in all processes: rank 0's if they differ.

        Eight bytes of every process are compared; the state itself travels only if they differ.
        """
        mine = {"digest": {"": digest(state).reshape(1)}}
        found = self.swap(mine, [{"digest": 1}] * self.size)
        if len({int(one["digest"][""]) for one in found}) == 1:
            return state
        flat: Tree = tree.map(lambda leaf: leaf.contiguous().clone()[None], state)
        rows = [{"state": int(r == 0)} for r in range(self.size)]
        own = {"state": flat if self.rank == 0 else tree.map(lambda leaf: leaf[:0], flat)}
        taken: Tree = tree.map(lambda leaf: leaf[0], self.swap(own, rows)[0]["state"])
        return taken

    def claim(self) -> bool:
        """Ask to be the one process that prints why the program ends."""
        try:
            found = self.store.compare_set("error", "", str(self.rank))
        except Exception:  # the store went down with the process that held it
            return True
        return bool(found == str(self.rank).encode())

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise ProcessError(
                f"Process {self.rank} of {self.size} lost the others, or waited longer than "
                f"{timeout().total_seconds():g} s ({TIMEOUT}) for them: {text[0][:200]}. If one "
                "was killed, often for memory, start fewer a machine; a run folder resumes from "
                "its last checkpoint with resume."
            ) from error


def timeout() -> timedelta:
    """Return how long a process waits for the others."""
    word = os.environ.get(TIMEOUT, "1800")
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"{TIMEOUT} must be a number of seconds above 0, got {word!r}.")
    return timedelta(seconds=seconds)


def place() -> tuple[int, int]:
    """Return rank and number of processes, as torchrun says; (0, 1) without it."""
    size = os.environ.get("WORLD_SIZE", "1")
    if _ALONE or "RANK" not in os.environ or "MASTER_ADDR" not in os.environ or size == "1":
        return 0, 1
    return int(os.environ["RANK"]), int(size)


def is_first() -> bool:
    """Say whether this process writes and prints; True without torchrun."""
    return place()[0] == 0


def stay_alone() -> None:
    """Let this process work by itself from now on, whatever the environment says."""
    _ALONE.append(True)


def current() -> Processes | None:
    """Return the processes of this program, joining them at the first call; None if alone."""
    rank, size = place()
    if size == 1:
        return None
    if not _JOINED:
        _JOINED.append(_join(rank, size))
    return _JOINED[0]


def _join(rank: int, size: int) -> Processes:
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout is then an error to catch
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    local = int(os.environ.get("LOCAL_RANK", rank))
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        store = _store(timeout())
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timeout(),
        )
    except (RuntimeError, ValueError) as error:
        raise ProcessError(
            f"Process {rank} of {size} cannot join the others ({error}); start all of them with "
            f"torchrun, and raise {TIMEOUT} if they start at very different times."
        ) from error
    return Processes(rank, size, store, local)


def _store(limit: timedelta) -> Any:
    """Reach torchrun's key-value store; a PyTorch without torch.distributed has none."""
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

    store, _, _ = next(iter(rendezvous("env://", timeout=limit)))
    store.set_timeout(limit)
    return PrefixStore("sartor", store)


def first(decide: Callable[[], Any]) -> Any:
    """Let the first process decide for all; see `Processes.first`."""
    together = current()
    return decide() if together is None else together.first(decide)


def device_for(device: torch.device) -> torch.device:
    """Return the device of this process: of several GPUs its own."""
    together = current()
    if together is None or device.type != "cuda":
        return device
    if together.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"There are more processes on this machine than its {torch.cuda.device_count()} GPUs; "
            "use torchrun --nproc-per-node with at most so many, or device='cpu'."
        )
    mine = torch.device("cuda", together.local_rank)
    torch.cuda.set_device(mine)
    return mine


def should_report() -> bool:
    """Say whether this process prints why the program ends: the first one that fails does."""
    rank, size = place()
    if size == 1:
        return True
    try:
        short = timedelta(seconds=5)
        together = _JOINED[0] if _JOINED else Processes(rank, size, _store(short))
        # A process that fails asks before it ends, and so before the others can notice.
        return together.claim()
    except Exception:  # the store is gone: better printed twice than never
        return True


def leave() -> None:
    """End the group, if there is one."""
    if _JOINED:
        _JOINED.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def digest(state: Tree) -> Tensor:
    """Fold the bits of a tree into one int64, wherever each bit is and on whatever device.

    Σ_j b_j (2j + 1) modulo 2⁶⁴ over the bytes, words or long words b_j of every leaf, and the same
    of the leaves' sums.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for leaf in tree.leaves(state):
        bits = leaf.detach().contiguous().reshape(-1).view(kinds[leaf.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for k, piece in enumerate(bits.split(1 << 22)):
            place = torch.arange(len(piece), device=bits.device) + (k << 22)
            total = total + (piece.long() * (2 * place + 1)).sum()
        sums.append(total)
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    found = torch.stack(sums)
    return (found * (2 * torch.arange(len(found), device=found.device) + 1)).sum()


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8)


def _no_bytes(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _product(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= int(size)
    return found
