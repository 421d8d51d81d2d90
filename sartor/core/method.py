"""The method record: one personalised-learning method as a value made of pure functions.

A method sees ONE client on the client side (no client axis, no loop, no device, no network) and one
run on the server side. `docs/method-record.md` tells the order of a round and why the record is as
it is; the files in `sartor/methods/` are examples. Every function must be pure, work under
``torch.func.vmap``, and use tensors only: no ``.item()``, no branch on data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from sartor.core import tree
from sartor.core.errors import ContractError
from sartor.core.hyper import Hyper
from sartor.core.tree import Tree


class Site(NamedTuple):
    """Everything that is read-only on a client.

    Attributes:
        hyper: hyper-parameters, 0-d each.
        common: the letter that every client received.
        own: the letter to this client alone.
        key: two words, folded with seed, stage, round, client, stream and step.
        round: the round, 0-d.
        index: who this client is, 0-d.
        num_samples: how many training samples it has, 0-d.
        mask: (capacity,), true for the real rows of its list of training samples.
        reports: whether its upload is used in this round, 0-d; false only where all clients train
            and some report.
    """

    hyper: Any
    common: Any
    own: Any
    key: Any
    round: Any
    index: Any
    num_samples: Any
    mask: Any
    reports: Any


class Hub(NamedTuple):
    """Everything that is read-only on the server.

    Attributes:
        hyper: hyper-parameters, 0-d each (or (clients,) where a run has one value per client).
        key: two words, folded with seed, stage and round.
        round: the round, 0-d.
        sizes: (clients,) numbers of training samples.
        cohort: (slots,) distinct ids.
        present: (slots,) false for a client that did not report, or that only pads the cohort.
    """

    hyper: Any
    key: Any
    round: Any
    sizes: Any
    cohort: Any
    present: Any


class Batch(NamedTuple):
    """Samples of one client.

    Attributes:
        x: (batch, ...) features; padding repeats some real sample.
        y: (batch,) labels.
        mask: (batch,) true for real samples.
        rows: (batch,) positions in the client's own list; the capacity (a spare row) for padding.
        last: 0-d, whether this batch ends a pass.
    """

    x: Any
    y: Any
    mask: Any
    rows: Any
    last: Any


def _same(work: Tree, site: Site) -> Tree:
    return work


@dataclass(frozen=True)
class Phase:
    """A stretch of local work: data, a number of steps, and one pure step.

    Attributes:
        name: what it is called in timings and errors.
        step: ``(work, batch, site) -> work``; with ``draws`` > 1, batch is a tuple of independent
            batches.
        enter: ``(work, site) -> work`` before the first step, such as a new optimiser.
        leave: ``(work, site) -> work`` after the last step, such as dividing sums.
        data: "train", "val", "test" or "none".
        epochs: passes over the data.
        steps: when given, replaces epochs: a number, or ``(site) -> 0-d integer tensor``.
        batch: samples a batch; None is all at once.
        draws: independent batches a step.
        share: the share of the client's samples that is used, drawn anew in every round.
        part: from where to where in the client's samples, in a random order that stays the same for
            the whole run: (0, 0.5) and (0.5, 1) are two halves without a common sample.
        fresh: whether every step draws its batch from all samples, instead of passing through them.
        shuffle: whether the order is drawn anew for every pass.
        drop_last: whether the last incomplete batch of a pass is dropped.
        random: whether ``step`` draws from ``site.key``; without it the key is left empty, and
            using it is an error.
        when: ``(work, site) -> bool tensor``: whether this client takes the phase in this round at
            all; asked before ``enter``. Who does not is entered and left without a step, and costs
            nothing more.
        stop: ``(work, site) -> bool tensor``: this client is done.
        stream: names the random stream; the phase's name if empty.
    """

    name: str
    step: Callable[[Tree, Any, Site], Tree]
    enter: Callable[[Tree, Site], Tree] = _same
    leave: Callable[[Tree, Site], Tree] = _same
    data: str = "train"
    epochs: int = 1
    steps: int | Callable[[Site], Tensor] | None = None
    batch: int | None = 32
    draws: int = 1
    share: float = 1.0
    part: tuple[float, float] = (0.0, 1.0)
    fresh: bool = False
    shuffle: bool = True
    drop_last: bool = False
    random: bool = False
    when: Callable[[Tree, Site], Tensor] | None = None
    stop: Callable[[Tree, Site], Tensor] | None = None
    stream: str = ""


def _nothing_from_server(server: Tree, hub: Hub) -> Tree:
    return {}


def _nothing_for_one(server: Tree, index: Tensor, hub: Hub) -> Tree:
    return {}


def _no_client_state(params: Tree, site: Site) -> Tree:
    return {}


def _params(work: Tree, site: Site) -> Tree:
    return work["params"]


def _nothing_private(leaf: str) -> bool:
    return False


@dataclass(frozen=True)
class Method:
    """One method: a frozen record of pure functions on trees.

    Attributes:
        name: the name in tables and on the command line.
        hyper: sweepable hyper-parameters with defaults and ranges.
        init_server: ``(params, hub) -> server``.
        begin: ``(client, site) -> work``: the transient tree of this round, from kept state and
            letters.
        finish: ``(client, work, site) -> (client, upload)``: the kept state and the upload, apart.
        aggregate: ``(server, uploads, hub) -> server``; uploads have the slots of the cohort on
            axis 0.
        phases: local work, in order.
        init_client: ``(params, site) -> client``: kept between rounds, never sent.
        broadcast: ``(server, hub) -> common``: the same letter for all.
        address: ``(server, i, hub) -> own``: the letter to client i (0-d integer tensor).
        greet: ``(server, hub) -> own``: the letter to a client that the server does not know, which
            joins after training; needed where there is ``address``.
        model: ``(work, site) -> model``: what the evaluator scores.
        predict: ``(model, x) -> scores``; the task's logits if None.
        adapt: phases on a copy, before scoring (fine-tuning at evaluation).
        centre: ``(server, hub) -> parameters`` of the global model, where there is one; scored as
            the point "global".
        private: a predicate on the names of model leaves that must never be uploaded.
        headline: the evaluation point of the headline figure: "pre" (after aggregation and
            download) or "post" (after local training).
        everyone: whether all clients train and report in every round, whatever the participation
            rule (LocalTrain).
        train_all: whether all clients train in every round, while only the cohort reports (pFedMe).
        one_by_one: whether the clients of a round are served one after the other, so that later
            ones see the uploads of earlier ones.
        inspect: ``(server, hub) -> small tensors`` worth recording at evaluations, such as a mixing
            matrix.
        inspect_client: ``(client, site) -> small tensors``, the same of every client's kept state;
            recorded beside the scores and never sent.
        choices: what the numbers in the inspected table ``choice`` stand for, where each client
            ends with one of several models.
        join: ``(params, site, server, hub) -> client``: the kept state of a client that joins after
            training; if None, ``init_client`` from the global model where there is one, else from
            the common start.
        connected: ``(server, hub) -> (slots,)`` true for the clients that exchange messages in this
            round; the letters and uploads of the others are not sent, and must not matter: for
            ``aggregate`` they are not present. Or (2, slots): who is written to, and who uploads.
            Or one of these per slot of the trees, for methods made of methods.
        sparse: from a leaf of a message to the leaf of the same message that marks which of its
            rows travel, such as ``{"upload/means": "upload/held"}``; the receiver reads zeros in
            the others, and only those that travel are booked. See `sartor/core/wire.py`.
        averaged: the branches of an upload that enter the server through a (weighted) mean alone,
            so that another mean may take its place; see `sartor/compose/robust.py`.
        prologue: one round of everybody before round 0, on the same state trees.
        epilogue: the same after the last round. Evaluations before that run it on copies, so that
            they score what would be used if training stopped there. It may have an ``epilogue`` of
            its own, which follows it.
        stage: for an epilogue: "evaluate" if it draws what the next evaluation draws, so that it
            sees the very models that will be used.
        warmup: another record for the first rounds, on the same state trees.
    """

    name: str
    hyper: dict[str, Hyper]
    init_server: Callable[[Tree, Hub], Tree]
    begin: Callable[[Tree, Site], Tree]
    finish: Callable[[Tree, Tree, Site], tuple[Tree, Tree]]
    aggregate: Callable[[Tree, Tree, Hub], Tree]
    phases: tuple[Phase, ...] = ()
    init_client: Callable[[Tree, Site], Tree] = _no_client_state
    broadcast: Callable[[Tree, Hub], Tree] = _nothing_from_server
    address: Callable[[Tree, Tensor, Hub], Tree] = _nothing_for_one
    greet: Callable[[Tree, Hub], Tree] | None = None
    model: Callable[[Tree, Site], Tree] = _params
    predict: Callable[[Tree, Tensor], Tensor] | None = None
    adapt: tuple[Phase, ...] = ()
    centre: Callable[[Tree, Hub], Tree] | None = None
    private: Callable[[str], bool] = _nothing_private
    headline: str = "pre"
    everyone: bool = False
    train_all: bool = False
    one_by_one: bool = False
    connected: Callable[[Tree, Hub], Any] | None = None
    sparse: Mapping[str, str] = field(default_factory=dict)
    averaged: tuple[str, ...] = ()
    inspect: Callable[[Tree, Hub], Tree] | None = None
    inspect_client: Callable[[Tree, Site], Tree] | None = None
    choices: tuple[str, ...] = ()
    join: Callable[[Tree, Site, Tree, Hub], Tree] | None = None
    prologue: Method | None = field(default=None)
    epilogue: Method | None = field(default=None)
    stage: str = ""
    warmup: Warmup | None = field(default=None)


@dataclass(frozen=True)
class Warmup:
    """The first rounds of a method, when they are those of another one.

    Attributes:
        rounds: how many; they count as rounds of the run, and are drawn and booked as such.
        method: the record that is trained, and scored, until then; its trees are the method's.
        handover: one round of everybody after the last of them, without phases, which gives the
            clients what they go on with; its bytes are booked in that round.
    """

    rounds: int
    method: Method
    handover: Method


def has_own_letters(method: Method) -> bool:
    """Say whether the method writes a letter to each client."""
    return method.address is not _nothing_for_one


def endings(method: Method) -> list[Method]:
    """List the rounds of everybody that follow the last one: the epilogue, its epilogue, ..."""
    found = []
    last = method.epilogue
    while last is not None:
        found.append(last)
        last = last.epilogue
    return found


def records(method: Method) -> dict[str, Method]:
    """Name every record that a run of the method goes through.

    Server and client of one federation hold the same method, so a name is enough to agree on what
    a round is.
    """
    found = {"main": method}
    if method.prologue is not None:
        found["prologue"] = method.prologue
    if method.warmup is not None:
        found["warmup"], found["handover"] = method.warmup.method, method.warmup.handover
    return found | {f"epilogue-{k}": ending for k, ending in enumerate(endings(method))}


def newcomer(method: Method, params: Tree, site: Site, server: Tree, hub: Hub) -> Tree:
    """Make the kept state of a client that joins after training.

    Args:
        method: the method.
        params: the common initial model.
        site: the newcomer.
        server: the state of the trained server.
        hub: what the server may read.
    """
    if method.join is not None:
        return method.join(params, site, server, hub)
    start = params if method.centre is None else method.centre(server, hub)
    return method.init_client(tree.map(torch.clone, start), site)


def check_private(method: Method, upload: Tree) -> None:
    """Refuse an upload that holds a leaf which the method calls private.

    Raises:
        ContractError: naming the leaf.
    """
    for name, _ in tree.items(upload):
        if any(method.private(part) for part in name.split("/")):
            raise ContractError(
                f"Method {method.name!r} uploads the private leaf {name!r}; return it as client "
                "state from `finish` and keep it out of the upload."
            )


def client_weights(hub: Hub, by: str = "samples") -> Tensor:
    """Return p_i of all clients, (clients,), with sum 1.

    Args:
        hub: what the server may read.
        by: "samples" for n_i/N, "uniform" for 1/m.
    """
    sizes: Tensor = hub.sizes.to(next(iter(hub.hyper.values())).dtype)
    return sizes / sizes.sum() if by == "samples" else torch.ones_like(sizes) / sizes.shape[0]


def weighted_mean(uploads: Tree, weights: Tensor, fallback: Tree) -> Tree:
    """Average the slots of a cohort: Σ w_i u_i / Σ w_i.

    Args:
        uploads: leaves (slots, ...).
        weights: (slots,), zero for the absent.
        fallback: what to return if all weights are zero, as when nobody reported.
    """
    total = weights.sum()
    none = total == 0
    share = weights / torch.where(none, torch.ones_like(total), total)
    mean = weighted_sum(uploads, share)
    return tree.map(lambda m, old: torch.where(none, old, m), mean, fallback)


def weighted_sum(uploads: Tree, weights: Tensor) -> Tree:
    """Return Σ_i weights[i] · uploads[i]; uploads of weight zero are left out even if NaN."""
    found = iter(weighted_leaves(tree.leaves(uploads), weights))
    return tree.map(lambda leaf: next(found), uploads)


def weighted_leaves(uploads: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Sum as ``weighted_sum`` does, leaf by leaf; an engine may catch the call, as torch's own."""
    if has_torch_function((weights,)):
        return handle_torch_function(weighted_leaves, (weights,), uploads, weights)

    def one(leaf: Tensor) -> Tensor:
        w = weights.to(leaf.dtype).reshape((-1,) + (1,) * (leaf.dim() - 1))
        return torch.where(w != 0, w * leaf, torch.zeros_like(leaf)).sum(0)

    return [one(leaf) for leaf in uploads]
