"""Draw heat maps: which clients borrow from which, and which classes each client has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure as Canvas

from sartor.report.drawing import HEAT, STYLE, Figure, clip
from sartor.results.comparison import Comparison
from sartor.results.metrics import Array

CELLS = 1200
"""The most cells that are drawn one by one, which stay sharp; a larger matrix is an image."""

SIZE = 4.9
"""Inches of the longer side of a single matrix."""

PANELS = 3
"""The most rounds whose mixing matrix is drawn: the first, the middle and the last."""


def mixing_matrix(comparison: Comparison) -> Figure | None:
    """Draw the mixing matrix of the last method that recorded one, at up to three rounds."""
    mixing = {n: [s for s in r.snapshots if "mix" in s] for n, r in comparison.items()}
    name = next((n for n in reversed(mixing) if mixing[n]), None)
    if name is None:
        return None
    taken, clients = mixing[name], comparison[name].clients
    places = sorted(set(np.linspace(0, len(taken) - 1, PANELS).round().astype(int).tolist()))
    mixes = [_matrix(taken[place]["mix"]) for place in places]
    rounds = [taken[place].get("round", "?") for place in places]
    top = max(float(np.abs(mix).max()) for mix in mixes) or 1.0
    last, layers = mixes[-1], np.ndim(taken[-1]["mix"]) > 3
    when = "round " if len(rounds) == 1 else "rounds "
    caption = (
        f"Row: the client that receives; column: the client it borrows from; {name}, {when}"
        f"{', '.join(map(str, rounds))}, run 0. Full colour is {top:.2f}, and opacity grows with "
        "the square root of the share, so that small shares are visible."
    )
    if layers:
        caption += " Shares are means over the layers."
    if any((mix < 0).any() for mix in mixes):
        caption += " Negative shares are drawn by their absolute value."
    kept = [f"{float(np.diag(mix).mean()):.0%}" for mix in mixes]
    change = f"{kept[0]} at first and " if len(kept) > 1 else ""
    return Figure(
        "mixing-matrix",
        "Which clients borrow from which",
        caption,
        f"Heat map of the {len(last)} by {len(last)} mixing matrix of {name}; on average a client "
        f"keeps {change}{kept[-1]} for itself{' at the end' if change else ''}.",
        heat(
            [np.sqrt(np.abs(mix) / top) for mix in mixes],
            clients,
            clients,
            titles=[f"round {t}" for t in rounds] if len(rounds) > 1 else None,
        ),
        wide=len(rounds) > 1,
    )


def _matrix(mix: Any) -> Array:
    """Return run 0 as (clients, clients); the mean if there is a matrix for each layer."""
    found = np.asarray(mix, dtype=float)[0]
    found = np.where(np.isfinite(found), found, 0)
    return found.mean(axis=tuple(range(1, found.ndim - 1))) if found.ndim > 2 else found


def label_map(comparison: Comparison) -> Figure | None:
    """Draw which classes each client has, as shares of its training samples."""
    result = next((r for r in comparison.values() if r.label_counts is not None), None)
    if result is None or result.label_counts is None:
        return None
    return class_shares(
        "label-map",
        "Which classes each client has",
        "Share of each class among the training samples of a client (run 0).",
        result.clients,
        np.asarray(result.label_counts[0]),
    )


def class_shares(
    key: str, title: str, caption: str, clients: Sequence[str], counts: Array
) -> Figure:
    """Draw the shares of the classes of every client from ``counts``, (clients, classes) samples.

    The caption says what is counted; the meaning of the colours is added.
    """
    total = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    classes = [str(index) for index in range(counts.shape[1])]
    held = (counts > 0).sum(axis=1)
    return Figure(
        key,
        title,
        f"{caption} Full colour: the client has only this class.",
        f"Heat map of {counts.shape[0]} clients by {counts.shape[1]} classes; a client has "
        f"between {int(held.min())} and {int(held.max())} of the classes.",
        heat([share], clients, classes, x="class", y="client"),
    )


def heat(
    shares: Sequence[Array],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    titles: Sequence[str] | None = None,
    x: str = "",
    y: str = "",
) -> Canvas:
    """Draw matrices in [0, 1] of one shape in a row, in one hue whose opacity is the value.

    A matrix alone is ``SIZE`` inches long on its longer side.
    """
    height, width = shares[0].shape
    many = len(shares) > 1
    side = 6.3 / len(shares) if many else SIZE
    tall = min(max(side * height / max(width, height), side if many else 2.4), side)
    canvas = Canvas(figsize=(7.4 if many else side + 0.9, tall + 0.9), layout="constrained")
    with mpl.rc_context({**STYLE, "axes.grid": False, "axes.spines.bottom": False}):
        panels = canvas.subplots(1, len(shares), sharey=True, squeeze=False)[0]
        for number, (axes, share) in enumerate(zip(panels, shares, strict=True)):
            _cells(axes, share)
            axes.set_xlim(-0.5, width - 0.5)
            axes.set_ylim(height - 0.5, -0.5)
            axes.set_xlabel(x)
            axes.set_ylabel(y if number == 0 else "")
            if titles is not None:
                axes.set_title(titles[number])
            turned = any(len(name) > 3 for name in columns)
            _ticks(axes.xaxis, columns, 10 if many else 20, rotate=turned)
            _ticks(axes.yaxis, rows, 20 if many else 40)
            for spine in axes.spines.values():
                spine.set_visible(True)
    return canvas


def _cells(axes: Any, share: Array) -> None:
    """Draw one matrix; opacity looks right on any background."""
    if share.size > CELLS:
        image = np.zeros((*share.shape, 4))
        image[..., :3] = (0.0, 0.447, 0.698)
        image[..., 3] = share
        axes.imshow(image, aspect="auto", interpolation="nearest")
        return
    rows, columns = np.nonzero(share > 0.004)
    corner = np.stack([columns, rows], axis=1) - 0.46
    square = 0.92 * np.array([[0, 0], [0, 1], [1, 1], [1, 0]])
    colours = np.tile(to_rgba(HEAT), (len(rows), 1))
    colours[:, 3] = np.minimum(share[rows, columns], 1)
    axes.add_collection(
        PolyCollection(list(corner[:, None] + square), facecolors=colours, linewidths=0)
    )


def _ticks(axis: Any, names: Sequence[str], most: int, rotate: bool = False) -> None:
    step = math.ceil(len(names) / most)
    shown = list(range(0, len(names), step))
    axis.set_ticks(shown, [clip(names[index]) for index in shown])
    if rotate:
        axis.set_tick_params(rotation=90)
    axis.set_tick_params(labelsize=8)
