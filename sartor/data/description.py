"""A federation in words and figures: its sizes, its label skew, a table of its clients."""

from __future__ import annotations

from typing import Any

import torch

from sartor.data.samples import Samples
from sartor.data.split import SPLITS


def describe(federation: Samples) -> dict[str, Any]:
    """Return the sizes and the label skew as JSON-able values.

    The skew is the mean over clients of the total variation distance between a client's class
    shares p_i and those of all training samples p: ½ Σ_c |p_ic − p_c|.
    """
    counts = federation.label_counts()
    sizes = {name: federation.split(name).sizes for name in SPLITS}
    skew, held = None, None
    if federation.num_classes:
        shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
        whole = counts.sum(0) / counts.sum().clamp(min=1)
        skew = float(0.5 * (shares - whole).abs().sum(1).mean())
        held = float((counts > 0).sum(1).double().mean())
    return {
        "clients": federation.num_clients,
        "samples": {name: int(size.sum()) for name, size in sizes.items()},
        "smallest": {name: int(size.min()) for name, size in sizes.items()},
        "largest": {name: int(size.max()) for name, size in sizes.items()},
        "input_shape": list(federation.input_shape),
        "num_classes": federation.num_classes,
        "task": federation.task,
        "classes_per_client": held,
        "label_skew": skew,
        "info": federation.info,
    }


def summary(federation: Samples, limit: int = 20) -> str:
    """Return a table of the first clients: samples of each split and the largest classes."""
    facts = describe(federation)
    lines = [
        f"{federation.num_clients} clients, {facts['samples']['train']} training, "
        f"{facts['samples']['val']} validation, {facts['samples']['test']} test samples; "
        f"inputs {'x'.join(map(str, federation.input_shape)) or 'scalar'}, "
        + {
            "classification": f"{federation.num_classes} classes",
            "multilabel": f"{federation.num_classes} labels, several at once",
            "regression": "real targets",
            "next-token": f"the next of {federation.num_classes} tokens",
        }[federation.task]
    ]
    if facts["label_skew"] is not None:
        lines.append(
            f"{facts['classes_per_client']:.1f} classes a client, label skew "
            f"{facts['label_skew']:.2f} (0: all clients alike, towards 1: nothing in common)"
        )
    if "subset" in federation.info:
        lines.append(f"a subset of the published data: {federation.info['subset']}")
    width = max(6, *(len(name) for name in federation.names[:limit]))
    lines.append(f"{'client':<{width}}  {'train':>6}  {'val':>5}  {'test':>5}  classes")
    counts = federation.label_counts()[:limit]
    for i, name in enumerate(federation.names[:limit]):
        size = [len(federation.split(split).of(i)) for split in SPLITS]
        top = torch.argsort(counts[i], descending=True, stable=True)[:5].tolist()
        shown = " ".join(f"{c}:{int(counts[i, c])}" for c in top if counts[i, c] > 0)
        more = int((counts[i] > 0).sum()) - sum(int(counts[i, c]) > 0 for c in top)
        tail = f" +{more} more" if more else ""
        lines.append(f"{name:<{width}}  {size[0]:>6}  {size[1]:>5}  {size[2]:>5}  {shown}{tail}")
    rest = federation.num_clients - limit
    if rest > 0:
        lines.append(f"... and {rest} more client{'s' if rest > 1 else ''}")
    return "\n".join(lines)
