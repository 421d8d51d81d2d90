"""Several results as one: the parts of a sweep over static options, which train one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from sartor.results.result import Result
from sartor.results.scores import COUNTERS, ONCE, Ledger, Scores


def join(results: list[Result]) -> Result:
    """Join the parts of a sweep over static options: the runs of all, one after the other."""
    first = results[0]
    scores = {
        key: _join_scores([r.scores[key] for r in results])
        for key in first.scores
        if all(key in r.scores for r in results)
    }
    rounds = max(r.ledger.num_rounds for r in results)  # one that stopped early has fewer

    def padded(part: np.ndarray) -> np.ndarray:
        return np.pad(part, [(0, 0), (0, rounds - np.shape(part)[1])])

    columns = {c: np.concatenate([padded(getattr(r.ledger, c)) for r in results]) for c in COUNTERS}
    seconds = {}
    for name in first.ledger.seconds:
        parts = (r.ledger.seconds[name] for r in results)
        seconds[name] = list(map(sum, itertools.zip_longest(*parts, fillvalue=0.0)))
    once = {c: np.concatenate([getattr(r.ledger, c) for r in results]) for c in ONCE}
    owner = [(r, k) for r in results for k in range(len(r.runs))]
    counts = [r.label_counts for r in results if r.label_counts is not None]
    return Result(
        method=first.method,
        headline=first.headline,
        runs=[run for r in results for run in r.runs],
        clients=first.clients,
        scores=scores,
        ledger=Ledger(**columns, seconds=seconds, **once),
        label_counts=np.concatenate(counts) if len(counts) == len(results) else None,
        diverged=[d for r in results for d in r.diverged],
        stopped=[s for r in results for s in r.stopped],
        snapshots=_last_choices(results),
        choices=next((r.choices for r in results if r.choices), ()),
        config=first.config,
        models=lambda client, run, point: owner[run][0].model(
            client, run=owner[run][1], point=point
        ),
        baseline=lambda: first.baseline(),
        newcomers=lambda data, run=0, **settings: owner[run][0].onboard(
            data, run=owner[run][1], **settings
        ),
        server=lambda run: owner[run][0].server_state(owner[run][1]),
        writer=first.writer,
    )


def _join_scores(parts: list[Scores]) -> Scores:
    """Join scores; a part that ended early repeats its last entry at the later evaluations."""
    rounds = sorted({t for part in parts for t in part.rounds})
    index = [np.searchsorted(part.rounds, rounds, side="right") - 1 for part in parts]
    pairs = list(zip(parts, index, strict=True))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name)[:, at] for part, at in pairs])

    return Scores(
        rounds=rounds,
        correct=joined("correct"),
        loss=joined("loss"),
        count=np.concatenate([part.count for part in parts]),
        measured=None if parts[0].measured is None else joined("measured"),
    )


def _last_choices(results: list[Result]) -> list[dict[str, Any]]:
    """Join what the clients of each part ended with; −1 where a part leaves them no choice."""
    if len({r.choices for r in results if r.choices}) != 1:
        return []
    rows = [
        np.asarray(r.snapshots[-1]["choice"])
        if r.choices
        else np.full((len(r.runs), len(r.clients)), -1.0, dtype=np.float32)
        for r in results
    ]
    return [{"round": results[0].ledger.num_rounds, "choice": np.concatenate(rows)}]
