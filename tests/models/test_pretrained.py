"""Networks that bring weights with them: where clients start, and what is fixed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import sartor
from sartor.core.errors import ConfigError, ModelError
from sartor.core.task import Task
from sartor.models import check_buffers, check_module, lstm, pretrained, unlike_a_draw
from tests.laws import CASES, Case
from tests.toys import (
    Frozen,
    Net,
    assert_same,
    federation,
    outcome,
    run,
    simulation,
    two_allocations,
)


class Trained(nn.Module):
    """A convolution with BatchNorm that has seen data, a hidden layer and a head."""

    head = "fc"
    scale: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(1, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.drop = nn.Dropout(0.5)
            self.hidden = nn.Linear(4 * 4 * 4, 6)
            self.fc = nn.Linear(6, 3)
            self.register_buffer("scale", torch.tensor(1.5))
            for _ in range(3):
                self(torch.randn(16, 1, 6, 6) * 2 + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))) * self.scale
        found: Tensor = self.fc(torch.relu(self.hidden(self.drop(x.flatten(1)))))
        return found


class Written(Net):
    """The same network, with the constants written into its code."""

    pretrained = True

    def __init__(self, frozen: Frozen) -> None:
        super().__init__()
        self.load_state_dict(frozen.state_dict(), strict=False)
        layer = frozen.before
        fixed = [t.detach().double() for t in (layer.weight, layer.bias, frozen.scale)]
        self.constants = fixed  # a list of tensors, which torch does not look into

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, scale = self.constants
        return super().forward(torch.tanh(nn.functional.linear(x, weight, bias)) * scale)


def images(clients: int = 4, samples: int = 30) -> sartor.Federation:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(clients * samples, 1, 6, 6, generator=draw)
    y = (x.flatten(1).mean(1) > 0).long() + (x[:, 0, 0, 0] > 1).long()
    who = [f"c{i % clients}" for i in range(len(x))]
    return sartor.Federation.from_arrays(x, y, client=who, num_classes=3)


LOCAL = sartor.Local(batch=8, epochs=1, lr=0.1)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c)) for c in CASES if c.is_default], ids=str
)
def test_what_is_fixed_is_a_constant_for_every_method(case: Case) -> None:
    """A frozen layer and a buffer give the numbers, and the costs, of constants in the code."""
    torch.manual_seed(3)
    frozen = Frozen()
    found = []
    for module in (frozen, Written(frozen)):
        task = Task(module, head="fc")
        sim = simulation(
            case.build(task), task, two_allocations(), hyper=case.hyper, rounds=2, eval_every=2
        )
        found.append(outcome(run(sim)))
    assert not any("before" in name or "scale" in name for name in found[0])
    assert_same(found[0], found[1], atol=1e-12)


@pytest.mark.parametrize("train", [["fc"], ["hidden", "fc"], ["norm", "fc"], ["conv", "hidden"]])
def test_one_client_trains_as_a_plain_loop_does(train: list[str]) -> None:
    """LocalTrain from given weights is SGD on the parts that are trained, in evaluation mode."""
    fed = images(clients=1)
    net = pretrained(Trained(), train=train)
    whole = sartor.Local(batch=None, steps=3, lr=0.1)
    for engine in ("sequential", "vectorised"):
        result = sartor.fit("local", fed, model=net, rounds=2, local=whole, engine=engine)
        plain = pretrained(Trained(), train=train)
        rows = fed.train.rows
        trained = [p for p in plain.parameters() if p.requires_grad]
        sgd = torch.optim.SGD(trained, lr=0.1)
        for _ in range(6):
            sgd.zero_grad()
            nn.functional.cross_entropy(plain(fed.x[rows]), fed.y[rows]).backward()
            sgd.step()
        model = result.model("c0")
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, atol=2e-6, rtol=0, msg=name)
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        assert flags == {name: p.requires_grad for name, p in plain.named_parameters()}
        assert not model.training


def test_only_what_is_trained_travels_and_is_kept() -> None:
    """Bytes, the client's state and the files are those of the head alone."""
    net: Any = pretrained(Trained(), train=["fc"])
    result = sartor.fit("fedavg", images(), model=net, rounds=2, local=LOCAL)
    head = sum(p.numel() for p in net.fc.parameters())
    assert result.ledger.bytes_up.sum() == 2 * 4 * 4 * head  # rounds, clients, float32
    assert result.config["model"]["trained"] == head
    assert result.config["model"]["parameters"] == sum(p.numel() for p in net.parameters())


def test_a_seed_draws_anew_unless_the_network_is_pretrained() -> None:
    """Every seed starts from the given weights; without the word, from its own draw."""
    net = Net()
    drawn, kept = Task(net, "fc"), Task(pretrained(net), "fc")
    for seed in (0, 5):
        assert torch.equal(kept.init(seed)["body.weight"], net.body.weight)
        assert not torch.equal(drawn.init(seed)["body.weight"], net.body.weight)
    assert kept.given_weights()["start"] != Task(pretrained(Net()), "fc").given_weights()["start"]
    assert drawn.given_weights() == {}


def test_weights_that_would_be_lost_are_reported_of() -> None:
    """A trained network that is passed as it is warns; a fresh one does not."""
    fed, once = federation(), {"rounds": 1, "local": sartor.Local(epochs=1, lr=0.5)}
    fresh = Net()
    trained = sartor.fit("fedavg", fed, model=fresh, rounds=20, local=once["local"]).model("c0")
    with pytest.warns(UserWarning, match=r"weights that its layers did not draw.*pretrained"):
        sartor.fit("fedavg", fed, model=trained, **once)
    sartor.fit("fedavg", fed, model=pretrained(trained), **once)
    trained.pretrained = False  # type: ignore[assignment]
    sartor.fit("fedavg", fed, model=trained, **once)
    norm = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    assert unlike_a_draw(norm) is None
    nn.init.constant_(norm[1].bias, 0.1)
    assert unlike_a_draw(norm) == "LayerNorm at 1"
    for name, make in sartor.models.MODELS.items():
        shape = (7,) if "lstm" in name else (3, 32, 32)
        words = {"vocabulary": 9} if "lstm" in name else {}
        assert unlike_a_draw(make(input_shape=shape, num_classes=9, **words)) is None, name


def test_the_start_is_the_given_network() -> None:
    """With a step of 0 all clients end with the given network, and are scored with it."""
    net, fed = pretrained(Trained()), images()
    still = sartor.Local(batch=8, epochs=1, lr=0.0)
    result = sartor.fit("fedavg", fed, model=net, rounds=1, seeds=(0, 4), local=still)
    for name, value in net.state_dict().items():
        assert torch.equal(result.model("c2", run=1).state_dict()[name], value), name
    rows = fed.test.of(2)
    right = (net(fed.x[rows]).argmax(1) == fed.y[rows]).float().mean().item()
    assert result.scores[("pre", "test")].accuracy(1)[-1][2] == pytest.approx(right)


def test_half_precision_takes_the_constants_along() -> None:
    """Networks in bfloat16 have their constants in bfloat16; the parameters stay float32."""
    net = pretrained(Trained(), train=["hidden", "fc"])
    half = sartor.fit(
        "fedavg",
        images(),
        model=net,
        rounds=1,
        local=LOCAL,
        compute="bfloat16",
        engine="vectorised",
    )
    full = sartor.fit("fedavg", images(), model=net, rounds=1, local=LOCAL)
    a, b = (r.model("c0").state_dict() for r in (half, full))
    assert a["hidden.weight"].dtype == torch.float32
    assert 0 < (a["hidden.weight"] - b["hidden.weight"]).abs().max() < 0.02
    assert torch.equal(a["conv.weight"], net.conv.weight)


def test_a_stored_result_needs_the_network_with_the_same_constants(tmp_path) -> None:
    """Files have what was trained; the network must have the rest, with the same weights."""
    net, fed = pretrained(Trained(), train=["fc"]), images()
    out = tmp_path / "run"
    result = sartor.fit("ditto", fed, model=net, rounds=2, local=LOCAL, out=out)
    answer = result.predict("c1", fed.x[:5]).scores
    again = sartor.load(out, model=pretrained(Trained(), train=["fc"]))
    np.testing.assert_allclose(again.predict("c1", fed.x[:5]).scores, answer, atol=1e-6)
    saved = result.save(tmp_path / "saved")
    again = sartor.load(saved, model=net)
    np.testing.assert_allclose(again.predict("c1", fed.x[:5]).scores, answer, atol=1e-6)
    for other in (pretrained(Trained(seed=1), train=["fc"]), pretrained(Trained())):
        with pytest.raises(ModelError, match="not those that it was trained with"):
            sartor.load(out, model=other).predict("c1", fed.x[:5])
    with pytest.raises(ModelError, match="has frozen parts"):
        sartor.load(out).predict("c1", fed.x[:5])


def test_a_run_is_resumed_from_the_same_weights_only(tmp_path) -> None:
    """Other constants, or another start, are other settings."""
    fed = images()
    net = pretrained(Trained(), train=["fc"])
    sartor.fit("fedavg", fed, model=net, rounds=2, local=LOCAL, out=tmp_path / "run")
    again = {"rounds": 2, "local": LOCAL, "out": tmp_path / "run", "resume": True}
    sartor.fit("fedavg", fed, model=net, **again)
    for other in (pretrained(Trained(1), train=["fc"]), pretrained(Trained())):
        with pytest.raises(ConfigError, match=r"other settings: model\."):
            sartor.fit("fedavg", fed, model=other, **again)


def test_a_head_on_frozen_features_is_a_linear_model() -> None:
    """Training the head in the network is softmax regression on the features, for all clients."""
    net, fed = pretrained(Trained(), train=["fc"]), images()
    heads = sartor.models.features(net, fed)
    assert heads.input_shape == (6,)
    assert heads.names == fed.names
    linear = sartor.models.pretrained(sartor.models.mclr(heads))
    linear.fc.load_state_dict(net.fc.state_dict())
    found = [
        sartor.fit("fedprox", fed, model=net, rounds=3, local=LOCAL),
        sartor.fit("fedprox", heads, model=linear, rounds=3, local=LOCAL),
    ]
    for client in fed.names:
        one, other = (result.model(client).fc.weight for result in found)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_the_adviser_sees_through_a_frozen_body() -> None:
    """Advice for a network with a frozen body is that for its features; for others a trial."""
    net, fed = pretrained(Trained(), train=["fc"]), images(clients=5, samples=200)
    noise = torch.rand(len(fed.y), generator=torch.Generator().manual_seed(2)) < 0.3
    fed = replace(
        fed, y=torch.where(noise, 1 - fed.y.clamp(max=1), fed.y.clamp(max=1)), num_classes=2
    )
    heads = sartor.models.features(net, fed)
    ones = torch.ones(len(heads.x), 1)
    with_bias = replace(heads, x=torch.cat((heads.x, ones), 1))
    by: Any = {"ridge": 0.1, "basis": "theory"}
    through = sartor.advise(fed, model=net, **by)
    plain = sartor.advise(with_bias, features="raw", **by)
    assert through.basis == plain.basis == "theory"
    assert (through.strategy, through.prox_strength) == (plain.strategy, plain.prox_strength)
    assert through.errors == plain.errors
    assert "through the frozen Trained" in through.model
    scaled = sartor.advise(fed, model=net, features="scaled", **by)
    assert scaled.errors == sartor.advise(heads, **by).errors
    assert "for which λ holds" in scaled.model
    with pytest.raises(ConfigError, match="freeze all of the network but a linear head"):
        sartor.advise(fed, model=pretrained(Trained()), basis="theory")


def test_the_adviser_tries_the_network_of_which_a_linear_model_has_too_much() -> None:
    """Few samples are answered by the evidence; too many features of a body are tried as it is."""
    few = sartor.advise(images(), model=pretrained(Trained(), train=["fc"]))
    assert few.basis == "evidence"
    assert "through the frozen Trained" in few.model
    layers = (nn.Flatten(), nn.Linear(36, 1300), nn.Linear(1300, 3))
    wide: Any = pretrained(nn.Sequential(*layers), head="2")
    wide[1].requires_grad_(False)
    assert sartor.advise(images(), model=wide, rounds=1).basis == "trial"
    with pytest.raises(ConfigError, match="at most 1200"):
        sartor.advise(images(), model=wide, basis="theory")
    with pytest.raises(ConfigError, match="features must be"):
        sartor.advise(images(), model=wide, features="pcaa:3")


class Words(nn.Module):
    """Vectors of tokens, their mean, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(11, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(torch.tanh(self.vectors(x)).mean(1))
        return found


@pytest.mark.parametrize("method", ["moon", "fedpac", "fedavg"])
def test_tokens_do_not_say_in_which_numbers_to_compute(method: str) -> None:
    """A frozen body of tokens has the parameters' precision, in half precision too."""
    tokens = torch.randint(1, 11, (40, 6), generator=torch.Generator().manual_seed(0))
    who = [f"c{i % 2}" for i in range(40)]
    fed = sartor.Federation.from_arrays(tokens, tokens[:, 0] % 2, client=who, tokens=True)
    net: Any = pretrained(Words(), head="fc", train=["fc"])
    found = sartor.models.features(net, fed).x
    torch.testing.assert_close(found, torch.tanh(net.vectors(tokens)).mean(1).detach())
    exact = sartor.models.features(pretrained(Net().double()), federation()).x
    assert exact.dtype == torch.float64
    settings: Any = {"model": net, "rounds": 1, "local": LOCAL}
    full, half = (
        dict(sartor.fit(method, fed, compute=compute, **settings).model("c0").named_parameters())
        for compute in (None, "bfloat16")
    )
    assert 0 < (full["fc.weight"] - half["fc.weight"]).abs().max() < 0.02


def test_features_keep_the_unit_of_a_target() -> None:
    """A regression on features has errors and answers in the units of the labels."""
    draw = np.random.default_rng(0)
    table: dict[str, Any] = {f"x{k}": draw.normal(size=80) for k in range(3)}
    table["t"] = 1000 + 300 * table["x0"] + draw.normal(size=80)
    table["who"] = np.arange(80) % 2
    fed = sartor.Federation.from_dataframe(pd.DataFrame(table), client="who", label="t")
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    net = pretrained(body, head="2", train=["2"])
    heads = sartor.models.features(net, fed)
    line = nn.Sequential(nn.Linear(4, 1))
    line.load_state_dict({"0.weight": body[2].weight, "0.bias": body[2].bias})
    one = sartor.fit("fedavg", fed, model=net, rounds=5, local=LOCAL)
    other = sartor.fit("fedavg", heads, model=pretrained(line), rounds=5, local=LOCAL)
    np.testing.assert_allclose(
        other.scores[("pre", "test")].loss, one.scores[("pre", "test")].loss, rtol=1e-4
    )
    answers = other.predict(0, heads.x[:3].numpy()).labels
    assert 300 < float(np.mean(answers)) < 1700


@pytest.mark.parametrize("what", ["softmax", "beside"])
def test_features_of_what_does_not_end_with_its_head_are_refused(what: str) -> None:
    """A network that does more after its head says more than its features."""

    class More(Net):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return (
                found.log_softmax(-1) if what == "softmax" else found + found.mean(-1, keepdim=True)
            )

    with pytest.raises(ModelError, match="does not return the output of its head 'fc'"):
        sartor.models.features(pretrained(More()), federation())
    with pytest.raises(ModelError, match="evaluation mode"):
        sartor.models.features(Trained(), images())
    part = pretrained(Net(), train=["fc.bias"])
    assert not sartor.models.trains_head_alone(part)


class Named(nn.Module):
    """A network whose layers have the names of our words."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.pretrained(x)))
        return found


def test_layers_may_have_the_names_of_words() -> None:
    """A head that is called head, and a body that is called pretrained."""
    net = Named()
    given = pretrained(net, head="head")
    result = sartor.fit("fedper", federation(), model=given, rounds=1, local=LOCAL)
    assert result.config["model"]["head"] == "head"
    task = Task(given, "head")
    assert torch.equal(task.init(3)["head.weight"], net.head.weight)
    sartor.fit("fedavg", federation(), model=net, rounds=1, local=LOCAL)


def test_a_loaded_network_is_checked_as_a_trained_one(tmp_path) -> None:
    """The network itself, in training mode, would answer by chance: it is refused."""
    net, fed = Trained(), images()
    sartor.fit("fedavg", fed, model=pretrained(net), rounds=1, local=LOCAL, out=tmp_path / "run")
    with pytest.raises(ModelError, match=r"sartor\.models\.pretrained"):
        sartor.load(tmp_path / "run", model=net).predict("c0", fed.x[:3])
    again = sartor.load(tmp_path / "run", model=net.eval())
    assert len(again.predict("c0", fed.x[:3]).scores) == 3


@pytest.mark.parametrize("method", ["dbe", "fedproto", "fedgh", "fedrod"])
def test_who_makes_the_head_needs_all_of_it(method: str) -> None:
    """Half of a frozen head is reported by name."""
    for part in ("fc.weight", "fc.bias"):
        other = "fc.bias" if part == "fc.weight" else "fc.weight"
        net = pretrained(Net(), train=["body", other])
        with pytest.raises(ConfigError, match=f"{method} makes the head.*{part} is frozen"):
            sartor.fit(method, federation(), model=net, rounds=1)


def test_frozen_weights_are_held_a_few_times_only() -> None:
    """Threads, parts and seeds share them: the network's own, the task's, and no more."""
    net = pretrained(Trained(), train=["fc"])
    task = Task(net, "fc")
    params = {k: v.float() for k, v in task.init(0).items()}
    task.features(params, torch.zeros(2, 1, 6, 6))
    task.logits(params, torch.zeros(2, 1, 6, 6))
    places = {t.data_ptr() for t in task.fixed.values() if t.numel()}
    for part in ("whole", "body"):
        own = dict(task._own_module(part).named_parameters())
        assert own["conv.weight"].data_ptr() in places
    for settled in task._settled.values():
        assert settled["whole"]["conv.weight"].data_ptr() in places
    same = [task.settle(torch.device(name), torch.float32) for name in ("cpu", "cpu:0")]
    assert same[0] is same[1]


def test_a_file_of_a_mixture_holds_the_constants(tmp_path) -> None:
    """A model that is more than one set of parameters is exported with what is frozen."""
    net, fed = pretrained(Trained(), train=["fc"]), images()
    result = sartor.fit("fedem", fed, model=net, rounds=1, local=LOCAL)
    result.export("c0", tmp_path / "c0.pt")
    kept = torch.load(tmp_path / "c0.pt", weights_only=True)
    assert torch.equal(kept["fixed__conv__weight"], net.conv.weight)


def test_newcomers_share_the_constants() -> None:
    """A client that joins later gets a model with the same frozen parts."""
    net, fed = pretrained(Trained(), train=["hidden", "fc"]), images()
    result = sartor.fit("fedavg", fed, model=net, rounds=1, local=LOCAL)
    joined = result.onboard((fed.x[:20], fed.y[:20]), rounds=1)
    model = joined.model(0)
    assert torch.equal(model.conv.weight, net.conv.weight)
    assert torch.equal(model.norm.running_mean, net.norm.running_mean)


class Counting(nn.Module):
    """A layer that writes to its buffer."""

    seen: Tensor

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.anew = anew
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(x)
        if self.anew:
            self.seen = self.seen + found.detach().sum(0)
        else:
            self.seen += found.detach().sum(0)
        return found


@pytest.mark.parametrize("anew", [False, True])
def test_a_network_that_writes_to_its_buffers_is_refused(anew: bool) -> None:
    """Constants may be buffers, state may not."""
    net = Counting(anew)
    with pytest.raises(ModelError, match=r"writes to its buffers \(seen\)"):
        sartor.fit("fedavg", federation(), model=net, rounds=1)
    assert torch.equal(net.seen, torch.zeros(3))
    check_buffers(Frozen(), torch.zeros(2, 4))
    check_buffers(Counting(anew), torch.zeros(2, 9))  # it cannot take them, so it is not checked


def test_what_a_network_leaves_open_is_asked() -> None:
    """Frozen parts without a start for the others; nothing to train; unknown parts."""
    net = Net()
    net.body.requires_grad_(False)
    with pytest.raises(
        ModelError, match=r"frozen parameters \(body.weight, body.bias\).*True.*False"
    ):
        sartor.fit("fedavg", federation(), model=net, rounds=1)
    net.pretrained = False  # type: ignore[assignment]
    task = Task(net, "fc")
    assert task.leaf_names == ("fc.weight", "fc.bias")
    assert not torch.equal(task.init(0)["fc.weight"], net.fc.weight)
    assert torch.equal(task.fixed["body.weight"], net.body.weight)
    net.fc.requires_grad_(False)
    with pytest.raises(ModelError, match="Every parameter of the model is frozen"):
        check_module(net, "fc")
    with pytest.raises(ConfigError, match="Every parameter of the network is frozen"):
        Task(net, "fc")
    with pytest.raises(ModelError, match="no part 'fc1' to train; did you mean 'fc'"):
        pretrained(net, train=["fc1"])
    with pytest.raises(ModelError, match="train must be a list of parts"):
        pretrained(net, train="fc")
    check_module(Trained(), "fc")  # BatchNorm in training mode has statistics of its clients


def test_methods_with_a_body_and_a_head_say_which_is_frozen() -> None:
    """The error names the part, and what to do."""
    body, head = Net(), Net()
    body.pretrained = head.pretrained = True  # type: ignore[assignment]
    body.body.requires_grad_(False)
    head.fc.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"trains belong to the head 'fc'.*unfreeze a part"):
        sartor.fit("fedper", federation(), model=body, rounds=1)
    with pytest.raises(ConfigError, match="head 'fc' is frozen"):
        sartor.fit("fedper", federation(), model=head, rounds=1)


def test_fixed_word_vectors_never_travel() -> None:
    """An LSTM with given vectors that do not learn sends the rest, drawn anew for every seed."""
    vectors = torch.randn(11, 4)
    sizes = {"vocabulary": 11, "embedding": 4, "hidden": 3, "layers": 1, "classifier": 5}
    net = lstm(input_shape=(6,), num_classes=2, vectors=vectors, trainable_embedding=False, **sizes)
    tokens = torch.randint(1, 11, (24, 6), generator=torch.Generator().manual_seed(0))
    fed = sartor.Federation.from_arrays(
        tokens, tokens[:, 0] % 2, client=[f"c{i % 3}" for i in range(24)], tokens=True
    )
    result = sartor.fit("fedavg", fed, model=net, rounds=1, local=LOCAL)
    rest = sum(p.numel() for name, p in net.named_parameters() if "embedding" not in name)
    assert result.ledger.bytes_up.sum() == 3 * 4 * rest
    assert torch.equal(result.model("c0").embedding.weight, vectors)
    again = [
        lstm(input_shape=(6,), num_classes=2, trainable_embedding=False, **sizes) for _ in "ab"
    ]
    assert torch.equal(again[0].embedding.weight, again[1].embedding.weight)  # no seed draws them


@pytest.mark.gpu
@pytest.mark.parametrize("train", [["fc"], ["hidden", "fc"], ["conv", "fc"]])
def test_constants_are_where_the_device_is(train: list[str]) -> None:
    """A GPU gives the numbers of the CPU, with graphs and kernels for lanes."""
    net, fed = pretrained(Trained(), train=train), images()
    found = [
        sartor.fit("fedprox", fed, model=net, rounds=6, local=LOCAL, device=device).model("c1")
        for device in ("cpu", "cuda")
    ]
    for name, value in found[0].state_dict().items():
        torch.testing.assert_close(found[1].state_dict()[name], value, atol=1e-4, rtol=0, msg=name)
