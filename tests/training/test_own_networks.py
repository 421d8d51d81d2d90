"""A network of one's own: the laws hold, what cannot be mapped trains anyway, and errors help."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sartor
from sartor.core.errors import ConfigError, ModelError
from sartor.core.task import Task
from sartor.engines import make_engine
from sartor.engines.arena import build_arena
from sartor.engines.sequential import Sequential
from sartor.models import examine
from tests.laws import LAWS, Case, check_method
from tests.toys import CPU, Net, Noisy, federation

LOCAL = sartor.Local(batch=4, lr=0.1)

# ---- the laws


@dataclass(frozen=True)
class OwnCase(Case):
    """A method on a network with dropout and BatchNorm, or with BatchNorm alone."""

    drop: float = 0.3

    def task(self) -> Task:
        """Return the network."""
        return Task(Noisy(drop=self.drop), head="fc")


# A draw is keyed by the client's number: who changes places, or is equal, draws something else.
_ALIKE = ("permuting_clients_permutes_the_result", "equal_clients_stay_equal")
_SLOW = pytest.mark.slow


@pytest.mark.parametrize("law", [law for law in LAWS if law not in _ALIKE])
@pytest.mark.parametrize(
    "case",
    [
        OwnCase("fedavg"),
        OwnCase("fedbn"),
        pytest.param(OwnCase("ditto"), marks=_SLOW),
        pytest.param(OwnCase("fedem"), marks=_SLOW),
        pytest.param(OwnCase("fedpac"), marks=_SLOW),
        pytest.param(OwnCase("fedala"), marks=_SLOW),
    ],
    ids=str,
)
def test_the_laws_hold_for_dropout_and_batch_norm(law: str, case: Case, tmp_path: Path) -> None:
    """Engines, sweeps, padding, traces, stores, resuming, bytes, gradients, purity."""
    check_method(case, tmp_path, (law,))


@_SLOW
@pytest.mark.parametrize(
    "law", ["engines_agree", "gradients_are_counted", "inputs_are_not_changed"]
)
def test_a_choice_among_methods_is_the_same_everywhere(law: str, tmp_path: Path) -> None:
    """Do no harm scores held-out samples in a phase of its own, and uses one of three models."""
    check_method(OwnCase("fedavg", {"do_no_harm": True}), tmp_path, (law,))


@pytest.mark.parametrize("law", _ALIKE)
def test_batch_norm_does_not_tell_clients_apart(law: str, tmp_path: Path) -> None:
    """Without dropout nothing depends on the number of a client."""
    check_method(OwnCase("fedavg", drop=0.0), tmp_path, (law,))


# ---- what cannot be mapped over clients


class Branching(Net):
    """A network that looks at its values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = -x
        return super().forward(x)


class Square(torch.autograd.Function):
    """A gradient of one's own, in the old form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * g


class Squared(Net):
    """A network with such a function in it; or with the same in plain operations."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        inside = self.body(x)
        found: Tensor = self.fc(Square.apply(inside) if self.own else inside * inside)
        return found


@pytest.mark.parametrize(
    ("network", "same", "why"),
    [
        (Branching(), Net(), r"branches on values, or calls \.item\(\)"),
        (Squared(True), Squared(False), "autograd.Function without setup_context"),
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_what_cannot_be_mapped_trains_one_by_one(
    network: nn.Module, same: nn.Module, why: str, method: str
) -> None:
    """The same numbers as of a network that can be mapped; a note says why, and what it costs."""
    settings: dict[str, Any] = {"rounds": 2, "local": LOCAL, "dtype": "float64"}
    with pytest.warns(UserWarning, match=f"(?s){why}.*Measured here: .* ms a step") as said:
        found = sartor.fit(method, federation(), model=network, **settings)
    assert "local steps of a round of all 5 clients" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = sartor.fit(method, federation(), model=same, **settings)
    np.testing.assert_allclose(
        found.scores["pre", "test"].loss, wanted.scores["pre", "test"].loss, atol=1e-10
    )
    assert found.config["model"]["unmapped"]
    assert "unmapped" not in wanted.config["model"]


def test_an_engine_that_is_asked_for_by_name_is_not_replaced() -> None:
    """Vectorised is refused with the reason, sequential is taken without a note."""
    with pytest.raises(ModelError, match=r"branches on values.*leave engine= out"):
        sartor.fit("fedavg", federation(), model=Branching(), rounds=1, engine="vectorised")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sartor.fit("fedavg", federation(), model=Branching(), rounds=1, engine="sequential")
    arena = build_arena([federation()], CPU, torch.float64)
    assert isinstance(make_engine("auto", arena, None, Task(Branching(), unmapped="x")), Sequential)


def test_the_note_counts_the_steps_of_a_round() -> None:
    """Two passes of ⌈n/4⌉ batches over clients of 2, 7, 4, 9 and 5 samples: 2 · 9 steps."""
    local = sartor.Local(epochs=2, batch=4)
    with pytest.warns(UserWarning, match="the 18 local steps"):
        sartor.fit("fedavg", federation(), model=Branching(), rounds=1, local=local)


def test_draws_of_a_networks_own_are_refused() -> None:
    """They could be neither repeated nor resumed; the generator of the process stays as it was."""

    class Drawing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn_like(x))

    net, before = Drawing(), torch.get_rng_state()
    with pytest.raises(ModelError, match=r"Drawing draws random numbers by itself.*F\.dropout"):
        sartor.fit("fedavg", federation(), model=net, rounds=1)
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_as_a_function_is_noticed() -> None:
    """It is no layer that could be asked; one that is off, or has p = 0, is none."""

    class Functional(Net):
        p = 0.5

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.fc(F.dropout(torch.tanh(self.body(x)), self.p, self.training))
            return found

    def draws(network: nn.Module) -> bool:
        fed = federation()
        return examine(network, fed.x[:2].float(), fed.y[:2], "classification", 3)

    assert draws(Functional())
    assert not draws(Functional().eval())
    assert not draws(Net())
    off = Functional()
    off.p = 0.0
    assert not draws(off)
    assert draws(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1))
    assert not draws(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0))
    results = [
        sartor.fit("fedavg", federation(), model=net, rounds=2, local=LOCAL, engine=engine)
        for net, engine in (
            (Functional(), "sequential"),
            (Functional(), "vectorised"),
            (Net(), "auto"),
        )
    ]
    losses = [one.scores["pre", "test"].loss for one in results]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert np.abs(losses[0] - losses[2]).max() > 1e-3


class Ward(nn.Module):
    """A recurrent network with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, 2, dropout=0.5, batch_first=True)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.lstm(x)[0][:, -1])
        return found


class Encoder(nn.Module):
    """A transformer as torch makes it, with dropout in attention and around it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.layers(x.repeat(1, 1, 2)).mean(1))
        return found


@pytest.mark.parametrize("network", [Ward(), Encoder()])
def test_sequences_with_dropout_are_the_same_on_both_engines(network: nn.Module) -> None:
    """Recurrent layers and attention draw by key too; it is off in what is scored."""
    fed = federation(shape=(6, 2))
    settings: dict[str, Any] = {"rounds": 2, "local": LOCAL, "dtype": "float64"}
    found = [
        sartor.fit("fedavg", fed, model=network, engine=engine, **settings)
        for engine in ("sequential", "vectorised")
    ]
    losses = [one.scores["pre", "test"].loss for one in found]
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-10)
    still = sartor.fit("fedavg", fed, model=copy.deepcopy(network).eval(), **settings)
    assert np.abs(losses[0] - still.scores["pre", "test"].loss).max() > 1e-4
    model = found[0].model("c1")
    x = fed.x[fed.test.of(1)].double()
    with torch.no_grad():
        loss = F.cross_entropy(model(x), fed.y[fed.test.of(1)], reduction="sum")
    np.testing.assert_allclose(losses[0][0, -1, 1], loss, rtol=1e-9)


def test_newcomers_of_a_loaded_result_draw_as_well(tmp_path: Path) -> None:
    """Also by dropout as a function, which a loaded network is not asked for again."""
    net = Noisy(norm=False)
    net.drop = nn.Identity()  # type: ignore[assignment]
    first = sartor.fit(
        "fedavg", federation(), model=net, rounds=1, local=LOCAL, out=tmp_path / "run"
    )
    again = sartor.load(tmp_path / "run", model=first.model("c0"))
    x, y = federation(3).x[:30].numpy(), federation(3).y[:30].numpy()
    found = [one.onboard((x, y), rounds=2).model("newcomer") for one in (first, again)]
    for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The network has BatchNorm")
def test_auto_takes_any_network() -> None:
    """Its trials score models with their statistics, as everything else does."""
    fed = federation(sizes=(30, 30, 30), val=0)
    result = sartor.fit("auto", fed, model=Noisy(), rounds=2)
    assert 0.0 <= result.accuracy <= 1.0


def test_a_model_is_ready_to_use() -> None:
    """It is in evaluation mode: the same answer every time, and that of ``predict``."""
    with pytest.warns(UserWarning, match="BatchNorm"):
        result = sartor.fit("fedavg", federation(), model=Noisy(), rounds=2, local=LOCAL)
    x = federation().x[:9].float()
    model = result.model("c1")
    assert not any(part.training for part in model.modules())
    assert torch.equal(model(x), model(x))
    chances = torch.softmax(model(x), -1).detach().numpy()
    np.testing.assert_allclose(result.predict("c1", x).scores, chances, atol=1e-6)


# ---- errors that say what to write


class Estimator:
    """What scikit-learn's look like."""

    def fit(self, x: Any, y: Any) -> None:
        """Fit."""

    def get_params(self) -> dict[str, Any]:
        """Return no parameters."""
        return {}


class Pair(Net):
    """A network with two answers."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def _deep(inputs: int = 4, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, outputs))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Net, r"model is the class Net, not a network; make one: model=Net\(\.\.\.\)"),
        ("lenet5", r"write model=sartor\.models\.lenet5\(federation\)"),
        ("lenet", "unknown; did you mean 'lenet5'"),
        (sartor.models.dnn, r"call it: model=sartor\.models\.dnn\(federation\)"),
        (Estimator(), r"model is Estimator, an estimator of scikit-learn.*sartor\.models\.mclr"),
        (lambda x: x, r"model is a function.*should be a torch\.nn\.Module"),
        (_deep(784), r"of shape \(4,\): Linear at '0' takes 784 features, but gets 4"),
        (nn.Linear(7, 3), r"Linear takes 7 features, but gets 4"),
        (nn.Sequential(nn.Linear(4, 5), nn.Linear(6, 3)), "at '1' takes 6 features, but gets 5"),
        (_deep(outputs=2), r"returns \(2,\) for a sample, but 3 classes need \(3,\).*at '2'"),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)), "first axis should be the samples"),
        (Pair(), "returns a tuple, but should return one tensor of scores"),
        (nn.Conv2d(3, 3, 2), "cannot take the samples of this federation"),
    ],
)
def test_a_network_that_cannot_be_right_is_refused_with_a_way_out(model: Any, words: str) -> None:
    """Both shapes and the layer are named, or what to write instead."""
    with pytest.raises((ConfigError, ModelError), match=words) as caught:
        sartor.fit("fedavg", federation(), model=model, rounds=1)
    assert "\n" not in str(caught.value)


def test_a_network_for_other_images_is_refused_by_its_layer() -> None:
    """A convolution names channels, the layer after it the features that arrive."""
    fed = sartor.Federation.from_dataset("digits", clients=3)
    colour = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(
        ModelError, match=r"\(1, 8, 8\): Conv2d at '0' takes 3 channels, but gets 1"
    ):
        sartor.fit("fedavg", fed, model=colour, rounds=1)
    large = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(2704, 10))
    with pytest.raises(ModelError, match="Linear at '2' takes 2704 features, but gets 144"):
        sartor.fit("fedavg", fed, model=large, rounds=1)
    with pytest.raises(ModelError, match="10 classes need"):
        sartor.fit("fedavg", fed, model=sartor.models.mclr(input_shape=(1, 8, 8), num_classes=9))


def test_answers_must_fit_the_task() -> None:
    """One score for two classes, targets, labels: the error says how many are needed."""
    x = torch.randn(40, 4)
    names = [f"c{i % 2}" for i in range(40)]
    two = sartor.Federation.from_arrays(x, [0, 1] * 20, client=names)
    with pytest.raises(ModelError, match="two classes need two scores"):
        sartor.fit("fedavg", two, model=nn.Linear(4, 1), rounds=1)
    real = sartor.Federation.from_arrays(x, x[:, 0], client=names, task="regression")
    with pytest.raises(ModelError, match=r"returns \(2,\) for a sample, but 1 target a sample"):
        sartor.fit("fedavg", real, model=nn.Linear(4, 2), rounds=1)
    many = sartor.Federation.from_arrays(x, (x[:, :3] > 0).long(), client=names, task="multilabel")
    with pytest.raises(ModelError, match=r"3 labels need \(3,\)"):
        sartor.fit("fedavg", many, model=nn.Linear(4, 2), rounds=1)
    sartor.fit("fedavg", two, model=nn.Linear(4, 5), rounds=1)  # more scores than classes are fine


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 0.1}, r"write fit\(\.\.\., local=sartor\.Local\(lr=0\.1\)\)"),
        ({"learning_rate": 0.1}, r"local=sartor\.Local\(lr=0\.1\)"),
        ({"epochs": 3}, r"epochs is a setting of local training; .*Local\(epochs=3\)"),
        ({"batch_size": 8}, r"local=sartor\.Local\(batch=8\)"),
        ({"num_rounds": 8}, r"it is called rounds: fit\(\.\.\., rounds=8\)"),
        ({"prox_strength": 0.1}, "hyper-parameter of fedprox, .*, but not of fedavg"),
        ({"method": "fedprox", "prox_strength": 0.1}, r"hyper=\{'prox_strength': 0\.1\}\)"),
        ({"method": "fedprox", "prox_strength": [1, 2]}, r"sweep=\{'prox_strength': \[1, 2\]\}\)"),
        ({"rule": "uniform"}, r"rule is an option of fedavg; .*options=\{'rule': 'uniform'\}"),
        ({"clients": 5}, r"belongs to the data.*Federation\.from_dataset\(\.\.\., clients=5\)"),
        ({"rouns": 5}, "no argument 'rouns'; did you mean 'rounds'"),
        ({"zzz": 5}, "no argument 'zzz'; known: "),
        ({"hyper": {"lr": 0.1}}, r"called local_lr among hyper-parameters; write hyper="),
        ({"sweep": {"lr": [0.1]}}, r"write sweep=\{'local_lr': \[0\.1\]\}"),
        ({"hyper": {"epochs": 3}}, r"not a hyper-parameter; write local=sartor\.Local\(epochs=3\)"),
        ({"hyper": {"rule": "uniform"}}, r"write options=\{'rule': 'uniform'\}"),
        ({"options": {"relax": 1.5}}, r"relax is a hyper-parameter, not an option; write hyper="),
        ({"options": {"batch": 5}}, r"not an option; write local=sartor\.Local\(batch=5\)"),
        ({"method": federation()}, r"first argument is a Federation.*sartor\.fit\('fedavg', fed"),
        ({"method": Net()}, "first argument is a Net, but should be the name of a method"),
        ({"method": Estimator()}, "first argument is a Estimator"),
        ({"method": 3}, "should be the name of a method, such as 'fedavg', got 3"),
    ],
)
def test_a_setting_in_the_wrong_place_is_given_its_place(
    settings: dict[str, Any], words: str
) -> None:
    """The error is what to write."""
    given = {"method": "fedavg", "federation": federation(), "model": Net(), **settings}
    with pytest.raises(ConfigError, match=words):
        sartor.fit(**given)


def test_compare_has_places_of_its_own() -> None:
    """There, hyper-parameters go by method, and nothing is trained before the error."""
    with pytest.raises(ConfigError) as caught:
        sartor.compare(["fedprox"], federation(), prox_strength=0.1, lr=0.2)
    said = str(caught.value)
    assert "compare(..., hyper={'fedprox': {'prox_strength': 0.1}})" in said
    assert "compare(..., local=sartor.Local(lr=0.2))" in said
