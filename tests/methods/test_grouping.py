"""Groups of clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage

from sartor.methods.parts.grouping import cross_distances, k_means, single_linkage


def partition(labels: torch.Tensor) -> set[frozenset[int]]:
    """Return groups as sets."""
    return {frozenset(np.flatnonzero(labels.numpy() == v).tolist()) for v in labels.unique()}


def clouds(seed: int, sizes: tuple[int, ...] = (4, 3, 5), gap: float = 20.0) -> torch.Tensor:
    """Return points in far clouds."""
    draw = np.random.default_rng(seed)
    parts = [gap * k + draw.normal(size=(n, 3)) for k, n in enumerate(sizes)]
    return torch.from_numpy(draw.permutation(np.concatenate(parts)))


@pytest.mark.parametrize("seed", range(6))
def test_single_linkage_cuts_where_scipy_finds_the_largest_gap(seed: int) -> None:
    """The same groups as scipy's linkage, cut in the middle of the largest gap of its heights."""
    points = clouds(seed)
    distances = torch.cdist(points, points).square()
    pairs = distances.numpy()[np.triu_indices(len(points), 1)]
    merged = linkage(pairs, "single")
    heights = merged[:, 2]
    k = int(np.argmax(np.diff(heights)))
    labels = fcluster(merged, (heights[k] + heights[k + 1]) / 2, "distance")
    assert partition(single_linkage(distances)) == partition(torch.from_numpy(labels))


@pytest.mark.parametrize("seed", range(3))
def test_both_ways_find_far_clouds_under_vmap(seed: int) -> None:
    """Far clouds are found, also for several runs at once; a label is the lowest index."""
    points = torch.stack([clouds(seed), clouds(seed + 10)])
    linked = torch.func.vmap(lambda p: single_linkage(torch.cdist(p, p).square()))(points)
    means = torch.func.vmap(lambda p: k_means(p, 3))(points)
    for run in range(2):
        truth = (points[run, :, 0] / 20).round()
        for labels in (linked[run], means[run]):
            assert partition(labels) == partition(truth)
            for i, label in enumerate(labels.tolist()):
                assert label == min(j for j in range(12) if labels[j] == labels[i])


def test_few_clients() -> None:
    """One or two clients are one group; more groups than clients are as many as clients."""
    assert single_linkage(torch.tensor([[0.0, 9.0], [9.0, 0.0]])).tolist() == [0, 0]
    assert single_linkage(torch.zeros(1, 1)).tolist() == [0]
    assert k_means(torch.tensor([[0.0], [5.0]]), 4).tolist() == [0, 1]


def test_cross_distances_leave_out_the_noise() -> None:
    """⟨a_i − a_j, b_i − b_j⟩ has the mean ‖w_i − w_j‖²; the squared distance has noise added."""
    draw = np.random.default_rng(0)
    truth = torch.from_numpy(draw.normal(size=(4, 6)))
    wanted = torch.cdist(truth, truth).square()
    total, naive = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    for _ in range(4000):
        a, b = (truth + torch.from_numpy(draw.normal(size=(4, 6))) for _ in range(2))
        total += cross_distances(a, b) / 4000
        naive += torch.cdist(a, a).square() / 4000
    torch.testing.assert_close(total, wanted, rtol=0, atol=0.3)
    assert (naive - wanted)[0, 1] == pytest.approx(12.0, abs=0.6)
    assert torch.equal(cross_distances(truth, truth).diagonal(), torch.zeros(4).double())
