"""Federation: the samples of all clients, checked, and the ways to make one.

Everything that could not be trained on is refused here, with all faults listed at once. Readers
(``arrays``, ``tables``, ``folder``, ``sources``, ``datasets``) return plain ``Samples``; a
constructor of ``Federation`` has the arguments and the docstring of its reader.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor

from sartor.core.errors import FederationError
from sartor.data import arrays, datasets, folder, sources, tables
from sartor.data.checks import check
from sartor.data.samples import Samples
from sartor.data.split import SPLITS

P = ParamSpec("P")


def _made_by(read: Callable[P, Samples]) -> classmethod[Any, P, Federation]:
    """Return a constructor with the arguments and the docstring of a reader."""

    @wraps(read)
    def make(cls: type[Federation], *given: P.args, **named: P.kwargs) -> Federation:
        found = read(*given, **named)
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})

    known = inspect.signature(read)
    first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
    make.__signature__ = known.replace(  # type: ignore[attr-defined]
        parameters=[first, *known.parameters.values()], return_annotation="Federation"
    )
    return classmethod(make)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Federation(Samples):
    """The data of all clients.

    The tensors are shared, not copied: federations made from one data set hold the same ``x``.
    Treat them as read-only.

    Attributes:
        x: ``(samples, ...)`` features, float32 or float64 (int64 for tokens), on the CPU.
        y: ``(samples,)`` int64 class labels, or real targets when ``num_classes`` is 0;
            ``(samples, labels)`` 0.0 and 1.0 of a multi-label task; ``(samples, steps)`` token ids
            of a next-token task, 0 for padding.
        train: rows of every client for training; no client may be empty.
        val: rows for validation; may be empty for all clients.
        test: rows for testing.
        names: one name per client.
        num_classes: the number of classes, of labels, or of token ids; 0 for regression.
        info: how the federation was made, as JSON-able values.
        task: "classification", "multilabel", "regression" or "next-token"; by default the first,
            or regression when ``num_classes`` is 0.
    """

    if not TYPE_CHECKING:  # a checker of types sees the fields

        def __new__(cls, *given: Any, **named: Any) -> Federation:
            """Refuse arrays alone and say what to call instead."""
            fields = list(cls.__dataclass_fields__)
            places = set(fields[: len(given)]) | set(named)
            if places and (not places >= set(fields[:7]) or places - set(fields)):
                raise FederationError(
                    "Federation(...) wants samples that are divided among clients already; with "
                    "arrays use Federation.from_arrays(x, y, client=...), where client names the "
                    "client of every sample. For a table there is Federation.from_dataframe(df, "
                    "client='COLUMN', label='COLUMN'), for files Federation.from_folder(path)."
                )
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse what cannot be trained on."""
        if not (isinstance(self.x, Tensor) and isinstance(self.y, Tensor)):
            raise FederationError(
                f"Federation(...) takes tensors, got {type(self.x).__name__} and "
                f"{type(self.y).__name__}; Federation.from_arrays(x, y, client=...) takes arrays."
            )
        super().__post_init__()
        check(self)

    from_arrays = _made_by(arrays.from_arrays)
    from_dataframe = _made_by(tables.from_dataframe)
    from_file = _made_by(tables.from_file)
    from_torch = _made_by(sources.from_torch)
    from_hf = _made_by(sources.from_hf)
    from_folder = _made_by(folder.from_folder)
    from_dataset = _made_by(datasets.from_dataset)

    def without(self, *clients: str | int) -> Federation:
        """Return the federation without some clients, given by name or by position."""
        kept = torch.ones(self.num_clients, dtype=torch.bool)
        kept[[self.index(client) for client in clients]] = False
        if not bool(kept.any()):
            raise FederationError("without() would leave no client; keep at least one.")
        return self._keep(kept)

    def __repr__(self) -> str:
        """Return the sizes in one line."""
        train, val, test = (len(self.split(name).rows) for name in SPLITS)
        return (
            f"Federation({self.num_clients} clients, train={train}, val={val}, test={test}, "
            f"input_shape={self.input_shape}, num_classes={self.num_classes})"
        )
