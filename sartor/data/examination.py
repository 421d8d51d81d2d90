"""Look at a table of clients before it is trained on: what is in it, and what may be wrong.

>>> table = {"clinic": list("aabb") * 10, "nr": list(range(40)), "ill": [0, 1] * 20}
>>> looked = examine(table, client="clinic", label="ill")
>>> [(finding.kind, finding.columns) for finding in looked.findings]
[('id', ('nr',))]
>>> looked.flags()
['--drop', 'nr']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sartor.data.cells import Array, Note, read_column, sample_of
from sartor.data.checks import raise_faults
from sartor.data.detection import detect
from sartor.data.findings import STATES, Columns, Finding, listed, refused
from sartor.data.folder import table_of
from sartor.data.numerals import Decimal, decimal_of
from sartor.data.shifts import Shift, shifts, shown, units
from sartor.data.table_files import read_table
from sartor.data.tables import read_clients, read_frame, read_labels, role_faults


@dataclass(frozen=True)
class ClientFacts:
    """What one client has.

    Attributes:
        name: of the client.
        samples: its rows.
        classes: how many classes it has; None for other tasks.
        majority: the most frequent of them.
        majority_share: its share, which is the accuracy of always answering it.
        median: of the target, for a regression.
        spread: the middle half of the target: the difference of its quartiles.
        empty: the share of its cells that are empty.
    """

    name: str
    samples: int
    classes: int | None
    majority: str | None
    majority_share: float | None
    median: float | None
    spread: float | None
    empty: float


@dataclass(frozen=True, repr=False)
class Examination:
    """What was found in a table.

    Attributes:
        source: the file, or "dataframe".
        client: the column of the client.
        label: the columns of the label.
        task: what the label makes it.
        rows: how many there are.
        columns: how many may be learned from.
        clients: what each client has.
        empty: share of empty cells, column -> client -> share, for columns that have some.
        shifts: every column and client, the largest first.
        findings: faults first, then suspicions, then notes.
        read: the columns that could be read, as they were read.
    """

    source: str
    client: str
    label: tuple[str, ...]
    task: str
    rows: int
    columns: int
    clients: tuple[ClientFacts, ...]
    empty: Mapping[str, Mapping[str, float]]
    shifts: tuple[Shift, ...]
    findings: tuple[Finding, ...]
    read: Mapping[str, Array] = field(repr=False, default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether training would take the table as it is."""
        return all(finding.state != "fault" for finding in self.findings)

    def __str__(self) -> str:
        """Return one line for every finding."""
        lines = [f"{self.source}: {self.rows:,} rows, {len(self.clients)} clients, {self.task}"]
        for one in self.findings:
            about = ", ".join([*one.columns[:5], *(["..."] if len(one.columns) > 5 else [])])
            about = f" ({about})" if about else ""
            lines.append(f"{one.state}: {one.kind}{about}: {one.found}; {one.fix}")
        return "\n".join(lines if self.findings else [*lines, "nothing to fix was found"])

    __repr__ = __str__  # a bare name at a prompt shows what was found

    def flags(self) -> list[str]:
        """Return the words for the command line that settle what flags can settle."""
        settled: dict[str, list[str]] = {}
        for finding in self.findings:
            if finding.state == "note":
                continue
            for name, value in zip(finding.flags[::2], finding.flags[1::2], strict=True):
                known = settled.setdefault(name, [])
                known += [value] if value not in known else []
        return [word for name, values in settled.items() for word in (name, listed(values))]

    def with_faults(self, faults: Sequence[str]) -> Examination:
        """Return this with what else the reader refuses, if no finding says it yet."""
        known = {finding.found for finding in self.findings}
        new = [refused("table", (), fault) for fault in faults]
        new = [finding for finding in new if finding.found not in known]
        return replace(self, findings=(*new, *self.findings))

    def describe(self) -> dict[str, Any]:
        """Return everything as plain values."""
        whole = {name: getattr(self, name) for name in ("source", "client", "task", "rows")}
        return {
            **whole,
            "label": list(self.label),
            "columns": self.columns,
            "healthy": self.healthy,
            "clients": [asdict(one) for one in self.clients],
            "empty": {name: dict(shares) for name, shares in self.empty.items()},
            "shifts": [shown(shift) for shift in self.shifts],
            "findings": [asdict(finding) for finding in self.findings],
            "flags": self.flags(),
        }


def examine(
    source: Any,
    *,
    client: str | None = None,
    label: str | Sequence[str] | None = None,
    task: str | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    missing: str = "error",
    decimal: Decimal = "auto",
    name: str = "dataframe",
) -> Examination:
    """Examine a table of clients, by the rules by which ``Federation.from_dataframe`` reads it.

    Args:
        source: a data frame, a dict of columns, a CSV, TSV or Parquet file, or a folder with one
            such file per client.
        client: the column that names the client of a row; a folder needs none.
        label: the column of the label, or several; a folder has a usual one.
        task: "classification", "multilabel" or "regression"; by default what the label says.
        drop: columns to leave out.
        categories: columns of numbers that are categories.
        missing: what training will do with empty cells; "error" makes them a fault.
        decimal: how numbers in texts are written.
        name: what the table is called; a file or a folder has its own.

    Raises:
        FederationError: the table cannot be read at all, or has no such columns.
    """
    if isinstance(source, str | Path):
        file = Path(source).expanduser()
        name = file.name
        if file.is_dir():
            one = label if isinstance(label, str) or label is None else next(iter(label))
            source, client, label = table_of(file, one)
        else:
            source = read_table(file)
    faults: list[str] = []
    columns = read_frame(source, faults)
    labels = [label] if isinstance(label, str) else list(label or ())
    if client is None or not labels:
        lost = " and ".join(w for w, v in (("client=", client), ("label=", labels)) if not v)
        raise_faults([f"{name}: say which column with {lost} (it has: {', '.join(columns)})."])
        raise AssertionError
    wanted = {"client": [client], "label": labels, "drop": drop, "categories": categories}
    raise_faults([*faults, *role_faults(columns, wanted)])
    rest = [one for one in columns if one not in {client, *labels, *drop}]
    if decimal == "auto":
        looked = [one for one in (*rest, *labels) if one not in categories]
        decimal = decimal_of(sample_of(columns[one]) for one in looked)
    table, whole = _read(columns, client, labels, rest, task, categories, missing, decimal)
    return _examined(name, client, tuple(labels), table, whole)


def _read(
    columns: Mapping[str, Array],
    client: str,
    labels: Sequence[str],
    rest: Sequence[str],
    task: str | None,
    categories: Sequence[str],
    missing: str,
    decimal: Decimal,
) -> tuple[Columns, list[str]]:
    """Read the columns, and list what is wrong with clients and labels."""
    faults: list[str] = []
    notes: list[Note] = []
    ids = read_clients(columns[client], client, faults)
    names, owner = np.unique(ids, return_inverse=True)
    read_as: dict[str, Any] = {"decimal": decimal, "notes": notes}
    asked = {one: columns[one] for one in labels}
    y, class_names, kind = read_labels(asked, task, ids, faults, read_as)
    read, refused = {}, {}
    for one in rest:
        own: list[str] = []
        found = read_column(one, columns[one], own, category=one in categories, **read_as)
        if found is None:
            refused[one] = own[0]
        else:
            read[one] = found
    targets = {one: read_column(one, columns[one], [], decimal=decimal) for one in labels}
    if y is not None and kind == "classification" and not class_names:
        class_names = [str(i) for i in range(int(y.max()) + 1)]
    table = Columns(
        raw={one: columns[one] for one in rest},
        read=read,
        faults=refused,
        notes=list(dict.fromkeys(notes)),
        owner=owner.astype(np.int64),
        clients=tuple(str(one) or "(none)" for one in names.tolist()),
        labels={one: found for one, found in targets.items() if found is not None},
        task=kind,
        y=y,
        class_names=tuple(class_names),
        missing=missing,
    )
    return table, faults


def _examined(
    source: str, client: str, labels: tuple[str, ...], table: Columns, faults: Sequence[str]
) -> Examination:
    columns = {**table.read, **table.labels}
    moved = shifts(columns, table.levels, table.owner, table.clients)
    other = [
        unit
        for name, (kind, values) in table.read.items()
        if kind == "number"
        for unit in units(name, values, table.owner, table.clients)
    ]
    moved.sort(key=lambda shift: (not shift.is_flagged, -abs(shift.distance)))
    found = list(detect(table, faults, moved, other))
    gone = {name: table.empty(name) for name in table.read}
    return Examination(
        source=source,
        client=client,
        label=labels,
        task=table.task,
        rows=len(table.owner),
        columns=len(table.raw),
        clients=tuple(_clients(table)),
        empty={
            name: dict(zip(table.clients, shares.tolist(), strict=True))
            for name, shares in gone.items()
            if shares.any()
        },
        shifts=tuple(moved),
        findings=tuple(sorted(found, key=lambda one: STATES.index(one.state))),
        read={name: values for name, (_, values) in table.read.items()},
    )


def _clients(table: Columns) -> Iterator[ClientFacts]:
    width = max(len(table.read), 1)
    empty = sum((table.empty(name) for name in table.read), np.zeros(len(table.clients))) / width
    classes = table.y is not None and table.task == "classification"
    targets = table.y is not None and table.task == "regression"
    parts = table.parts(table.y) if table.y is not None else [np.zeros(0)] * len(table.clients)
    for i, (name, y) in enumerate(zip(table.clients, parts, strict=True)):
        facts: dict[str, Any] = dict.fromkeys(
            ("classes", "majority", "majority_share", "median", "spread")
        )
        if classes:
            counts = np.bincount(y, minlength=len(table.class_names))
            top = int(np.argmax(counts))
            facts |= {"classes": int((counts > 0).sum()), "majority": table.class_names[top]}
            facts["majority_share"] = float(counts[top] / counts.sum())
        elif targets:
            low, middle, high = np.quantile(y, (0.25, 0.5, 0.75))
            facts |= {"median": float(middle), "spread": float(high - low)}
        yield ClientFacts(name, int(table.sizes[i]), empty=float(empty[i]), **facts)


__all__ = ["ClientFacts", "Examination", "Finding", "examine"]
