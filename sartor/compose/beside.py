"""Methods side by side on the same clients, and the two changes that may be needed before that.

``side_by_side`` runs several records as one; ``on_share`` lets a record train on a part of every
client's samples, as if there were no others; ``kept_after_training`` makes a record whose models
are used after local training ("post") one whose models are used as they rest ("pre").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sartor.core import tree, wire
from sartor.core.errors import ConfigError
from sartor.core.method import Hub, Method, Phase, Site, check_private, has_own_letters, newcomer
from sartor.core.tree import Tree

Edge = Callable[[Tree, Site], Tree]


def side_by_side(name: str, **parts: Method) -> Method:
    """Run several methods at once on the same clients, each as if it were alone.

    Every tree has one slot per method. If some of them train everybody and others a cohort, all
    clients train, and those outside the cohort leave the phases of the latter out. If one of them
    serves clients one by one, so does the whole: the others must not mind.

    Args:
        name: the name of the whole.
        parts: the methods, by slot. Hyper-parameters of one name are one.
    """
    for m in parts.values():
        if m.warmup is not None:
            raise ConfigError(
                f"{m.name} begins with rounds of another method, which cannot stand beside others; "
                "leave its warm-up out."
            )
    everyone = all(m.everyone for m in parts.values())
    wide = not everyone and any(m.everyone or m.train_all for m in parts.values())
    sampled = {k: wide and not (m.everyone or m.train_all) for k, m in parts.items()}

    def view(site: Site, slot: str) -> Site:
        reports = site.reports
        if wide and parts[slot].everyone:
            reports = torch.ones_like(reports)
        return site._replace(
            common=site.common.get(slot, {}), own=site.own.get(slot, {}), reports=reports
        )

    def seen(hub: Hub, slot: str) -> Hub:
        if wide and parts[slot].everyone:
            return hub._replace(present=torch.ones_like(hub.present))
        return hub

    def heard(server: Tree, hub: Hub, slot: str) -> Hub:
        """Return the hub with only those present whose upload of this slot is sent."""
        there, m = seen(hub, slot), parts[slot]
        who = None if m.connected is None else m.connected(server[slot], there)
        if who is None or isinstance(who, dict):
            return there
        return there._replace(present=there.present & (who[1] if who.dim() == 2 else who))

    def on_slot(phase: Phase, slot: str) -> Phase:
        found = _moved(phase, slot, lambda site: view(site, slot))
        before = found.when

        def when(work: Tree, site: Site) -> Tensor:
            return site.reports if before is None else site.reports & before(work, site)

        return replace(
            found,
            name=f"{slot}: {phase.name}",
            stream=phase.stream or phase.name,
            when=when if sampled[slot] else before,
        )

    def finish(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
        kept, sent = {}, {}
        for slot, m in parts.items():
            new, sent[slot] = m.finish(client[slot], work[slot], view(site, slot))
            check_private(m, sent[slot])
            kept[slot] = tree.where(site.reports, new, client[slot]) if sampled[slot] else new
        return kept, sent

    def greet(server: Tree, hub: Hub) -> Tree:
        return {k: m.greet(server[k], hub) if m.greet else {} for k, m in parts.items()}

    def connected(server: Tree, hub: Hub) -> Tree:
        """Say per slot who is written to and who uploads: (2, slots), or deeper."""
        found: Tree = {}
        for slot, m in parts.items():
            down, up = torch.ones_like(hub.present), seen(hub, slot).present
            both = torch.stack((up if sampled[slot] else down, up))
            inner = None if m.connected is None else m.connected(server[slot], seen(hub, slot))
            found[slot] = both
            if inner is not None:
                found[slot] = tree.map(lambda who, both=both: both & who, inner)
        return found

    def stage(records: dict[str, Method | None]) -> Method | None:
        """Put the same extra round of several methods together; the others sit it out."""
        if not any(records.values()):
            return None
        return side_by_side(name, **{k: r or _resting(parts[k]) for k, r in records.items()})

    return Method(
        name=name,
        hyper={k: v for m in parts.values() for k, v in m.hyper.items()},
        init_server=lambda params, hub: {k: m.init_server(params, hub) for k, m in parts.items()},
        init_client=lambda params, site: {k: m.init_client(params, site) for k, m in parts.items()},
        join=lambda params, site, server, hub: {
            k: newcomer(m, params, site, server[k], hub) for k, m in parts.items()
        },
        broadcast=lambda server, hub: {k: m.broadcast(server[k], hub) for k, m in parts.items()},
        address=lambda server, i, hub: {k: m.address(server[k], i, hub) for k, m in parts.items()},
        greet=greet if all(m.greet or not has_own_letters(m) for m in parts.values()) else None,
        begin=lambda client, site: {k: m.begin(client[k], view(site, k)) for k, m in parts.items()},
        phases=tuple(on_slot(p, k) for k, m in parts.items() for p in m.phases),
        adapt=tuple(on_slot(p, k) for k, m in parts.items() for p in m.adapt),
        finish=finish,
        aggregate=lambda server, uploads, hub: {
            k: m.aggregate(server[k], uploads[k], heard(server, hub, k)) for k, m in parts.items()
        },
        model=lambda work, site: {k: m.model(work[k], view(site, k)) for k, m in parts.items()},
        private=lambda leaf: all(m.private(leaf) for m in parts.values()),
        everyone=everyone,
        train_all=wide,
        one_by_one=any(m.one_by_one for m in parts.values()),
        connected=connected if wide or any(m.connected for m in parts.values()) else None,
        sparse={
            leaf: marks
            for k, m in parts.items()
            for leaf, marks in wire.moved(m.sparse, {w: f"{w}/{k}" for w in wire.MESSAGES}).items()
        },
        # A prologue that was made from the method may carry the method's epilogue along.
        prologue=stage(
            {k: m.prologue and replace(m.prologue, epilogue=None) for k, m in parts.items()}
        ),
        epilogue=stage({k: m.epilogue for k, m in parts.items()}),
    )


def _resting(method: Method) -> Method:
    """Return the method in a round in which it does and sends nothing."""
    return Method(
        name=method.name,
        hyper=method.hyper,
        init_server=method.init_server,
        init_client=method.init_client,
        begin=lambda client, site: {},
        finish=lambda client, work, site: (client, {}),
        aggregate=lambda server, uploads, hub: server,
        everyone=True,
    )


def _moved(phase: Phase, slot: str, view: Callable[[Site], Site]) -> Phase:
    """Let a phase work on one slot of the tree, with another view of the site."""

    def edge(fn: Edge) -> Edge:
        return lambda work, site: {**work, slot: fn(work[slot], view(site))}

    def step(work: Tree, batch: Any, site: Site) -> Tree:
        return {**work, slot: phase.step(work[slot], batch, view(site))}

    steps, when, stop = phase.steps, phase.when, phase.stop
    return replace(
        phase,
        step=step,
        enter=edge(phase.enter),
        leave=edge(phase.leave),
        steps=(lambda site: steps(view(site))) if callable(steps) else steps,
        when=(lambda work, site: when(work[slot], view(site))) if when else None,
        stop=(lambda work, site: stop(work[slot], view(site))) if stop else None,
    )


def on_share(method: Method, share: float) -> Method:
    """Let a method train on the first ``share`` of every client's samples, as if it had no others.

    Samples are taken in the random order of ``Phase.part``. Numbers of samples, the clients' and
    the server's, are those of the share. ``site.mask`` still has room for all samples.

    Args:
        method: any method.
        share: between 0 and 1; a client with samples keeps at least one.
    """

    def count(sizes: Tensor) -> Tensor:
        part = torch.floor(share * sizes.double() + 1e-9).to(sizes.dtype)
        return torch.minimum(part.clamp(min=min(1, math.ceil(share))), sizes)

    def cut(phase: Phase) -> Phase:
        first, end = phase.part
        return replace(phase, part=(share * first, share * end)) if phase.data == "train" else phase

    return viewed(
        method,
        lambda site: site._replace(num_samples=count(site.num_samples)),
        lambda hub: hub._replace(sizes=count(hub.sizes)),
        cut,
    )


def viewed(
    method: Method,
    site: Callable[[Site], Site],
    hub: Callable[[Hub], Hub],
    phase: Callable[[Phase], Phase] = lambda phase: phase,
) -> Method:
    """Let a method see other sites and hubs than there are, and change its phases."""

    def seen(fn: Any, view: Callable[[Any], Any]) -> Any:
        return None if fn is None else lambda *args: fn(*args[:-1], view(args[-1]))

    def changed(given: Phase) -> Phase:
        return phase(
            replace(
                given,
                **{f: seen(getattr(given, f), site) for f in ("step", "enter", "leave", "when")},
                steps=seen(given.steps, site) if callable(given.steps) else given.steps,
                stop=seen(given.stop, site),
            )
        )

    def join(params: Tree, here: Site, server: Tree, there: Hub) -> Tree:
        return newcomer(method, params, site(here), server, hub(there))

    def again(given: Method | None) -> Method | None:
        return None if given is None else viewed(given, site, hub, phase)

    on_client = ("init_client", "begin", "finish", "model", "inspect_client")
    on_server = ("init_server", "broadcast", "greet", "aggregate", "centre", "inspect", "connected")
    own_letters = {"address": seen(method.address, hub)} if has_own_letters(method) else {}
    changes: dict[str, Any] = {
        **{f: seen(getattr(method, f), site) for f in on_client},
        **{f: seen(getattr(method, f), hub) for f in on_server},
        **own_letters,
    }
    return replace(
        method,
        **changes,
        join=join,
        phases=tuple(changed(p) for p in method.phases),
        adapt=tuple(changed(p) for p in method.adapt),
        prologue=again(method.prologue),
        epilogue=again(method.epilogue),
    )


def kept_after_training(method: Method) -> Method:
    """Keep every client's model after its last local training, and use that one.

    A client that has not trained yet uses the model it would train. Fine-tuning of the model before
    local training (``adapt``) is left out: that one is not used.

    Args:
        method: a method whose headline is "post" and whose models are parameters of the network.
    """
    if method.predict is not None:
        raise ConfigError(
            f"{method.name} uses its models after local training, and they are more than "
            "parameters of the network, so they cannot be kept beside others; leave do_no_harm out."
        )

    def init_client(params: Tree, site: Site) -> Tree:
        inner = method.init_client(params, site)
        return {"inner": inner, "used": params, "trained": site.num_samples < 0}

    def join(params: Tree, site: Site, server: Tree, hub: Hub) -> Tree:
        return {
            **init_client(params, site),
            "inner": newcomer(method, params, site, server, hub),
        }

    def begin(client: Tree, site: Site) -> Tree:
        return {**client, "inner": method.begin(client["inner"], site)}

    def finish(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
        inner, sent = method.finish(client["inner"], work["inner"], site)
        used = method.model(work["inner"], site)
        trained = torch.ones_like(client["trained"])
        return {"inner": inner, "used": used, "trained": trained}, sent

    def model(work: Tree, site: Site) -> Tree:
        return tree.where(work["trained"], work["used"], method.model(work["inner"], site))

    def rest(record: Method | None) -> Method | None:
        """Let the method's own prologue or epilogue leave the kept models alone."""
        if record is None:
            return None

        def closing(client: Tree, work: Tree, site: Site) -> tuple[Tree, Tree]:
            inner, sent = record.finish(client["inner"], work["inner"], site)
            return {**client, "inner": inner}, sent

        return replace(
            record,
            begin=lambda client, site: {**client, "inner": record.begin(client["inner"], site)},
            phases=tuple(_moved(p, "inner", lambda site: site) for p in record.phases),
            finish=closing,
            epilogue=rest(record.epilogue),
        )

    return replace(
        method,
        init_client=init_client,
        join=join,
        begin=begin,
        phases=tuple(
            replace(_moved(p, "inner", lambda site: site), stream=p.stream or p.name)
            for p in method.phases
        ),
        adapt=(),
        finish=finish,
        model=model,
        headline="pre",
        prologue=rest(method.prologue),
        epilogue=rest(method.epilogue),
    )
