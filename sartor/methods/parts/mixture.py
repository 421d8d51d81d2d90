"""Several networks that answer together: their probabilities are averaged, not their scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sartor.core import tree
from sartor.core.task import Task, cross_entropy
from sartor.core.tree import Tree


def component(table: Tree, m: int) -> Tree:
    """Take network m of a table of networks."""
    return tree.map(lambda leaf: leaf[m], table)


def mixed_scores(task: Task, table: Tree, log_weights: Tensor, x: Tensor) -> Tensor:
    """Return the log of the networks' mean probabilities: log Σ_m w_m p_m(y|x).

    ``log_weights`` (networks,) hold up to a constant. For losses other than cross-entropy, return
    the mean of the outputs.
    """
    log_w = torch.log_softmax(log_weights, -1)
    found = [task.logits(component(table, m), x) for m in range(log_w.shape[0])]
    if getattr(task.criterion, "plain", task.criterion) is not cross_entropy:
        return torch.stack([log_w[m].exp() * out for m, out in enumerate(found)]).sum(0)
    logs = [log_w[m] + F.log_softmax(out, -1) for m, out in enumerate(found)]
    return torch.logsumexp(torch.stack(logs), 0)
