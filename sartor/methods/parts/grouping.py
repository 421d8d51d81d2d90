"""Groups of clients, from pairwise distances or from points."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_distances(first: Tensor, second: Tensor) -> Tensor:
    """Estimate ‖w_i* − w_j*‖² from two independent fits of every client.

    ⟨a_i − a_j, b_i − b_j⟩ of fits (clients, d) on halves of every client's samples. Their errors
    are independent, so that, unlike in ‖a_i − a_j‖², they add nothing in expectation. The estimates
    (clients, clients) may be negative.
    """
    cross = first @ second.mT
    own = cross.diagonal()
    return own[:, None] + own[None, :] - cross - cross.mT


def single_linkage(distances: Tensor) -> Tensor:
    """Group clients by single linkage, cut at the largest gap between merges.

    Two clients are in one group if a chain of steps, each shorter than the cut, leads from one to
    the other. One or two clients are one group. Negative distances (clients, clients) count as 0.
    Returned is (clients,), for every client the lowest index of its group.
    """
    num = distances.shape[0]
    reach = distances.clamp(min=0.0) * (1 - torch.eye(num, device=distances.device))
    if num <= 2:
        return torch.zeros(num, dtype=torch.int64, device=distances.device)
    for k in range(num):  # the smallest over all chains of the longest step
        reach = torch.minimum(reach, torch.maximum(reach[:, k : k + 1], reach[k : k + 1, :]))
    later = torch.ones_like(reach).triu() > 0
    far = reach.max() + 1.0
    merges = torch.where(later, far, reach)[1:].min(1).values.sort().values  # of i with any j < i
    gaps = merges[1:] - merges[:-1]
    cut = merges[:-1].gather(0, gaps.argmax().reshape(1))
    return (reach <= cut).to(torch.int8).argmax(1)


def k_means(points: Tensor, num_groups: int, iterations: int = 25) -> Tensor:
    """Group points (clients, d) by Lloyd's algorithm, begun at points far from one another.

    There are no more groups than points. Returned is (clients,), as of ``single_linkage``.
    """
    num_groups = min(num_groups, points.shape[0])
    centres = points[:1]
    for _ in range(num_groups - 1):
        gap = _squared(points, centres).min(1).values
        centres = torch.cat([centres, points.index_select(0, gap.argmax().reshape(1))])
    for _ in range(iterations):
        nearest = _squared(points, centres).argmin(1)
        groups = torch.arange(num_groups, device=points.device)
        member = (nearest[:, None] == groups).to(points.dtype)
        count = member.sum(0)[:, None]
        moved = member.mT @ points / count.clamp(min=1.0)
        centres = torch.where(count > 0, moved, centres)
    nearest = _squared(points, centres).argmin(1)
    return (nearest[:, None] == nearest[None, :]).to(torch.int8).argmax(1)


def _squared(points: Tensor, centres: Tensor) -> Tensor:
    return (points[:, None, :] - centres[None, :, :]).square().sum(-1)
