"""The method record: one personalised-learning method as a value made of pure functions.

A method sees ONE client on the client side (no client axis, no loop, no device, no network) and one
run on the server side. `docs/method-record.md` has the order of a round; the files in
`sartor/methods/` are examples. Every function must be pure, work under ``torch.func.vmap``, and use
tensors only: no ``.item()``, no branch on data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sartor.core import tree
from sartor.core.errors import ContractError
from sartor.core.hyper import Hyper
from sartor.core.tree import Tree


class ClientContext(NamedTuple):
    """Everything that a client function may read.

    Attributes:
        hyper: hyper-parameters, 0-d each.
        common: the message that every client received.
        own: the message to this client alone.
        key: two words, folded with seed, stage, round, client, stream and step.
        round: the round, 0-d.
        rate_round: the round whose learning rate is taken, 0-d: `round`, and in work after the
            last round (extra rounds, adaptation, newcomers) that round.
        index: the number of this client, 0-d.
        num_samples: how many training samples it has, 0-d.
        mask: (capacity,), true for the real rows of its list of training samples.
        reports: whether its upload is used in this round, 0-d; false only where all clients train
            and some report.
    """

    hyper: dict[str, Tensor]
    common: Tree
    own: Tree
    key: Tensor
    round: Tensor
    rate_round: Tensor
    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which is never called
    num_samples: Tensor
    mask: Tensor
    reports: Tensor


class ServerContext(NamedTuple):
    """Everything that a server function may read.

    Attributes:
        hyper: hyper-parameters, 0-d each (or (clients,) where a run has one value per client).
        key: two words, folded with seed, stage and round.
        round: the round, 0-d.
        sizes: (clients,) numbers of training samples.
        cohort: (slots,) distinct ids.
        present: (slots,) false for a client that did not report, or that only pads the cohort.
    """

    hyper: dict[str, Tensor]
    key: Tensor
    round: Tensor
    sizes: Tensor
    cohort: Tensor
    present: Tensor


class Batch(NamedTuple):
    """Samples of one client.

    Attributes:
        x: (batch, ...) features; padding repeats some real sample.
        y: (batch,) labels.
        mask: (batch,) true for real samples.
        rows: (batch,) positions in the client's own list; the capacity (a spare row) for padding.
        last: 0-d, whether this batch ends a pass.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    rows: Tensor
    last: Tensor


def _same(work: Tree, ctx: ClientContext) -> Tree:
    return work


@dataclass(frozen=True)
class Phase:
    """A stretch of local work: data, a number of steps, and one pure step.

    Attributes:
        name: what it is called in timings and errors.
        step: ``(work, batch, ctx) -> work``; with ``draws`` > 1, batch is a tuple of independent
            batches.
        enter: ``(work, ctx) -> work`` before the first step, such as a new optimiser.
        leave: ``(work, ctx) -> work`` after the last step, such as dividing sums.
        data: "train", "val", "test" or "none".
        epochs: passes over the data.
        steps: when given, replaces epochs: a number, or ``(ctx) -> 0-d integer tensor``.
        batch: samples a batch; None is all at once.
        draws: independent batches a step.
        share: the share of the client's samples that is used, drawn anew in every round.
        part: from where to where in the client's samples, in a random order that stays the same for
            the whole run: (0, 0.5) and (0.5, 1) are two halves without a common sample.
        fresh: whether every step draws its batch from all samples, instead of passing through them.
        shuffle: whether the order is drawn anew for every pass.
        drop_last: whether the last incomplete batch of a pass is dropped.
        random: whether ``step`` draws from ``ctx.key``; without it the key is left empty, and
            using it is an error.
        when: ``(work, ctx) -> bool tensor``: whether this client takes the phase in this round at
            all; asked before ``enter``. A client that does not is entered and left without a step,
            which costs nothing.
        stop: ``(work, ctx) -> bool tensor``: this client is done.
        stream: names the random stream; the phase's name if empty.
    """

    name: str
    step: Callable[[Tree, Any, ClientContext], Tree]
    enter: Callable[[Tree, ClientContext], Tree] = _same
    leave: Callable[[Tree, ClientContext], Tree] = _same
    data: str = "train"
    epochs: int = 1
    steps: int | Callable[[ClientContext], Tensor] | None = None
    batch: int | None = 32
    draws: int = 1
    share: float = 1.0
    part: tuple[float, float] = (0.0, 1.0)
    fresh: bool = False
    shuffle: bool = True
    drop_last: bool = False
    random: bool = False
    when: Callable[[Tree, ClientContext], Tensor] | None = None
    stop: Callable[[Tree, ClientContext], Tensor] | None = None
    stream: str = ""


def no_message(server: Tree, *index_and_ctx: Any) -> Tree:
    """Send nothing: what a record without ``broadcast`` or ``address`` has in their place."""
    return {}


def _no_client_state(params: Tree, ctx: ClientContext) -> Tree:
    return {}


def _params(work: Tree, ctx: ClientContext) -> Tree:
    return work["params"]


def _nothing_private(leaf: str) -> bool:
    return False


@dataclass(frozen=True)
class Use:
    """How a trained method is used: the model of a client, and what the evaluator scores.

    Attributes:
        model: ``(work, ctx) -> model``: what the evaluator scores.
        predict: ``(model, x) -> scores``; the task's logits if None.
        adapt: phases on a copy, before scoring (fine-tuning at evaluation).
        centre: ``(server, ctx) -> parameters`` of the global model, where there is one; scored as
            the point "global".
        headline: the evaluation point of the headline metric: "pre" (after aggregation and
            download) or "post" (after local training).
    """

    model: Callable[[Tree, ClientContext], Tree] = _params
    predict: Callable[[Tree, Tensor], Tensor] | None = None
    adapt: tuple[Phase, ...] = ()
    centre: Callable[[Tree, ServerContext], Tree] | None = None
    headline: str = "pre"


@dataclass(frozen=True)
class Schedule:
    """Which clients train in a round, and the extra rounds before and after training.

    Attributes:
        who: "cohort" (the cohort trains and reports), "everyone" (all clients train and report,
            whatever the participation rule) or "everyone_trains" (all train, the cohort reports).
        in_turn: whether the clients of a round are served one after the other, so that later ones
            see the uploads of earlier ones.
        first: another record for the first rounds, on the same state trees.
        before: a record for one round of all clients before round 0, on the same state trees.
        after: the same after the last round. Evaluations before that run it on copies, so that
            they score what would be used if training stopped there. It may have an ``after`` of
            its own, which follows it.
        stage: for an ``after``: "evaluate" if it draws what the next evaluation draws, so that it
            sees the very models that will be used.
    """

    who: Literal["cohort", "everyone", "everyone_trains"] = "cohort"
    in_turn: bool = False
    first: FirstRounds | None = None
    before: Method | None = None
    after: Method | None = None
    stage: str = ""


@dataclass(frozen=True)
class Wire:
    """What may travel, and in which form.

    Attributes:
        private: a predicate on the names of model leaves that must never be uploaded.
        sparse: from a leaf of a message to the leaf of the same message that marks which of its
            rows travel, such as ``{"upload/means": "upload/held"}``; the receiver reads zeros in
            the others, and only the rows that travel are counted. See `sartor/core/wire.py`.
        averaged: the branches of an upload that enter the server through a (weighted) mean alone,
            so that another mean may take its place; see `sartor/compose/robust.py`.
        connected: ``(server, ctx) -> (slots,)`` true for the clients that exchange messages in
            this round; the messages and uploads of the others are not sent, and must not matter:
            ``aggregate`` sees these clients as not present. Or (2, slots): the clients that
            receive, and those that upload. Or one of these per slot of the trees, for methods made
            of methods.
    """

    private: Callable[[str], bool] = _nothing_private
    sparse: Mapping[str, str] = field(default_factory=dict)
    averaged: tuple[str, ...] = ()
    connected: Callable[[Tree, ServerContext], Any] | None = None


@dataclass(frozen=True)
class Newcomer:
    """How a client joins after training.

    Attributes:
        message: ``(server, ctx) -> own``: the own message to a client that the server does not
            know; needed where there is ``address``.
        state: ``(params, ctx, server, server_ctx) -> client``: its kept state; if None,
            ``init_client`` from the global model where there is one, else from the common start.
    """

    message: Callable[[Tree, ServerContext], Tree] | None = None
    state: Callable[[Tree, ClientContext, Tree, ServerContext], Tree] | None = None


@dataclass(frozen=True)
class Show:
    """What a method shows of itself at evaluations.

    Attributes:
        server: ``(server, ctx) -> small tensors`` worth recording, such as a mixing matrix.
        client: ``(client, ctx) -> small tensors``, the same of every client's kept state; recorded
            beside the scores and never sent.
        names: what the numbers in the shown table ``choice`` stand for, where each client ends
            with one of several models.
    """

    server: Callable[[Tree, ServerContext], Tree] | None = None
    client: Callable[[Tree, ClientContext], Tree] | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """One method: a frozen record of pure functions on trees, and five small values.

    Attributes:
        name: the name in tables and on the command line.
        hyper: sweepable hyper-parameters with defaults and ranges.
        init_server: ``(params, ctx) -> server``.
        begin: ``(client, ctx) -> work``: the transient tree of this round, from kept state and
            messages.
        finish: ``(client, work, ctx) -> (client, upload)``: the kept state and the upload, apart.
        aggregate: ``(server, uploads, ctx) -> server``; uploads have the slots of the cohort on
            axis 0.
        phases: local work, in order.
        init_client: ``(params, ctx) -> client``: kept between rounds, never sent.
        broadcast: ``(server, ctx) -> common``: the same message for all.
        address: ``(server, i, ctx) -> own``: the message to client i (0-d integer tensor).
        use: how the models are used and scored.
        schedule: which clients train when.
        wire: what may travel.
        newcomer: how a client joins after training.
        show: what is recorded at evaluations.
    """

    name: str
    hyper: dict[str, Hyper]
    init_server: Callable[[Tree, ServerContext], Tree]
    begin: Callable[[Tree, ClientContext], Tree]
    finish: Callable[[Tree, Tree, ClientContext], tuple[Tree, Tree]]
    aggregate: Callable[[Tree, Tree, ServerContext], Tree]
    phases: tuple[Phase, ...] = ()
    init_client: Callable[[Tree, ClientContext], Tree] = _no_client_state
    broadcast: Callable[[Tree, ServerContext], Tree] = no_message
    address: Callable[[Tree, Tensor, ServerContext], Tree] = no_message
    use: Use = Use()
    schedule: Schedule = Schedule()
    wire: Wire = Wire()
    newcomer: Newcomer = Newcomer()
    show: Show = Show()


@dataclass(frozen=True)
class FirstRounds:
    """The first rounds of a method, when they are those of another one.

    Attributes:
        rounds: how many; they count as rounds of the run, and are drawn and counted as such.
        method: the record that is trained, and scored, until then; its trees are the method's.
        handover: one round of all clients after the last of them, without phases, which gives the
            clients what they continue with; its bytes are counted in that round.
    """

    rounds: int
    method: Method
    handover: Method


SMALL: dict[str, str] = {
    inner.name: outer.name
    for outer in fields(Method)
    if is_dataclass(outer.default)
    for inner in fields(outer.default)
}
"""For a field of a small value, the field of the record that holds it: "centre" is in "use"."""


def changed(method: Method, **changes: Any) -> Method:
    """Return the record with some fields changed; those of its small values go by their own name.

    ``changed(method, begin=begin, centre=None)`` changes ``begin`` and ``use.centre``.
    """
    inner: dict[str, dict[str, Any]] = {}
    for name in [name for name in changes if name in SMALL]:
        inner.setdefault(SMALL[name], {})[name] = changes.pop(name)
    values = {name: replace(getattr(method, name), **new) for name, new in inner.items()}
    return replace(method, **changes, **values)


def has_own_messages(method: Method) -> bool:
    """Say whether the method sends each client a message of its own."""
    return method.address is not no_message


def endings(method: Method) -> list[Method]:
    """List the rounds of all clients that follow the last one: ``after``, its ``after``, ..."""
    found = []
    last = method.schedule.after
    while last is not None:
        found.append(last)
        last = last.schedule.after
    return found


def records(method: Method) -> dict[str, Method]:
    """Name every record that a run of the method goes through.

    Server and client of one federation hold the same method, so a name is enough to agree on what
    a round is.
    """
    found = {"main": method}
    if method.schedule.before is not None:
        found["prologue"] = method.schedule.before
    if (first := method.schedule.first) is not None:
        found["warmup"], found["handover"] = first.method, first.handover
    return found | {f"epilogue-{k}": ending for k, ending in enumerate(endings(method))}


def newcomer_state(
    method: Method, params: Tree, ctx: ClientContext, server: Tree, server_ctx: ServerContext
) -> Tree:
    """Make the kept state of a client that joins after training.

    Args:
        method: the method.
        params: the common initial model.
        ctx: what the newcomer may read.
        server: the state of the trained server.
        server_ctx: what the server may read.
    """
    if method.newcomer.state is not None:
        return method.newcomer.state(params, ctx, server, server_ctx)
    centre = method.use.centre
    start = params if centre is None else centre(server, server_ctx)
    return method.init_client(tree.map(torch.clone, start), ctx)


def check_private(method: Method, upload: Tree) -> None:
    """Refuse an upload that holds a leaf which the method calls private.

    Raises:
        ContractError: naming the leaf.
    """
    for name, _ in tree.items(upload):
        if any(method.wire.private(part) for part in name.split("/")):
            raise ContractError(
                f"Method {method.name!r} uploads the private leaf {name!r}; return it as client "
                "state from `finish` and keep it out of the upload."
            )


def client_weights(ctx: ServerContext, by: str = "samples") -> Tensor:
    """Return p_i of all clients, (clients,), with sum 1.

    Args:
        ctx: what the server may read.
        by: "samples" for n_i/N, "uniform" for 1/m.
    """
    sizes: Tensor = ctx.sizes.to(next(iter(ctx.hyper.values())).dtype)
    return sizes / sizes.sum() if by == "samples" else torch.ones_like(sizes) / sizes.shape[0]


def weighted_mean(uploads: Tree, weights: Tensor, fallback: Tree) -> Tree:
    """Average the slots of a cohort: Σ w_i u_i / Σ w_i.

    Args:
        uploads: leaves (slots, ...).
        weights: (slots,), zero for the absent.
        fallback: what to return if all weights are zero, as when no client reported.
    """
    total = weights.sum()
    none = total == 0
    share = weights / torch.where(none, torch.ones_like(total), total)
    mean = weighted_sum(uploads, share)
    return tree.map(lambda m, old: torch.where(none, old, m), mean, fallback)


def weighted_sum(uploads: Tree, weights: Tensor) -> Tree:
    """Return Σ_i weights[i] · uploads[i]; uploads of weight zero are left out even if NaN."""

    def one(leaf: Tensor) -> Tensor:
        w = weights.to(leaf.dtype).reshape((-1,) + (1,) * (leaf.dim() - 1))
        return torch.where(w != 0, w * leaf, torch.zeros_like(leaf)).sum(0)

    return tree.map(one, uploads)
