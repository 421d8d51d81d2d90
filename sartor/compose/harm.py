"""Do no harm: every client ends with the best of training alone, the global and its own model.

Three methods train in parallel, each exactly as it would by itself: LocalTrain ("alone"), FedAvg
("global": its model before local training) and the method in question ("personalised"). After the
last round every client scores the three models on samples that none of them trained on, and keeps
the one it trained alone unless another is better beyond its noise.

| symbol | here | meaning |
|---|---|---|
| ℓ_k(z) | losses | the loss of model k on the held-out sample z |
| d_k(z) | paired_sums | ℓ_alone(z) − ℓ_k(z), what model k gains on z |
| d̄_k, s_k | beyond_noise | their mean and standard deviation over the n held-out samples |
| c | harm_margin | model k passes if d̄_k > c · s_k/√n; of those, the lowest loss wins |

c = 0 takes the lowest held-out loss; a huge c leaves every client alone. With n < 2 a client stays
alone. Pairing matters: hard samples are hard for all three models, and that cancels in d_k.

The samples that decide are the federation's validation data, or a share of 0.2 of every client's
training data. In the latter case none of the three trains on them, and a fourth model does: the
client's own on all of its samples. It is not scored, and used by clients that stay alone: they
end exactly where LocalTrain would have left them. The model that it stands for saw fewer samples,
so the comparison leans a little towards the others; a larger c leans back.

Losses and answers can disagree: a global model that is still young is often right more often than
the client's own, and less sure of it. ``score="error"`` compares wrong answers in place of losses,
"auroc" and "brier" what they say. With ``measure="auroc"`` and the like, ``fit`` sets it.

What it costs: the gradients and bytes of FedAvg and the gradients of LocalTrain on top of the
method's own (FedAvg is trained anew even beside a method that contains it), and of LocalTrain on
all samples where some are held out; one more message to every client after the last round; one
forward pass of each of the three models over the held-out samples; and for the global and the
personalised model those samples themselves, where they come from the training data. The choice is
the client's own: no message says it.

A newcomer gets all three models by their own rules and decides in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from sartor.compose.choice import best_of
from sartor.compose.judging import Score
from sartor.compose.parallel import kept_after_training, on_share
from sartor.core import tree
from sartor.core.errors import ConfigError
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import Method, ServerContext, changed, weighted_sum
from sartor.core.method import client_weights as shares
from sartor.core.task import Task
from sartor.core.tree import Tree

HeldOut = Literal["holdout", "validation"]
Factory = Callable[[Task, Local], Method]
MARGIN = "harm_margin"


def do_no_harm(
    method: Method,
    task: Task,
    local: Local,
    *,
    alone: Factory,
    common: Factory,
    on: HeldOut = "holdout",
    share: float = 0.2,
    score: Score = "loss",
) -> Method:
    """Let every client end with the best of alone, global and personalised.

    Args:
        method: the method in question. LocalTrain or FedAvg is its own part and leaves two.
        task: the network and its loss.
        local: local training of the other parts.
        alone: LocalTrain.
        common: FedAvg.
        on: which samples decide: a part of the training data, or the federation's validation data.
        share: the part of the training data that decides, for ``on="holdout"``.
        score: what is compared on them; see ``sartor.compose.judging``.
    """
    if not 0.0 < share < 1.0:
        raise ConfigError(
            f"harm_share must be between 0 and 1, got {share}; 0.2 holds out a fifth of every "
            "client's training samples."
        )
    known = method.name if not method.use.adapt else ""
    parts = {
        "alone": method if known == "local" else alone(task, local),
        "global": method if known == "fedavg" else _plain(common(task, local), local),
    }
    if known not in ("local", "fedavg"):
        parts["personalised"] = method
    if method.schedule.in_turn:
        parts["global"] = _in_turn(parts["global"])
    trained = {
        k: kept_after_training(m) if m.use.headline == "post" else m for k, m in parts.items()
    }
    end = 1.0 - share
    judged: dict[str, Any] = {
        k: on_share(m, end) if on == "holdout" else m for k, m in trained.items()
    }
    whole = best_of(
        method.name,
        task,
        scope="client",
        select_on=on,
        score=score,
        held_out=(end, 1.0),
        margin=MARGIN,
        announce=False,
        instead={"alone": parts["alone"]} if on == "holdout" else {},
        **judged,
    )

    def inspect(server: Tree, server_ctx: ServerContext) -> Tree:
        """Show what the method shows; what would be mistaken for the choice gets another name."""
        if method.show.server is None or "personalised" not in parts:
            return {}
        seen = method.show.server(server["personalised"], server_ctx)
        return {f"inner_{k}" if k == "choice" else k: v for k, v in seen.items()}

    note = "how many standard errors better than alone a model must be; 0 takes the lowest loss"
    centre = trained["global"].use.centre
    return changed(
        whole,
        hyper={**whole.hyper, MARGIN: Hyper(1.0, 0.0, note=note)},
        server=inspect,
        centre=centre and (lambda server, server_ctx: centre(server["global"], server_ctx)),
    )


def _plain(base: Method, local: Local) -> Method:
    """Let FedAvg take no notice of the method's over-relaxation."""

    def aggregate(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        one = torch.ones_like(next(iter(server_ctx.hyper.values())).reshape(-1)[0])
        return base.aggregate(
            server, uploads, server_ctx._replace(hyper={**server_ctx.hyper, "relax": one})
        )

    return changed(base, hyper=local.hyper, aggregate=aggregate)


def _in_turn(common: Method) -> Method:
    """Let FedAvg be served client by client: it averages what it got when the next round begins."""

    def init_server(params: Tree, server_ctx: ServerContext) -> Tree:
        none = tree.leaves(params)[0].reshape(-1)[0] * 0.0
        start = {"sum": tree.zeros_like(params), "weight": none, "last": server_ctx.round - 1}
        return {**common.init_server(params, server_ctx), **start}

    def average(server: Tree, server_ctx: ServerContext) -> Tree:
        due = (server_ctx.round > server["last"]) & (server["weight"] > 0)
        weight = torch.where(server["weight"] > 0, server["weight"], 1.0)
        mean = tree.map(lambda leaf: leaf / weight, server["sum"])
        return tree.map(lambda new, old: torch.where(due, new, old), mean, server["params"])

    def aggregate(server: Tree, uploads: Tree, server_ctx: ServerContext) -> Tree:
        fresh = server_ctx.round > server["last"]
        p: Tensor = shares(server_ctx)[server_ctx.cohort] * server_ctx.present
        more = weighted_sum(uploads["params"], p)
        return {
            "params": average(server, server_ctx),
            "sum": tree.map(lambda s, m: torch.where(fresh, m, s + m), server["sum"], more),
            "weight": torch.where(fresh, p.sum(), server["weight"] + p.sum()),
            "last": server_ctx.round,
        }

    return changed(
        common,
        init_server=init_server,
        broadcast=lambda server, server_ctx: {"params": average(server, server_ctx)},
        aggregate=aggregate,
        centre=average,
    )
