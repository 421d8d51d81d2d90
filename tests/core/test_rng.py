"""The generator: published numbers, and values that depend on (key, position) alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sartor.core import rng

# Known answers of Philox4x32-10, published with Random123: counter, key, output.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), VECTORS)
def test_philox_gives_the_published_vectors(counter, key, wanted) -> None:
    """The ten rounds are those of the paper."""
    words = [torch.tensor(c) for c in counter]
    found = torch.stack(rng._philox(torch.tensor(key[0]), torch.tensor(key[1]), *words))
    assert found.tolist() == list(wanted)


@given(st.integers(0, 2**63 - 1), st.integers(0, 40), st.integers(0, 40))
def test_a_longer_draw_begins_with_the_shorter(seed: int, few: int, more: int) -> None:
    """Value j depends on (key, j), not on how many are drawn."""
    key = rng.key(seed)
    few, more = sorted((few, more))
    assert torch.equal(rng.bits(key, more)[:few], rng.bits(key, few))
    assert torch.equal(rng.uniform(key, (more,))[:few], rng.uniform(key, (few,)))
    assert torch.equal(rng.normal(key, (more,))[:few], rng.normal(key, (few,)))


def test_words_at_are_the_blocks_of_a_draw() -> None:
    """Random access gives the same words as drawing from the start."""
    key = rng.fold(rng.key(3), "x")
    assert torch.equal(
        rng.words_at(key[None], torch.tensor([2, 0])), rng.bits(key, 12).reshape(3, 4)[[2, 0]]
    )


def test_a_fold_does_not_depend_on_its_batch() -> None:
    """Folding many keys at once is folding each alone."""
    keys = torch.stack([rng.key(s) for s in (0, 1, 2**40)])
    data = torch.tensor([5, 6, 7])
    many = rng.fold(keys, "stage", data, 9)
    for k in range(3):
        assert torch.equal(many[k], rng.fold(keys[k], "stage", int(data[k]), 9))
    assert rng.fold(keys[:, None, :], data).shape == (3, 3, 2)


def test_folds_tell_all_their_data_apart() -> None:
    """Seeds, names, numbers, their order, and a draw from the same key never share a value."""
    key = rng.key(1)
    made = [
        rng.fold(key, *data)
        for data in ((0,), (1,), ("a",), ("b",), (0, 1), (1, 0), (2**32,), ("a", 0), (0, "a"))
    ]
    made += [rng.fold(rng.key(2), 0), rng.fold(rng.key(2**32 + 1), 0), rng.bits(key, 2), key]
    assert len({tuple(k.tolist()) for k in made}) == len(made)
    assert torch.equal(rng.fold(key, 1, 2), rng.fold(rng.fold(key, 1), 2))


def test_uniform_numbers_have_the_moments_and_the_bounds() -> None:
    """Mean 1/2, variance 1/12, no lag, all in the open interval."""
    u = rng.uniform(rng.key(5), (200, 200), torch.float64)
    assert u.shape == (200, 200)
    assert u.mean().item() == pytest.approx(0.5, abs=0.006)
    assert u.var().item() == pytest.approx(1 / 12, abs=0.003)
    flat = u.reshape(-1) - 0.5
    assert abs((flat[1:] * flat[:-1]).mean().item()) < 0.002
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_largest_word_stays_below_one(dtype, monkeypatch) -> None:
    """The interval is open in every precision."""
    monkeypatch.setattr(rng, "bits", lambda key, num: torch.full((num,), 2**32 - 1))
    assert float(rng.uniform(rng.key(0), (1,), dtype)) < 1.0
    monkeypatch.setattr(rng, "bits", lambda key, num: torch.zeros(num, dtype=torch.int64))
    assert float(rng.uniform(rng.key(0), (1,), dtype)) > 0.0


def test_normal_numbers_have_the_moments_and_the_tails() -> None:
    """Mean 0, variance 1, kurtosis 3, neighbours uncorrelated, 4.55% beyond two sigmas."""
    z = rng.normal(rng.key(6), (40001,), torch.float64)
    assert z.dtype == torch.float64
    assert z.mean().item() == pytest.approx(0, abs=0.02)
    assert z.var().item() == pytest.approx(1, abs=0.03)
    assert (z**4).mean().item() == pytest.approx(3, abs=0.15)
    assert abs((z[0:-1:2] * z[1::2]).mean().item()) < 0.03
    assert (z.abs() > 2).double().mean().item() == pytest.approx(math.erfc(math.sqrt(2)), abs=0.004)


@given(st.integers(0, 1000), st.integers(0, 50))
def test_a_permutation_covers_everything_once(seed: int, num: int) -> None:
    """Each number appears once."""
    assert sorted(rng.permutation(rng.key(seed), num).tolist()) == list(range(num))


@given(st.integers(0, 2**40), st.integers(0, 50))
def test_the_host_draws_the_same(seed: int, num: int) -> None:
    """Words and orders of numpy are those of tensors."""
    key = rng.fold(rng.key(seed), "who")
    assert rng.bits_host(key.numpy(), num).tolist() == rng.bits(key, num).tolist()
    assert rng.sample_host(key.numpy(), num, num).tolist() == rng.permutation(key, num).tolist()


@pytest.mark.parametrize(("num", "count"), [(10, 3), (5000, 5000), (5000, 600), (10**9, 50)])
def test_a_sample_holds_different_numbers(num: int, count: int) -> None:
    """As many as asked for, in range; a longer sample of few begins with the shorter one."""
    key = rng.key(7)
    drawn = rng.sample_host(key.numpy(), num, count).tolist()
    assert len(set(drawn)) == len(drawn) == count
    assert 0 <= min(drawn) <= max(drawn) < num
    assert rng.sample_host(key.numpy(), num, count // 2).tolist() == drawn[: count // 2]


def test_samples_of_few_are_uniform_and_cost_no_more_than_they_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every number comes equally often, at every place; words drawn do not follow ``num``."""
    asked: list[int] = []
    plain = rng.bits_host

    def watched(key: Any, num: int) -> Any:
        asked.append(num)
        return plain(key, num)

    monkeypatch.setattr(rng, "bits_host", watched)
    base = rng.key(3)
    drawn = [rng.sample_host(rng.fold(base, k).numpy(), 4096, 512) for k in range(400)]
    rows = torch.from_numpy(np.stack(drawn))
    assert max(asked) <= 4 * 512 + 32
    for place in (rows[:, :256], rows[:, 256:]):
        # 400 · 256 numbers over 16 bins of 256: 6,400 each, standard deviation about 77.
        counts = torch.bincount(place.flatten() // 256, minlength=16)
        assert (counts - 6400).abs().max() < 5 * 77
    parity = torch.bincount(rows.flatten() % 2)
    assert abs(int(parity[0]) - 102_400) < 5 * 226


def test_permutations_are_uniform() -> None:
    """All six orders of three things come equally often."""
    base = rng.key(0)
    orders = [tuple(rng.permutation(rng.fold(base, k), 3).tolist()) for k in range(1200)]
    counts = [orders.count(o) for o in set(orders)]
    assert len(counts) == 6
    assert min(counts) > 150
    assert max(counts) < 250


def test_draws_work_under_vmap() -> None:
    """Mapped over keys, every draw is the draw of its key."""
    keys = rng.fold(rng.key(0), torch.arange(5)[:, None].squeeze(1))
    for draw in (
        lambda k: rng.normal(k, (3, 2)),
        lambda k: rng.uniform(k, (7,)),
        lambda k: rng.permutation(k, 6),
        lambda k: rng.fold(k, "a", 3),
    ):
        mapped = torch.func.vmap(draw)(keys)
        nested = torch.func.vmap(torch.func.vmap(draw))(keys[None].repeat(2, 1, 1))
        for i in range(5):
            assert torch.equal(mapped[i], draw(keys[i]))
            assert torch.equal(nested[1, i], draw(keys[i]))


def test_folding_on_the_host_is_folding_on_tensors() -> None:
    """The numpy form gives the same keys, so the engine may fold where it is cheap."""
    keys = torch.stack([rng.key(seed) for seed in (0, 1, 2**40 + 3)])
    clients = torch.arange(4)
    wanted = rng.fold(rng.fold(keys, "train", 7)[:, None, :], clients)
    found = rng.fold_host(rng.fold_host(keys.numpy(), "train", 7)[:, None, :], clients.numpy())
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
@pytest.mark.parametrize("item", ["train", 5, 2**33 + 1])
def test_one_key_is_folded_in_plain_numbers(seed: int, item: int | str) -> None:
    """As all keys are, whatever axes stand before it."""
    wanted = rng.fold(rng.key(seed), item, "x", 9).tolist()
    one = rng.key(seed).numpy()
    assert rng.fold_host(one[None], item, "x", 9).tolist() == [wanted]
    assert rng.fold_host(one[None, None], item, "x", 9).tolist() == [[wanted]]
