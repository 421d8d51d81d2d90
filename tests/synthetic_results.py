"""Results without training: realistic curves for tests of results, folders and reports."""

from __future__ import annotations

from typing import Any

import numpy as np

from sartor.results.comparison import Comparison
from sartor.results.result import Result
from sartor.results.scores import Ledger, Run, Scores

SKILL = {
    "local": (0.90, 0.90),
    "fedavg": (0.78, 0.91),
    "fedprox": (0.92, 0.93),
    "fedapa": (0.94, 0.95),
}
HEADLINE = {"local": "post", "fedavg": "pre", "fedprox": "post", "fedapa": "post"}


def make_result(
    method: str = "fedapa",
    *,
    clients: int = 20,
    rounds: int = 20,
    seeds: tuple[int, ...] = (0,),
    classes: int = 10,
    names: tuple[str, ...] | None = None,
    count: np.ndarray | None = None,
    val: bool = False,
    diverged: dict[str, Any] | None = None,
    hyper: list[dict[str, Any]] | None = None,
    mix: bool | None = None,
) -> Result:
    """Return a result whose curves rise to the skill of the method, with noise per client."""
    hyper = hyper or [{"local_lr": 0.05}]
    runs = [
        Run(seed=seed, hyper=dict(h), options={"preset": "paper"}) for h in hyper for seed in seeds
    ]
    number = len(runs)
    sizes = np.empty((number, clients), dtype=np.int64)
    labels = np.empty((number, clients, classes), dtype=np.int64)
    for r, run in enumerate(runs):
        shared = np.random.default_rng(run.seed)  # the allocation is the seed's, not the method's
        sizes[r] = shared.integers(12, 60, clients) if count is None else count
        share = shared.dirichlet(np.full(classes, 0.1), clients)
        labels[r] = np.round(share * 3 * sizes[r][:, None]).astype(np.int64)
    scores = {}
    for p, (point, entries) in enumerate({"pre": rounds + 1, "post": rounds}.items()):
        for split in ("test", "val") if val else ("test",):
            correct = np.empty((number, entries, clients))
            loss = np.empty_like(correct)
            for r, run in enumerate(runs):
                shared = np.random.default_rng(run.seed + 100)
                ease = shared.normal(0, 0.04, clients)
                own = np.random.default_rng([run.seed, sum(map(ord, method)), p, split == "val"])
                level = SKILL.get(method, (0.9, 0.9))[p] + ease + own.normal(0, 0.02, clients)
                rise = 1 - 0.85 * np.exp(-np.arange(entries)[:, None] / (rounds / 6))
                accuracy = np.clip(level * rise + own.normal(0, 0.01, (entries, clients)), 0, 1)
                correct[r] = np.round(accuracy * sizes[r])
                loss[r] = (1.05 - accuracy) * sizes[r]
            scores[point, split] = Scores(list(range(entries)), correct, loss, sizes)
    travels = 0 if method == "local" else clients * 61_156 * 4
    grid = (number, rounds)
    ledger = Ledger(
        participants=np.full(grid, clients),
        bytes_down=np.full(grid, travels, dtype=np.int64),
        bytes_up=np.full(grid, travels, dtype=np.int64),
        gradient_evaluations=np.repeat(labels.sum((1, 2))[:, None], rounds, 1),
        forward_evaluations=np.zeros(grid, dtype=np.int64),
        seconds={
            "round": [0.11] * rounds,
            "train": [0.08] * rounds,
            "server": [0.01] * rounds,
            "evaluate": [0.02] * rounds,
        },
        setup_bytes=np.full(number, travels // 2, dtype=np.int64),
        setup_gradients=np.full(number, 70, dtype=np.int64),
        setup_forward=np.zeros(number, dtype=np.int64),
    )
    snapshots = []
    if mix if mix is not None else method == "fedapa":
        rng = np.random.default_rng(5)
        matrix = np.eye(clients) * 0.5 + rng.dirichlet(np.full(clients, 0.3), clients) * 0.5
        snapshots = [{"round": t, "mix": np.stack([matrix] * number)} for t in (0, rounds)]
    return Result(
        method=method,
        headline=HEADLINE.get(method, "pre"),
        runs=runs,
        clients=names or tuple(f"client-{i:02d}" for i in range(clients)),
        scores=scores,
        ledger=ledger,
        label_counts=labels,
        diverged=[diverged, *[None] * (number - 1)],
        snapshots=snapshots,
        config={
            "method": method,
            "rounds": rounds,
            "data": {"name": "digits"},
            "seeds": list(seeds),
        },
    )


def make_comparison(**settings: Any) -> Comparison:
    """Return local, fedavg, fedprox and fedapa on the same allocations."""
    return Comparison(
        {name: make_result(name, **settings) for name in SKILL}, config={"rounds": 20}
    )
