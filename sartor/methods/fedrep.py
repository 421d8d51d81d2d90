"""FedRep: in every round a client first fits its head to the common body, then moves the body once.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021 (arXiv 2102.07078), Algorithm 1.

| symbol | here | meaning |
|---|---|---|
| φ | server["params"] | the representation: the body, averaged plainly |
| h_i | client["private"] | the head, which never leaves |
| τ_h | head_epochs, head_steps | how long the head trains, with the body fixed; 10 in the paper |
| τ_φ | body_epochs | how long the body trains then, with the head fixed; 1 in the paper |
| α | head_lr, local_lr | the steps of head and body; 0.01 for both in the paper (batch 10) |
| β | relax | over-relaxation of the average; 1 is plain, as in the paper |

Differs from the authors' code: each phase has an optimiser of its own (there one object serves
both), weight decay acts on biases too, a client that has not taken part yet has its initial head
(there the average of the heads of others), and the average is plain for all data
(`rule="normalized"` weighs by samples). There all clients train the head alone in a last round, for
max(10, τ_h) epochs: `final_head_epochs=10`. The body reads the stream of batches of other methods;
with τ_h = 0 it is trained as FedBABU's.

A newcomer receives the body, and trains a head on its own data from the initial one, with the body
fixed; it moves the body in rounds in which it takes part.
"""

from __future__ import annotations

from dataclasses import replace

from sartor.core.errors import below, refuse
from sartor.core.hyper import Hyper
from sartor.core.local import Local
from sartor.core.method import Method, changed
from sartor.core.task import Task
from sartor.methods.parts.partial import Average, partly_shared, train_part


def fedrep(
    task: Task,
    local: Local,
    *,
    head_epochs: int = 10,
    head_steps: int | None = None,
    body_epochs: int | None = None,
    final_head_epochs: int = 0,
    rule: Average = "uniform",
) -> Method:
    """Build FedRep: min over φ of the mean of min over h_i of L_i(φ, h_i).

    Args:
        task: the network and its loss.
        local: local training of the body; of the head too, where nothing else is said.
        head_epochs: epochs of the head in a round; 0 leaves the heads as they are.
        head_steps: steps of the head; replaces epochs.
        body_epochs: epochs of the body; those of ``local`` if None, 0 leaves the body as it is.
        final_head_epochs: epochs of the head of every client after the last round.
        rule: how the server averages; see ``fedavg``.
    """
    faults = below(
        0,
        "0 leaves that part of the training out.",
        head_epochs=head_epochs,
        head_steps=head_steps,
        body_epochs=body_epochs,
        final_head_epochs=final_head_epochs,
    )
    fits_head = bool(head_epochs if head_steps is None else head_steps)
    if not fits_head and body_epochs == 0:
        faults.append("Neither head nor body would train; set head_epochs or body_epochs.")
    refuse(faults)

    head = replace(local, epochs=head_epochs or 1, steps=head_steps or None)
    last = replace(local, epochs=final_head_epochs or 1, steps=None)
    body = replace(local, epochs=body_epochs, steps=None) if body_epochs else local
    phases = []
    if fits_head:  # Alg. 1, client: τ_h epochs of h_i with φ fixed ...
        phases.append(train_part(task, head, task.is_head, name="head", lr="head_lr"))
    if body_epochs != 0:  # ... and then of φ with h_i fixed
        phases.append(train_part(task, body, task.is_body))
    base = partly_shared(task, local, task.is_body, name="fedrep", rule=rule, by_head=True)
    hyper = dict(base.hyper)
    if fits_head or final_head_epochs:
        hyper["head_lr"] = Hyper(local.lr, 0.0, note="the step size of the head; 0 leaves it")
    rounds = changed(base, hyper=hyper, phases=tuple(phases))
    if not final_head_epochs:
        return rounds
    ending = changed(
        rounds,
        phases=(train_part(task, last, task.is_head, name="final head", lr="head_lr"),),
        finish=lambda client, work, ctx: (rounds.finish(client, work, ctx)[0], {}),
        aggregate=lambda server, uploads, ctx: server,
    )
    return changed(rounds, after=ending)
