"""How a training came to its end: who chose the rounds, and whether its curve still falls.

A curve still falls if over its last quarter (WINDOW evaluations at least) a straight line through
the mean losses falls by more than its own 95 % uncertainty, and by more than LEAST of the loss. The
losses are those of validation samples where there are any, else of test samples. A run that stopped
by itself, or diverged, is past its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sartor.results.headline import headline_metric_of
from sartor.results.metrics import t_quantile
from sartor.results.readings import Readings

WINDOW = 4
LEAST = 0.01


def still_falling(result: Readings, run: int) -> dict[str, Any] | None:
    """Say by which share the loss still falls over the last rounds of a run, or None."""
    settled = "best_round" in (result.stopped[run] or {})  # not ended by a callback
    if settled or result.diverged[run] is not None:
        return None
    split = "val" if (result.headline, "val") in result.scores else "test"
    rounds, losses = result.loss_curve(None, split, run)
    last = max(WINDOW, -(-len(rounds) // 4))
    if len(rounds) <= WINDOW or not np.isfinite(losses[-last:]).all():
        return None
    x, y = np.asarray(rounds[-last:], dtype=np.float64), losses[-last:]
    span, x = x[-1] - x[0], x - x.mean()
    slope = float(x @ y / (x @ x))
    left = y - y.mean() - slope * x
    noise = float(np.sqrt(left @ left / (last - 2) / (x @ x)))
    fall, before = -slope * span, float(y.mean() + slope * x[0])
    surely = fall - t_quantile(0.95, last - 2) * noise * span
    if surely <= 0 or fall <= LEAST * abs(before):
        return None
    words = {"val": "validation", "test": "test"}[split]
    return {"loss": words, "share": fall / before if before else 1.0, "rounds": int(span)}


def longer(groups: Iterable[tuple[str, Readings, Sequence[int]]]) -> str | None:
    """Say in a sentence which methods were still learning at their end, and what to do; or None.

    Args:
        groups: a label, the result and the runs of each method, or of each setting of one.
    """
    said, most = [], 0
    for label, result, runs in groups:
        found = [one for run in runs if (one := still_falling(result, run)) is not None]
        if not found:
            continue
        share = np.mean([one["share"] for one in found])
        some = f" in {len(found)} of {len(runs)} runs" if len(runs) > 1 else ""
        loss, last = (found[0][key] for key in ("loss", "rounds"))
        said.append(f"{label} ({loss} loss −{share:.0%} over the last {last} rounds{some})")
        most = max(most, result.ledger.num_rounds)
    if not said:
        return None
    return f"{', '.join(said)}; train longer with rounds={2 * most} (--rounds {2 * most})"


def rounds_words(config: dict[str, Any]) -> str | None:
    """Say how a result came by its rounds, if nobody gave a number; see ``fit``."""
    if not config.get("open_ended"):
        return None
    held = ((config.get("data") or {}).get("info") or {}).get("held_out_for_stopping")
    judged = "loss stops falling"
    if config.get("measure") is not None:
        metric = headline_metric_of(config)
        judged = f"{metric.name} stops {'rising' if metric.sign > 0 else 'falling'}"
    words = f"until the validation {judged}, at most {config.get('rounds')}"
    if held:
        words += f"; {held:.0%} of every client's training samples were held out to judge by"
    return words
