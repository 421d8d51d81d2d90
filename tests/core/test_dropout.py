"""Dropout: torch's layers, drawn by key, where a gradient is taken and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sartor.core import layers, rng
from sartor.core.errors import ContractError, ModelError
from sartor.core.local import Local
from sartor.core.method import Batch
from sartor.core.task import Task, grad
from sartor.methods import build
from tests.toys import Noisy, federation, outcome, run, simulation

KEY = rng.fold(rng.key(3), "some step")
MANY = 40_000


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 in whole numbers of Python, as published."""
    k0, k1 = key
    c = list(counter)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def batch_of(x: Tensor) -> Batch:
    """Return a batch of real samples with labels 0."""
    yes = torch.ones(len(x), dtype=torch.bool)
    return Batch(x, torch.zeros(len(x), dtype=torch.long), yes, torch.arange(len(x)), yes[0])


def trained(network: Callable[[Tensor], Tensor], x: Tensor, key: Tensor = KEY) -> Tensor:
    """Return what a network gives in a step of local work, in a pass whose gradient is taken."""
    with layers.working(key, batch_of(x)), layers.passing(x, slope=True, draws=True):
        return network(x)


def test_what_is_kept_are_the_words_of_philox() -> None:
    """Value j of draw n is word j mod 4 of the block (j // 4, n, 0, 2), against p · 2^32."""
    key = (int(KEY[0]), int(KEY[1]))
    words = [w for block in range(3) for w in philox(key, (block, 5, 0, 2))]
    assert rng.keep_words(KEY, 5, 11).tolist() == words[:11]
    kept = rng.kept(KEY, 5, (11,), 0.3)
    assert kept.tolist() == [w >= round(0.3 * 2**32) for w in words[:11]]
    assert torch.equal(rng.kept(KEY, 5, (4,), 0.3), kept[:4])  # a longer draw begins as a shorter
    assert not torch.equal(rng.kept(KEY, 6, (11,), 0.3), kept)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_leaves_out_a_share_and_keeps_the_mean(p: float) -> None:
    """Zeros and 1/(1 − p), in the share that was asked for; all and none at the ends."""
    x = torch.ones(MANY, 2)
    found = trained(nn.Dropout(p), x)
    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    share = (found == 0).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / (2 * MANY)) ** 0.5
    assert torch.equal(trained(nn.Dropout(1.0), x), torch.zeros_like(x))
    assert torch.equal(trained(nn.Dropout(0.0), x), x)
    with pytest.raises(ModelError, match=r"from 0 to 1, got 1\.5"):
        trained(lambda x: F.dropout(x, 1.5), x)


@pytest.mark.parametrize(
    ("layer", "shape", "axes"),
    [
        (nn.Dropout1d(0.4), (300, 9, 5), (2,)),
        (nn.Dropout2d(0.4), (300, 9, 3, 4), (2, 3)),
        (nn.Dropout3d(0.4), (300, 9, 2, 2, 3), (2, 3, 4)),
        (nn.Dropout2d(0.4), (300, 9, 5), (2,)),
        (nn.Dropout1d(0.4), (3000, 5), (1,)),
        (nn.FeatureAlphaDropout(0.4), (300, 9, 3, 4), (2, 3)),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_channels_are_left_out_as_a_whole(layer: nn.Module, shape: Any, axes: Any) -> None:
    """All of a channel of a sample or nothing; as torch does, in shapes with and without axes."""
    torch.manual_seed(0)
    for found in (trained(layer, torch.ones(shape)), layer(torch.ones(shape))):
        spread = found.amax(axes) - found.amin(axes)
        assert spread.max() == 0
        share = (found != found.max()).double().mean().item()
        assert abs(share - 0.4) < 5 * (0.24 / spread.numel()) ** 0.5


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    """Of standard normal inputs; and its two values are those of torch."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(MANY, 4, generator=draw, dtype=torch.float64)
    found = trained(nn.AlphaDropout(0.3), x)
    assert abs(found.mean()) < 0.02
    assert abs(found.var() - 1) < 0.02
    ones = torch.ones(1000, dtype=torch.float64)
    ours, theirs = trained(nn.AlphaDropout(0.3), ones), nn.AlphaDropout(0.3)(ones)
    torch.testing.assert_close(ours.unique(), theirs.unique(), rtol=1e-6, atol=0)


def test_rrelu_draws_slopes_and_uses_their_mean() -> None:
    """Uniform slopes of negative numbers in training, their middle elsewhere."""
    x = -torch.ones(MANY)
    slopes = -trained(nn.RReLU(0.1, 0.5), x)
    assert 0.1 <= slopes.min() < 0.101
    assert 0.499 < slopes.max() <= 0.5
    assert abs(slopes.mean() - 0.3) < 0.005
    with layers.passing(x, slope=False, draws=True):
        torch.testing.assert_close(nn.RReLU(0.1, 0.5)(x), 0.3 * x)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_with_dropout_is_attention(causal: bool, mask: str | None) -> None:
    """With next to nothing left out: torch's own numbers, whatever the mask."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 5, 4, generator=draw, dtype=torch.float64)
    given = None
    if mask is not None and not causal:
        given = torch.rand(5, 5, generator=draw, dtype=torch.float64) > 0.3
        given |= torch.eye(5, dtype=torch.bool)
        given = given if mask == "bool" else torch.where(given, 0.5, -2.0).double()
    call = F.scaled_dot_product_attention
    ours = trained(lambda q: call(q, k, v, given, 1e-9, causal), q)
    torch.testing.assert_close(ours, call(q, k, v, given, 0.0, causal), rtol=1e-8, atol=1e-8)


def test_a_transformer_draws_alike_with_and_without_weights() -> None:
    """Both ways through torch's attention layer leave out the same, about the share asked for."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double()
    x = torch.randn(64, 6, 8, dtype=torch.float64)
    plain = trained(lambda x: layer(x, x, x, need_weights=False)[0], x)
    both = trained(lambda x: layer(x, x, x, need_weights=True)[0], x)
    torch.testing.assert_close(plain, both)
    weights = trained(lambda x: layer(x, x, x, average_attn_weights=False)[1], x)
    assert abs((weights == 0).double().mean() - 0.5) < 0.03
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double()
    with layers.passing(x, slope=False, draws=True):
        still = encoder(x)
    torch.testing.assert_close(still, encoder.eval()(x))
    assert not torch.allclose(trained(encoder.train(), x), still)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_leave_out_between_layers(kind: Any) -> None:
    """As torch does: between layers, so that one layer has none."""
    task = Task(nn.Sequential(kind(3, 4, 2, dropout=0.9, batch_first=True), Last()))
    params = task.init(0)
    x = torch.randn(7, 5, 3)

    def loss(p: Any) -> Tensor:
        return task.logits(p, x).square().sum()

    with layers.working(KEY, batch_of(x)):
        drawn = grad(loss)(params)
    plain = Task(nn.Sequential(kind(3, 4, 2, batch_first=True), Last()))
    torch.testing.assert_close(task.logits(params, x), plain.logits(params, x))
    whole = grad(lambda p: plain.logits(p, x).square().sum())(params)
    assert not torch.allclose(drawn["0.weight_ih_l1"], whole["0.weight_ih_l1"])


class Last(nn.Module):
    """The outputs of a recurrent layer at the last step."""

    def forward(self, found: Any) -> Tensor:
        last: Tensor = found[0][:, -1]
        return last


def test_dropout_acts_where_a_gradient_is_taken_alone() -> None:
    """Scores, features and losses are those of the network in evaluation mode."""
    net = Noisy(norm=False)
    task = Task(net, "fc")
    params = {k: v.double() for k, v in task.init(0).items()}
    x = federation().x
    still = task.with_params(params)
    assert not still.training
    with layers.working(KEY, batch_of(x)):
        for found in (task.logits(params, x), task.classify(params, task.features(params, x))):
            torch.testing.assert_close(found, still(x))
        loss = task.loss(params, batch_of(x))
        drawn = grad(lambda p: task.loss(p, batch_of(x)))(params)
    torch.testing.assert_close(loss, F.cross_entropy(still(x), batch_of(x).y))
    plain = Task(Noisy(norm=False, drop=0.0), "fc")
    without = grad(lambda p: plain.loss(p, batch_of(x)))(params)
    assert not torch.allclose(drawn["body.weight"], without["body.weight"])
    with pytest.raises(ContractError, match="outside of a phase"):
        grad(lambda p: task.loss(p, batch_of(x)))(params)


def test_a_step_is_that_of_torch_with_the_same_mask() -> None:
    """Two steps of one client, by hand in torch: the masks are those of the keys of the steps."""
    net = Noisy(norm=False, drop=0.4)
    task, fed = Task(net, "fc"), federation(sizes=(6,))
    method = build("fedavg", task, Local(steps=2, batch=None, lr=0.3), {})
    sim = run(simulation(method, task, [fed], seeds=[5], rounds=1, participation=1.0))
    own: Any = task.with_params({k: v.double() for k, v in task.init(5).items()})
    rows = fed.train.of(0)
    x, y = fed.x[rows], fed.y[rows]
    key = rng.fold(rng.key(5), "train", 0, 0, "train", "step")
    for step in range(2):
        at = rng.fold(key, step)
        first = rng.kept(at, 0, (6, 6), 0.4).double() / 0.6
        second = rng.kept(at, 1, (6, 6), 0.2).double() / 0.8
        scores = own.fc(torch.tanh(own.body(x)) * first * second)
        own.zero_grad()
        F.cross_entropy(scores, y).backward()
        with torch.no_grad():
            for p in own.parameters():
                p -= 0.3 * p.grad
    for name, value in own.named_parameters():
        np.testing.assert_allclose(sim.server["params"][name][0], value.detach(), atol=1e-12)


def test_masks_differ_by_seed_round_client_and_step() -> None:
    """No two steps of anybody leave out the same."""
    seen = []
    task = Task(Noisy(norm=False), "fc")
    plain = rng.kept

    def watched(key: Tensor, number: int, shape: Any, p: float) -> Tensor:
        seen.append((tuple(key.tolist()), number))
        return plain(key, number, shape, p)

    rng.kept = watched
    try:
        method = build("fedavg", task, Local(epochs=2, batch=3, lr=0.1), {})
        feds = [federation(0), federation(0)]
        sim = simulation(method, task, feds, seeds=[0, 1], rounds=2, engine="sequential")
        run(sim)
    finally:
        rng.kept = plain
    assert len(seen) == len(set(seen)) > 50
    assert {number for _, number in seen} == {0, 1}


def test_a_network_without_dropout_is_computed_as_before() -> None:
    """No mode is entered, and phases draw no keys: the record is the very same."""
    task = Task(Noisy(norm=False, drop=0.0), "fc")
    assert not task.draws
    method = build("fedavg", task, Local(batch=4), {})
    sim = simulation(method, task, [federation()])
    assert sim.method is method
    noisy = Task(Noisy(norm=False), "fc")
    other = simulation(build("fedavg", noisy, Local(batch=4), {}), noisy, [federation()])
    assert other.method.phases[0].random
    assert set(outcome(run(sim))) == set(outcome(run(other)))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_gpu_draws_the_same(method: str) -> None:
    """Graphs with dropout and BatchNorm give the numbers of the CPU."""
    import sartor

    with pytest.warns(UserWarning, match="BatchNorm"):
        found = [
            sartor.fit(
                method, federation(), model=Noisy(), rounds=4, dtype="float64", device=device
            )
            for device in ("cpu", "cuda")
        ]
    a, b = (r.scores["pre", "test"].loss for r in found)
    np.testing.assert_allclose(a, b, atol=1e-9)
