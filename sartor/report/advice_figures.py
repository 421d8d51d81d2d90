"""Draw the figures of an advice: the error at every λ, and how the clients differ."""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
import numpy as np

from sartor.adviser.advice import Advice, Client
from sartor.adviser.words import radius, wins_below
from sartor.report.drawing import (
    BAD,
    DASH,
    GOOD,
    INK,
    SERIES,
    SOFT,
    STYLE,
    Figure,
    clip,
    legend_above,
    make_axes,
    plot,
)
from sartor.results.metrics import Array

NAMED = 25
"""The most clients whose names fit below a figure."""

MOST = 400
"""The most clients in a figure."""

_UP = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def draw_advice(advice: Advice) -> list[Figure]:
    """Draw the figures of an advice."""
    clients = distances if advice.basis == "theory" else losses
    return [error_by_pull(advice), clients(advice)]


def error_by_pull(advice: Advice) -> Figure:
    """Draw the mean error against λ, from training alone (0) to one model for all (∞)."""
    pulls, errors = np.asarray(advice.pulls), np.asarray(advice.errors, dtype=float)
    x, y = np.log10(pulls[1:-1]), errors[1:-1]
    known = errors[np.isfinite(errors)]
    steep = known.min() > 0 and known.max() > 8 * known.min()
    low, high = _window(advice, x, errors, steep)
    shown = (x >= low) & (x <= high) & np.isfinite(y)
    left, right = low - 0.09 * (high - low), high + 0.09 * (high - low)
    axes, canvas = make_axes(7.4, 4.2)
    what = "expected excess loss" if advice.basis == "theory" else advice.kind
    if steep:
        axes.set_yscale("log")
    xs, ys = x[shown], y[shown]
    plot(axes, xs, ys, SERIES[1], "o" if len(x) < 30 else None, markersize=4)
    for place, error, near in ((left, errors[0], 0), (right, errors[-1], -1)):
        if len(xs):
            axes.plot([place, xs[near]], [error, ys[near]], color=SERIES[1], linestyle=":", lw=1.2)
        axes.plot([place], [error], color=SERIES[0], marker="s", markersize=7, clip_on=False)

    def place_of(pull: float) -> float:
        if pull == 0 or math.isinf(pull):
            return left if pull == 0 else right
        return float(np.clip(math.log10(pull), low, high))

    chosen = advice.error_at(advice.prox_strength)
    evidence = advice.basis == "evidence"
    label = "advised" if evidence else f"chosen: λ = {spell(advice.prox_strength)}"
    dot = {"markersize": 11, "linestyle": "none", "zorder": 5, "label": label}
    plot(axes, [place_of(advice.prox_strength)], [chosen], GOOD, "o", **dot)
    _mark_rules(axes, advice, place_of)
    decades = _decades(low, high)
    axes.set_xticks(
        [left, *decades, right],
        ["alone\nλ = 0", *(f"10{str(d).translate(_UP)}" for d in decades), "one model\nλ = ∞"],
    )
    axes.set_xlim(left - 0.05 * (high - low), right + 0.05 * (high - low))
    axes.set_xlabel("λ, the pull towards the shared model")
    axes.set_ylabel(f"mean {what}")
    legend_above(axes, 6 if advice.rules else 1, most=3)
    scale = " Both axes are logarithmic." if steep else ""
    rules = " Triangles: λ by each rule; one outside the range is drawn at its edge."
    rules *= bool(advice.rules)
    if evidence:
        rules = " Both ends have a ridge of their own, and the learned prior is an average over "
        rules += "several; the other points are single multiples of its spread."
    return Figure(
        "error-by-pull",
        f"{what[0].upper()}{what[1:]} at every λ",
        "From training alone on the left (LocalTrain) to one model for all on the right "
        f"(GlobalTrain). Lower is better; the large dot is the recommendation.{rules}{scale}",
        f"Line chart of the mean {what} against λ: {errors[0]:.4g} alone, {errors[-1]:.4g} with "
        f"one model, {chosen:.4g} at the chosen λ = {spell(advice.prox_strength)}.",
        canvas,
    )


def _mark_rules(axes: Any, advice: Advice, place_of: Any) -> None:
    level = 0.0
    for number, (name, pull) in enumerate(advice.rules.items()):
        if name == "expected error" and pull == advice.prox_strength:
            continue
        colour = SERIES[2 + number % (len(SERIES) - 2)]
        along = {"transform": axes.get_xaxis_transform(), "color": colour, "clip_on": False}
        place, top = place_of(pull), 0.98 - level
        axes.plot([place, place], [0, top], lw=1.1, linestyle=DASH, alpha=0.8, **along)
        label = f"{name}: {spell(pull)}"
        axes.plot([place], [top], marker="v", ms=7, mew=0, linestyle="none", label=label, **along)
        level += 0.065  # at different heights, so that no marker hides another


def _window(advice: Advice, x: Array, errors: Array, steep: bool) -> tuple[float, float]:
    """Return the range of log10 λ in which the curve changes, widened to the rules close by."""
    if len(x) < 30:
        return float(x[0]), float(x[-1])
    level = np.log(errors) if steep else errors
    span = 0.01 * (level.max() - level.min())
    moving = np.flatnonzero(
        (np.abs(level[1:-1] - level[0]) > span) & (np.abs(level[1:-1] - level[-1]) > span)
    )
    middle = len(x) // 2
    first, last = (moving[0], moving[-1]) if len(moving) else (middle, middle)
    low, high = float(x[first]) - 0.5, float(x[last]) + 0.5
    for pull in (*advice.rules.values(), advice.prox_strength):
        if 0.0 < pull < math.inf:
            place = math.log10(pull)
            low, high = max(min(low, place - 0.3), low - 2.5), min(max(high, place + 0.3), high + 2)
    return max(low, float(x[0])), min(high, float(x[-1]))


def _decades(low: float, high: float) -> list[int]:
    edge = 0.06 * (high - low)  # the two ends have labels of their own
    whole = list(range(math.ceil(low + edge), math.floor(high - edge) + 1))
    return whole[:: math.ceil(len(whole) / 7)] if whole else []


def spell(pull: float) -> str:
    """Return a λ as text: 0, ∞ or three digits.

    >>> spell(0.0), spell(float("inf")), spell(0.012345)
    ('0', '∞', '0.0123')
    """
    return "∞" if math.isinf(pull) else f"{pull:.3g}"


def distances(advice: Advice) -> Figure:
    """Draw how far every client's best model is from the mean, and the noise of its fit."""
    people, thin = _thinned(sorted(advice.clients, key=lambda client: -client.distance))
    places = np.arange(len(people))
    apart = np.asarray([client.distance for client in people])
    noise = np.asarray([client.noise for client in people])
    axes, canvas = make_axes(7.4, 3.9)
    few = len(people) <= 120
    bars = {"color": SERIES[1], "alpha": 0.75, "linewidth": 0}
    axes.bar(places, apart, 0.8 if few else 1.0, label="distance of its best model", **bars)
    look = {"linestyle": "none" if few else "solid", "linewidth": 1.2}
    look |= {"markersize": 5 if len(people) <= 40 else 3, "label": "noise of its own fit"}
    plot(axes, places, noise, SERIES[2], "D" if few else None, **look)
    found, edge = radius(advice)[0], wins_below(advice)
    axes.axhline(found, color=INK, linestyle=DASH, lw=1.3, label=f"R̂ = {found:.3g}")
    axes.axhline(edge, color=BAD, linestyle=":", lw=1.8, label=f"crossover, R = {edge:.3g}")
    _name(axes, [client.name for client in people])
    axes.set_ylabel("distance between models")
    axes.set_ylim(bottom=0)
    legend_above(axes, 4, most=2)
    above = int((apart > noise).sum())
    side, verb = ("above", "loses to") if found > edge else ("below", "beats")
    return Figure(
        "distance-by-client",
        "How different the clients are",
        "Bars: estimated distance of each client's best model from the mean of all, noise removed "
        "(no bar: indistinguishable from 0). Diamonds: error of the client's own fit due to few "
        f"samples. R̂ is {side} the crossover, so one model for all {verb} training alone, in "
        f"squared error of the parameters.{thin}",
        f"Bar chart of the estimated distances of {len(people)} clients, from {apart.min():.3g} "
        f"to {apart.max():.3g}; {above} of them are larger than the noise of the client's own fit.",
        canvas,
    )


def losses(advice: Advice) -> Figure:
    """Draw every client's loss alone, with one model, and as advised."""
    order = sorted(advice.clients, key=lambda c: -c.alone if math.isfinite(c.alone) else math.inf)
    people, thin = _thinned(order)
    places = np.arange(len(people))
    alone, one, best = (
        np.asarray([getattr(client, name) for client in people], dtype=float)
        for name in ("alone", "one_model", "advised")
    )
    axes, canvas = make_axes(7.4, 3.9)
    size = 7 if len(people) <= 40 else 3.5
    if len(people) <= 120:
        axes.vlines(places, alone, one, color=SOFT, lw=1, alpha=0.6)
    for values, mark, colour, label in (
        (alone, "s", SERIES[0], "alone"),
        (one, "D", SERIES[2], "one model for all"),
        (best, "o", GOOD, "as advised"),
    ):
        look = {"linestyle": "none", "markersize": size, "alpha": 0.9, "label": label}
        plot(axes, places, values, colour, mark, **look)
    _name(axes, [client.name for client in people])
    axes.set_ylabel(advice.kind)
    legend_above(axes, 3)
    return Figure(
        "loss-by-client",
        "Loss of each client",
        f"{advice.kind.capitalize()} of every client: alone, with one model for all, and as "
        f"advised; lower is better. With few samples, single clients are uncertain.{thin}",
        f"Chart of the {advice.kind}es of {len(people)} clients; one model for all is worse than "
        f"training alone for {len(advice.hurt)} of them.",
        canvas,
    )


def _thinned(people: list[Client]) -> tuple[list[Client], str]:
    """Return evenly spaced clients of a long list, and a sentence that says so."""
    step = math.ceil(len(people) / MOST)
    return people[::step], f" Of {len(people):,} clients, one in {step} is drawn." * (step > 1)


def _name(axes: Any, names: list[str]) -> None:
    with mpl.rc_context(STYLE):
        if len(names) <= NAMED:
            axes.set_xticks(range(len(names)), [clip(name, 12) for name in names])
            if max(map(len, names)) > 3:
                axes.tick_params(axis="x", rotation=60 if len(names) <= 12 else 90)
            axes.tick_params(axis="x", labelsize=8)
        else:
            axes.set_xticks([])
            axes.set_xlabel(f"{len(names):,} clients, sorted")
