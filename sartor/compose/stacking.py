"""A stack: every client answers with a weighted mean of several methods' predictions.

``stacked`` runs records in parallel, each at its own rate and for its own number of rounds, and
mixes what their models say with weights of each client. Rates, rounds and weights are
hyper-parameters, so that a sweep and clients of their own need nothing new.

| symbol | here | meaning |
|---|---|---|
| β_k | SLOT_sharpness | what the scores of part k are multiplied by, but in a regression |
| w_ik | SLOT_weight | the weight of part k at client i, divided by their sum |
| η_k | SLOT_lr | ``local_lr`` of the part; with what decay leaves of it, it is fine-tuned |
| T_k | SLOT_rounds | rounds after which the part rests: no work, no messages, no change |

Mixed are probabilities, log Σ_k w_ik softmax(β_k s_k), label by label in a multi-label task; in a
regression the predictions themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.compose.fields import viewed
from sartor.compose.parallel import in_parallel, kept_after_training
from sartor.core import tree
from sartor.core.hyper import Hyper
from sartor.core.local import LR
from sartor.core.method import ClientContext, Method, Phase, ServerContext, changed
from sartor.core.task import Task
from sartor.core.tree import Tree

FOREVER = 1e9
"""The default of T_k: the part never rests."""


def stacked(name: str, task: Task, **parts: Method) -> Method:
    """Train several methods in parallel and mix their predictions, with weights of each client.

    Args:
        name: the name of the whole.
        task: the network; its kind says what is mixed.
        parts: the methods, by slot.
    """
    whole = in_parallel(name, **{slot: _at_own_pace(slot, m) for slot, m in parts.items()})

    def model(work: Tree, ctx: ClientContext) -> Tree:
        weights = torch.stack([ctx.hyper[f"{slot}_weight"].reshape(()) for slot in parts])
        sharp = torch.stack([ctx.hyper[f"{slot}_sharpness"].reshape(()) for slot in parts])
        models = whole.use.model(work, ctx)
        return {"models": models, "weights": weights / weights.sum(), "sharpness": sharp}

    def predict(model: Tree, x: Tensor) -> Tensor:
        scores = [
            (m.use.predict or task.logits)(model["models"][slot], x) for slot, m in parts.items()
        ]
        said = torch.stack(scores)
        if task.kind != "regression":
            said = said * model["sharpness"].to(said.dtype).reshape(-1, *(1,) * (said.dim() - 1))
        return mixed(task.kind, said, model["weights"])

    note = "the weight of this part's predictions; weights are divided by their sum"
    weights = {f"{slot}_weight": Hyper(1.0, 0.0, note=note) for slot in parts}
    note = "what this part's scores are multiplied by: under 1 it is less sure"
    sharp = {f"{slot}_sharpness": Hyper(1.0, 0.0, note=note) for slot in parts}
    return changed(whole, hyper={**whole.hyper, **weights, **sharp}, model=model, predict=predict)


def mixed(kind: str, scores: Tensor, weights: Tensor) -> Tensor:
    """Return the scores of a mixture of predictions.

    Args:
        kind: the task; see ``Task.kind``.
        scores: (parts, batch, ...).
        weights: (parts,), of sum 1.
    """
    weights = weights.to(scores.dtype).reshape(-1, *(1,) * (scores.dim() - 1))
    if kind == "regression":
        return (weights * scores).sum(0)
    share = weights.log()  # −∞ for a part that has no say
    if kind == "multilabel":
        yes, no = (torch.logsumexp(share + F.logsigmoid(s), 0) for s in (scores, -scores))
        return yes - no
    return torch.logsumexp(share + scores.log_softmax(-1), 0)


def _at_own_pace(slot: str, method: Method) -> Method:
    """Let a part read its own rate, and rest after its own number of rounds."""
    method = kept_after_training(method) if method.use.headline == "post" else method
    rated = "local_lr" in method.hyper
    pace = f"{slot}_rounds"

    def own(ctx: Any) -> Any:
        if not rated:
            return ctx
        rate = ctx.hyper[f"{slot}_lr"]
        tuning = rate
        if "lr_decay" in ctx.hyper:  # fine-tuning is at the rate at which training has ended
            tuning = rate * ctx.hyper["lr_decay"] ** torch.minimum(
                ctx.round.to(rate.dtype), ctx.hyper[pace]
            )
        return ctx._replace(hyper={**ctx.hyper, "local_lr": rate, "ft_lr": tuning})

    def active(ctx: ClientContext | ServerContext) -> Tensor:
        return ctx.round < ctx.hyper[pace].reshape(-1)[0]

    def begins(phase: Phase) -> Phase:
        before = phase.when

        def when(work: Tree, ctx: ClientContext) -> Tensor:
            now = active(ctx)
            return now if before is None else now & before(work, ctx)

        return replace(phase, when=when)

    def rests(record: Method) -> Method:
        def finish(client: Tree, work: Tree, ctx: ClientContext) -> tuple[Tree, Tree]:
            kept, sent = record.finish(client, work, ctx)
            return tree.where(active(ctx), kept, client), sent

        def aggregate(server: Tree, uploads: Tree, ctx: ServerContext) -> Tree:
            return tree.where(active(ctx), record.aggregate(server, uploads, ctx), server)

        def connected(server: Tree, ctx: ServerContext) -> Any:
            on = active(ctx) & torch.ones_like(ctx.present)
            if record.wire.connected is None:
                return on
            return tree.map(lambda who: who & on, record.wire.connected(server, ctx))

        return changed(
            record,
            phases=tuple(map(begins, record.phases)),
            finish=finish,
            aggregate=aggregate,
            connected=connected,
        )

    seen = viewed(method, own, own)
    hyper = {k: v for k, v in method.hyper.items() if k not in ("local_lr", "ft_lr")}
    if rated:
        rate = method.hyper["local_lr"].default
        hyper[f"{slot}_lr"] = replace(LR, default=rate, note=f"the step of local training, {slot}")
    note = "rounds after which this part rests"
    hyper[pace] = Hyper(FOREVER, 0.0, note=note, server=True)
    return changed(rests(seen), hyper=hyper)
