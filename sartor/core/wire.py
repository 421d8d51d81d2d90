"""What a message costs, and what of it arrives, where only some of its rows exist.

A message is a tree: ``common`` to all clients, ``own`` to one client, or an ``upload``.
`Wire.sparse` names a leaf of a message and the leaf of the same message that marks its rows:

    {"common/prototypes": "common/seen", "upload/prototypes": "upload/counts"}

Marks have the leading axes of the leaf: one mark per row, or a single one (0-d) for a leaf that is
sent whole or not at all. A row travels where its mark is not zero. The receiver reads zeros for the
others, so a method cannot use what was not sent.

Payload in bytes, without headers:

| leaf | bytes |
|---|---|
| neither | numel × size of a number |
| rows with marks | rows that travel × numel of a row × size of a number |
| marks, boolean | ⌈number of marks / 8⌉: one bit each |
| marks, numbers (counts) | the same bits, and the marks that are not zero × size of a number |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ContractError
from sartor.core.tree import Tree

MESSAGES = ("common", "own", "upload")
"""The messages of a round, as `Wire.sparse` calls them."""


def marks_of(sparse: Mapping[str, str], message: str) -> dict[str, str]:
    """Return what is declared about one message: the names of leaves and of their marks.

    >>> marks_of({"common/table": "common/seen", "upload/table": "upload/held"}, "upload")
    {'table': 'held'}
    """
    return _declared(sparse)[message] if sparse else {}


def _declared(sparse: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what is declared about every message, or refuse it."""
    found: dict[str, dict[str, str]] = {message: {} for message in MESSAGES}
    for leaf, marks in sparse.items():
        (where, _, leaf_name), (other, _, marks_name) = leaf.partition("/"), marks.partition("/")
        if where not in MESSAGES or other != where or marks in sparse:
            raise ContractError(
                f"sparse declares {leaf!r} by {marks!r}; expected two leaves of one message, such "
                "as 'upload/means' by 'upload/held', and marks that are sent whole; the messages "
                f"are {', '.join(MESSAGES)}."
            )
        found[where][leaf_name] = marks_name
    return found


def moved(sparse: Mapping[str, str], messages: Mapping[str, str]) -> dict[str, str]:
    """Declare the same of messages that have moved; those that are not named are left out.

    >>> moved({"common/table": "common/seen"}, {"common": "own/slot"})
    {'own/slot/table': 'own/slot/seen'}
    """
    found = {}
    for message, place in messages.items():
        for leaf, marks in marks_of(sparse, message).items():
            found[f"{place}/{leaf}"] = f"{place}/{marks}"
    return found


def messages_of(sparse: Mapping[str, str]) -> dict[str, str]:
    """Return what is declared about the server's messages, for a round with other uploads."""
    return moved(sparse, {"common": "common", "own": "own"})


def received(message: Tree, marks: Mapping[str, str]) -> Tree:
    """Return a message as it arrives: zeros in the rows that do not travel.

    Args:
        message: leaves with any leading axes, the same for all.
        marks: from the name of a leaf to that of its marks, as `marks_of` returns it.
    """
    if not marks:
        return message
    leaves = _checked(message, marks)

    def whole(name: str, leaf: Tensor) -> Tensor:
        if name not in marks:
            return leaf
        there = leaves[marks[name]] != 0
        there = there.reshape(there.shape + (1,) * (leaf.dim() - there.dim()))
        return torch.where(there, leaf, torch.zeros_like(leaf))

    return _renamed(message, whole)


def packed(message: Tree, marks: Mapping[str, str]) -> Tree:
    """Return one message with only the rows that travel: leaves (rows, ...) where there are marks.

    >>> packed({"m": torch.eye(2), "held": torch.tensor([True, False])}, {"m": "held"})["m"]
    tensor([[1., 0.]])
    """
    leaves = _checked(message, marks)
    return _renamed(
        message, lambda name, leaf: leaf[leaves[marks[name]] != 0] if name in marks else leaf
    )


def unpacked(message: Tree, marks: Mapping[str, str]) -> Tree:
    """Return what `packed` took apart, with zeros in the rows that did not travel.

    Raises:
        ContractError: the rows are not as many as the marks say.
    """
    leaves = dict(tree.items(message))
    missing = sorted({*marks, *marks.values()} - leaves.keys())
    if missing:
        raise ContractError(f"A message lacks the leaves {missing}; it has {sorted(leaves)}.")

    def whole(name: str, leaf: Tensor) -> Tensor:
        if name not in marks:
            return leaf
        there = leaves[marks[name]] != 0
        if leaf.dim() == 0 or len(leaf) != int(there.sum()):
            raise ContractError(
                f"{name!r} brings {tuple(leaf.shape)[:1]} rows, but {marks[name]!r} marks "
                f"{int(there.sum())}."
            )
        full = leaf.new_zeros((*there.shape, *leaf.shape[1:]))
        full[there] = leaf
        return full

    return _renamed(message, whole)


def travels(connected: Any, slot: int, leaf: str, run: int = 0) -> tuple[bool, bool]:
    """Say whether a leaf is written to the client of a slot, and whether it is uploaded.

    Args:
        connected: what ``Wire.connected`` returned, with the axis of runs first; None for all.
        slot: the position in the cohort.
        leaf: the name of the leaf in its message.
        run: which run.
    """
    if isinstance(connected, dict):
        first, _, rest = leaf.partition("/")
        return travels(connected.get(first), slot, rest, run)
    if connected is None:
        return True, True
    row = connected[run]
    down, up = (row[0, slot], row[1, slot]) if row.dim() == 2 else (row[slot], row[slot])
    return bool(down), bool(up)


def num_bytes(message: Tree, marks: Mapping[str, str], skip: int) -> np.ndarray:
    """Count the payload of every message in a stack of them, int64, by the table above.

    The first ``skip`` axes of the leaves number the messages, such as (runs, slots); ``marks`` go
    from the name of a leaf to that of its marks.
    """
    if marks:
        return _sparse_bytes(message, marks, skip)
    leaf = next(iter(tree.leaves(message)), None)
    shape = () if leaf is None else leaf.shape[:skip]
    return np.full(shape, tree.num_bytes(message, skip), dtype=np.int64)


def _sparse_bytes(message: Tree, marks: Mapping[str, str], skip: int) -> np.ndarray:
    """Count the payload of messages of which only some rows travel; see `num_bytes`."""
    leaves = _checked(message, marks)
    special = {*marks, *marks.values()}
    dense = tree.num_bytes({k: v for k, v in leaves.items() if k not in special}, skip)
    rows: list[Tensor] = []
    for name in sorted(set(marks.values())):
        leaf = leaves[name]
        each = sum(_row_bytes(leaves[k], leaf.dim()) for k, v in marks.items() if v == name)
        each += 0 if leaf.dtype == torch.bool else leaf.element_size()
        dense += -(-leaf[(0,) * skip].numel() // 8)
        rows.append((leaf != 0).unsqueeze(-1).flatten(skip).sum(-1) * each)
    counted: np.ndarray = torch.stack(rows).sum(0).cpu().numpy()
    return counted + dense


def heard(connected: Any, present: Tensor) -> Tensor:
    """Return which clients are present for ``aggregate``: those whose upload is sent.

    Args:
        connected: what ``Wire.connected`` returned, with the axis of runs first; one of these per
            slot is left to the method that is made of methods.
        present: (runs, slots).
    """
    if isinstance(connected, dict):
        return present
    return present & (connected[:, 1] if connected.dim() == 3 else connected)


def bytes_down(
    common: Tree, own: Tree, sparse: Mapping[str, str], receives: np.ndarray
) -> np.ndarray:
    """Count the bytes of the messages to the clients that receive (runs, slots), per run."""
    to_all = num_bytes(common, marks_of(sparse, "common"), 1)[..., None]
    total: np.ndarray = (receives * (to_all + num_bytes(own, marks_of(sparse, "own"), 2))).sum(1)
    return total


def sent(
    messages: Mapping[str, Tree],
    sparse: Mapping[str, str],
    connected: Any,
    trains: np.ndarray,
    present: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the bytes of messages and of uploads of the connected clients, per run.

    ``connected`` is None for all, what ``Wire.connected`` returned, or one of these per slot of the
    trees; the others (runs, slots) mark who receives and who reports, unless it says less.
    """
    if isinstance(connected, dict):
        return _sent_by_slot(messages, sparse, connected, trains, present)
    if connected is not None:
        who = connected.cpu().numpy()
        trains, present = (trains & who, present & who) if who.ndim == 2 else (who[:, 0], who[:, 1])
    up = present * num_bytes(messages["upload"], marks_of(sparse, "upload"), 2)
    return bytes_down(messages["common"], messages["own"], sparse, trains), up.sum(1)


def _sent_by_slot(
    messages: Mapping[str, Tree],
    sparse: Mapping[str, str],
    connected: Mapping[str, Any],
    trains: np.ndarray,
    present: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Count the bytes of the slots of a method that is made of methods; see `sent`."""
    down = up = np.zeros(len(trains), dtype=np.int64)
    for slot in sorted({key for message in messages.values() for key in message}):
        inner = {name: _slot(message, slot) for name, message in messages.items()}
        more = sent(inner, _inside(sparse, slot), connected.get(slot), trains, present)
        down, up = down + more[0], up + more[1]
    return down, up


def _renamed(part: Tree, fn: Callable[[str, Tensor], Tensor], prefix: str = "") -> Tree:
    """Apply ``fn`` to every leaf and its name."""
    return {
        k: _renamed(v, fn, f"{prefix}{k}/") if isinstance(v, dict) else fn(f"{prefix}{k}", v)
        for k, v in part.items()
    }


def _slot(message: Tree, slot: str) -> Tree:
    """Return one entry of a message as a tree: its branch, its only leaf, or nothing."""
    found = message.get(slot, {})
    return found if isinstance(found, dict) else {slot: found}


def _inside(sparse: Mapping[str, str], slot: str) -> dict[str, str]:
    """Return what is declared about the branch of one slot."""
    found = {}
    for leaf, marks in sparse.items():
        message, _, rest = leaf.partition("/")
        if rest.startswith(f"{slot}/"):
            skip = len(message) + len(slot) + 2
            found[f"{message}/{leaf[skip:]}"] = f"{message}/{marks[skip:]}"
    return found


def _row_bytes(leaf: Tensor, axes: int) -> int:
    """Return the bytes of one row of a leaf whose rows are numbered by its first axes."""
    return int(np.prod(leaf.shape[axes:], dtype=np.int64)) * leaf.element_size()


def _checked(message: Tree, marks: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the leaves by name; refuse marks that do not fit them."""
    leaves = dict(tree.items(message))
    faults = [
        f"sparse names {name!r}, but the message has no such leaf; it has {sorted(leaves)}."
        for name in sorted({*marks, *marks.values()} - leaves.keys())
    ]
    for name, other in marks.items():
        if not faults and leaves[name].shape[: leaves[other].dim()] != leaves[other].shape:
            faults.append(
                f"sparse marks {name!r} by {other!r}, whose shape {tuple(leaves[other].shape)} "
                f"does not begin {tuple(leaves[name].shape)}; give one mark per row."
            )
    if faults:
        raise ContractError("\n".join(faults))
    return leaves
