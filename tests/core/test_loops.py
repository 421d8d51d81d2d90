"""Laws of recurrent layers as loops: torch's numbers, and any engine's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence

import sartor
from sartor.core.errors import ModelError
from sartor.core.loops import looped
from sartor.core.task import Task
from sartor.engines.lanes.operations import CoreLanes

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
FORMS = [
    {},
    {"batch_first": True, "bidirectional": True},
    {"num_layers": 2, "bias": False},
    {"num_layers": 2, "bidirectional": True},
]


def _leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [x for part in value for x in _leaves(part)]


def _state(kind: str, layer: nn.RNNBase, batch: int | None) -> Any:
    lead = layer.num_layers * (2 if layer.bidirectional else 1)
    shape = (lead, layer.hidden_size) if batch is None else (lead, batch, layer.hidden_size)
    state = torch.randn(shape, dtype=torch.float64)
    return (state, state.sin()) if kind == "lstm" else state


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("given", ["zero", "state", "alone", "alone from a state"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_numbers_are_torchs(kind: str, given: str, form: dict[str, Any]) -> None:
    """Outputs, last states, and gradients of weights, inputs and first states."""
    torch.manual_seed(0)
    layer = KINDS[kind](3, 5, **form).double()
    loop = looped(copy.deepcopy(layer))
    batch = None if "alone" in given else 4
    x = torch.randn((7, 3) if batch is None else (4, 7, 3), dtype=torch.float64)
    x = x if batch is None or layer.batch_first else x.transpose(0, 1).contiguous()
    start = _state(kind, layer, batch) if "state" in given else None
    assert loop(x, start)[0].is_contiguous()  # so that it can be viewed in another shape
    found = []
    for network in (layer, loop):
        inputs = [t.clone().requires_grad_() for t in (x, *_leaves(() if start is None else start))]
        first: Any = None if start is None else tuple(inputs[1:])
        first = first if kind == "lstm" or first is None else first[0]
        outcome = _leaves(network(inputs[0], first))
        objective = sum((out * out.detach().cos()).sum() for out in outcome)
        slopes = torch.autograd.grad(objective, [*network.parameters(), *inputs])
        found.append([*outcome, *slopes])
    assert loop.forward.__func__ is not type(layer).forward  # type: ignore[attr-defined]
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


def test_an_lstm_takes_a_list_of_states() -> None:
    layer = nn.LSTM(3, 4)
    x, start = torch.randn(5, 2, 3), [torch.randn(1, 2, 4), torch.randn(1, 2, 4)]
    found = _leaves(looped(copy.deepcopy(layer))(x, start))
    torch.testing.assert_close(found, _leaves(layer(x, tuple(start))))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    ("shape", "state"),
    [
        ((5, 2, 3), (1, 1, 4)),
        ((5, 2, 3), (2, 4)),
        ((5, 2, 3), (2, 2, 4)),
        ((5, 3), (1, 1, 4)),
        ((5, 2, 3), (1, 2, 5)),
        ((5, 2, 2), None),
        ((0, 2, 3), None),
        ((1, 5, 2, 3), None),
        ((3,), None),
    ],
)
def test_what_torch_refuses_is_refused(kind: Any, shape: Any, state: Any) -> None:
    """A network that trains must be one that torch's own layers can run afterwards."""
    layer = kind(3, 4)
    start: Any = None if state is None else torch.randn(state)
    start = (start, start) if kind is nn.LSTM and start is not None else start
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        layer(torch.randn(shape), start)
    with pytest.raises(ModelError, match=r"takes|no steps"):
        looped(layer)(torch.randn(shape), start)


def test_a_task_refuses_what_would_train_as_something_else() -> None:
    """Also without the check of ``fit``: projections would be left out in silence."""
    network = nn.Sequential(nn.LSTM(3, 4, 2, proj_size=2))
    with pytest.raises(ModelError, match="LSTM at '0': projections"):
        Task(network).logits(dict(network.named_parameters()), torch.randn(5, 2, 3))


class Learned(nn.Module):
    """A first state that is learned, a view of the outputs, and a look at the layer's class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4)
        self.first = nn.Parameter(torch.randn(2, 1, 1, 4))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        assert type(self.layer) is nn.LSTM
        hidden, cell = self.first.expand(2, 1, len(x), 4)
        outputs, _ = self.layer(x.transpose(0, 1), (hidden.contiguous(), cell.contiguous()))
        scores: Tensor = self.fc(outputs.view(-1, 4)).view(x.shape[1], len(x), 2).mean(0)
        return scores


def test_a_first_state_that_is_learned() -> None:
    """Its gradient too, in all engines; and the network that was given is as it was."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, 3, generator=rng)
    fed = sartor.Federation.from_arrays(
        x, (x[:, 0, 0] > 0).long(), client=[i % 3 for i in range(60)]
    )
    network = Learned()
    before = copy.deepcopy(network.state_dict())
    common: Any = {
        "model": network,
        "rounds": 2,
        "local": sartor.Local(batch=5, steps=3, lr=0.3),
        "dtype": "float64",
    }
    plain = sartor.fit("per-fedavg", fed, engine="sequential", **common)
    one: Any = plain.model(0)
    assert not torch.equal(one.first.detach().float(), before["first"])
    for chunk in (1, 3):
        other = sartor.fit("per-fedavg", fed, chunk=chunk, **common).model(0)
        for a, b in zip(other.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert type(network.layer) is nn.LSTM
    assert "forward" not in vars(network.layer)
    assert all(torch.equal(value, before[k]) for k, value in network.state_dict().items())
    one(x.double())  # by torch's own layer


class Series(nn.Module):
    """A network as people write it: outputs and both last states of a recurrent layer."""

    head = "fc"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = KINDS[kind](3, 5, num_layers=2, batch_first=True)
        self.fc = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        outputs, last = self.layer(x)
        states = last if isinstance(last, tuple) else (last,)
        scores: Tensor = self.fc(outputs.mean(1) + sum(state[-1] for state in states))
        return scores


@pytest.mark.parametrize("kind", list(KINDS))
def test_gradients_of_lanes(kind: str) -> None:
    """Mapped over clients with models of their own, by compiled loops where there are any."""
    torch.manual_seed(0)
    network = looped(Series(kind).double())
    params = {k: torch.stack([p.detach(), p.detach().sin()]) for k, p in network.named_parameters()}
    x = torch.randn(2, 4, 6, 3, dtype=torch.float64)

    def objective(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(network, params, (x,)).square().sum()

    every = vmap(grad(objective))
    wanted = [grad(objective)({k: p[i] for k, p in params.items()}, x[i]) for i in range(2)]
    with CoreLanes():
        found = every(params, x)
    for lane in range(2):
        for k, slope in wanted[lane].items():
            torch.testing.assert_close(found[k][lane], slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_engine_trains_it_alike_and_gives_it_back(kind: str) -> None:
    """Many lanes, one lane and the reference; the model that is left is torch's own."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, 3, generator=rng)
    fed = sartor.Federation.from_arrays(
        x, (x[:, 0, 0] > 0).long(), client=[i % 3 for i in range(60)]
    )
    common: Any = {
        "model": Series(kind),
        "rounds": 2,
        "local": sartor.Local(batch=5, steps=3, lr=0.3),
        "dtype": "float64",
    }
    plain = sartor.fit("ditto", fed, engine="sequential", **common)
    for chunk in (1, 3):
        other = sartor.fit("ditto", fed, chunk=chunk, **common)
        for client in fed.names:
            model = other.model(client)
            assert type(model.layer) is type(KINDS[kind](1, 1))
            leaves = zip(model.parameters(), plain.model(client).parameters(), strict=True)
            for a, b in leaves:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    rows = fed.test.of(0)
    scores = plain.model(fed.names[0])(fed.x[rows].double()).softmax(1)
    found = plain.predict(fed.names[0], fed.x[rows].numpy())
    torch.testing.assert_close(torch.from_numpy(found.scores), scores, check_dtype=False)


def test_packed_sequences_are_refused() -> None:
    layer = looped(nn.GRU(3, 4, batch_first=True))
    packed = pack_padded_sequence(torch.randn(2, 5, 3), torch.tensor([5, 3]), batch_first=True)
    with pytest.raises(ModelError, match="last step"):
        layer(packed)
