"""Laws of the LSTM: nn.LSTM's numbers with packed texts, one by one or mapped over clients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import sartor
from sartor.core.errors import ModelError
from sartor.data import Federation
from sartor.models import check_module, default, lstm

LENGTHS = [7, 3, 1, 5]


def texts(tokens=11, steps=7, lengths=LENGTHS):
    """Draw rows of token ids with zeros behind their ends; unknown words inside count."""
    x = torch.randint(1, tokens, (len(lengths), steps))
    for row, length in zip(x, lengths, strict=True):
        row[length:] = 0
    return x


def small(**options):
    sizes = {"vocabulary": 11, "embedding": 4, "hidden": 5, "classifier": 6}
    made = lstm(input_shape=(7,), num_classes=3, **(sizes | options))
    return made.double()


def torch_twin(net, bidirectional):
    """Return nn.LSTM with the weights of ours."""
    twin = nn.LSTM(4, 5, len(net.layers), batch_first=True, bidirectional=bidirectional).double()
    with torch.no_grad():
        for number, layer in enumerate(net.layers):
            for end, part in (("", layer.forwards), ("_reverse", layer.backwards)):
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                    if part is not None:
                        twin.get_parameter(f"{name}_l{number}{end}").copy_(getattr(part, name))
    return twin


def twin_scores(net, twin, x, lengths):
    """Return the scores that nn.LSTM gives to packed texts, in front of our classifier."""
    packed = pack_padded_sequence(
        nn.functional.embedding(x, net.embedding.weight),
        torch.tensor(lengths),
        batch_first=True,
        enforce_sorted=False,
    )
    _, (state, _) = twin(packed)
    directions = 2 if twin.bidirectional else 1
    last = torch.cat(list(state[-directions:]), dim=-1)
    return net.fc(nn.functional.leaky_relu(net.fc1(last), 0.1))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_scores_and_gradients_are_those_of_torch_with_packed_texts(layers, bidirectional):
    """With the weights of nn.LSTM: the same scores, and the same gradient of every weight."""
    torch.manual_seed(layers)
    net = small(layers=layers, bidirectional=bidirectional)
    twin = torch_twin(net, bidirectional)
    x, y = texts(), torch.tensor([0, 2, 1, 1])
    scores, wanted = net(x), twin_scores(net, twin, x, LENGTHS)
    torch.testing.assert_close(scores, wanted, atol=1e-13, rtol=0)
    ours = torch.autograd.grad(
        nn.functional.cross_entropy(scores, y), [p for _, p in net.named_parameters()]
    )
    loss = nn.functional.cross_entropy(wanted, y)
    for (name, _), gradient in zip(net.named_parameters(), ours, strict=True):
        if name.startswith("layers"):
            _, number, direction, leaf = name.split(".")
            end = "_reverse" if direction == "backwards" else ""
            other = twin.get_parameter(f"{leaf}_l{number}{end}")
        else:
            other = net.get_parameter(name)
        (there,) = torch.autograd.grad(loss, other, retain_graph=True)
        torch.testing.assert_close(gradient, there, atol=1e-13, rtol=0, msg=name)
        assert float(there.abs().max()) > 0, name


def test_padding_changes_nothing():
    """More padding, or another vector for it, gives the same scores; another last word does not."""
    net, x = small(bidirectional=True), texts()
    scores = net(x)
    longer = torch.cat([x, torch.zeros(4, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(net(longer), scores)
    with torch.no_grad():
        net.embedding.weight[0] += 100
    torch.testing.assert_close(net(x), scores)
    x[1, 2] = x[1, 2] % 10 + 1
    changed = (net(x) - scores).abs().amax(-1) > 1e-9
    assert changed.tolist() == [False, True, False, False]


def test_a_text_without_words_has_the_state_zero():
    """Padding alone gives the classifier's answer to zeros, and a finite gradient."""
    net = small()
    empty = torch.zeros(1, 7, dtype=torch.int64)
    wanted = net.fc(nn.functional.leaky_relu(net.fc1.bias, 0.1))
    torch.testing.assert_close(net(empty)[0], wanted)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_lstm_maps_over_clients(bidirectional):
    """Vmap of the gradient over stacked parameters equals the networks one by one."""
    nets = [small(bidirectional=bidirectional) for _ in range(3)]
    params = {
        k: torch.stack([n.get_parameter(k).detach() for n in nets])
        for k, _ in nets[0].named_parameters()
    }
    x = torch.stack([texts() for _ in range(3)])
    y = torch.randint(0, 3, (3, 4))

    def loss(p, xs, ys):
        scores = torch.func.functional_call(nets[0], p, (xs,))
        return nn.functional.cross_entropy(scores, ys)

    grads = torch.func.vmap(torch.func.grad(loss))(params, x, y)
    for i, net in enumerate(nets):
        nn.functional.cross_entropy(net(x[i]), y[i]).backward()
        for k, p in net.named_parameters():
            torch.testing.assert_close(grads[k][i], p.grad, atol=1e-13, rtol=0, msg=k)


def test_given_vectors_stay_and_may_be_fixed():
    """Vectors that were given survive the seed's draw; fixed ones are no leaves."""
    vectors = torch.randn(11, 4)
    given = sartor.core.task.Task(small(vectors=vectors).float(), "fc").init(5)
    assert torch.equal(given["embedding.weight"], vectors)
    net = small(vectors=vectors, trainable_embedding=False).float()
    task = sartor.core.task.Task(net, "fc")
    start = task.init(5)
    assert "embedding.weight" not in start
    assert torch.equal(task.fixed["embedding.weight"], vectors)
    assert not torch.equal(start["fc.weight"], net.fc.weight)
    net(texts()).sum().backward()
    assert net.embedding.weight.grad is None
    free = small()
    assert not torch.equal(
        sartor.core.task.Task(free, "fc").init(5)["embedding.weight"], free.embedding.weight
    )
    with pytest.raises(ModelError, match=r"shape \(9, 4\).*\(11, 4\)"):
        small(vectors=torch.zeros(9, 4))


def test_sizes_come_from_the_federation():
    """The vocabulary is noted in the federation, else the largest token; 2 x 50 by default."""
    fed = federation()
    net = lstm(fed)
    assert net.embedding.weight.shape == (12, 50)
    assert [tuple(layer.forwards.weight_hh.shape) for layer in net.layers] == [(200, 50)] * 2
    assert net.fc1.weight.shape == (100, 50)
    noted = Federation(fed.x, fed.y, fed.train, fed.val, fed.test, fed.names, 2, {"vocabulary": 40})
    assert lstm(noted).embedding.weight.shape == (40, 50)
    assert type(default(fed)).__name__ == "LSTM"
    check_module(net, net.head)
    with pytest.raises(ModelError, match=r"token ids.*tokens=True"):
        lstm(Federation.from_arrays([[0.5, 1.0]], [0], client=[0]))
    with pytest.raises(ModelError, match="hidden must be >= 1, got 0"):
        lstm(fed, hidden=0)


def federation():
    """Three clients with texts whose first word says the class."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(1, 12, (60, 6), generator=generator)
    x[:, 4:] = 0
    x[0, 0] = 11
    y = (x[:, 0] > 5).long()
    return Federation.from_arrays(x, y, client=torch.arange(60) % 3, tokens=True, num_classes=2)


def test_tokens_reach_the_network_as_integers_on_both_engines():
    """Training on token ids learns, and the engines agree."""
    fed, found = federation(), []
    assert fed.x.dtype == torch.int64
    for engine in ("vectorised", "sequential"):
        result = sartor.fit(
            "fedavg",
            fed,
            model=lstm(fed, embedding=6, hidden=6, classifier=5),
            rounds=3,
            local=sartor.Local(epochs=3, batch=8, lr=0.5),
            engine=engine,
            device="cpu",
            dtype="float64",
        )
        model = result.model(fed.names[0])
        found.append({k: p.detach() for k, p in model.named_parameters()})
        assert model(fed.x[:5]).shape == (5, 2)
    for k, value in found[0].items():
        torch.testing.assert_close(value, found[1][k], atol=1e-10, rtol=0, msg=k)
    start = sartor.core.task.Task(lstm(fed, embedding=6, hidden=6, classifier=5), "fc").init(0)
    assert not torch.allclose(found[0]["embedding.weight"], start["embedding.weight"].double())
