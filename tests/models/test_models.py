"""Laws of the networks: their sizes, their heads, and what cannot be trained over lanes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sartor
from sartor.core.errors import ModelError
from sartor.data import Federation, from_dataset
from sartor.models import (
    MODELS,
    check_module,
    cifarnet,
    cnn2,
    cnn3,
    cnn5,
    default,
    dnn,
    lenet5,
    mclr,
    resnet8,
)

FOR_IMAGES = sorted(set(MODELS) - {"language_lstm", "lstm"})


def size(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("shape", "classes", "whole", "head"),
    [
        ((1, 28, 28), 10, 44_426, 850),
        ((3, 32, 32), 10, 62_006, 850),
        ((3, 32, 32), 100, 69_656, 8_500),
    ],
)
def test_lenet5_has_the_published_number_of_parameters(shape, classes, whole, head):
    """The counts of the FedAPA table: whole network and private head."""
    net = lenet5(input_shape=shape, num_classes=classes)
    assert size(net) == whole
    assert size(net.get_submodule(net.head)) == head


@pytest.mark.parametrize("side", [4, 8, 15, 16, 28, 32, 33])
def test_lenet5_takes_every_image_of_four_pixels_or_more(side):
    """Small images are padded; the output has one score per class."""
    net = lenet5(input_shape=(2, side, side), num_classes=7)
    assert net(torch.zeros(3, 2, side, side)).shape == (3, 7)


@pytest.mark.parametrize("shape", [(64,), (8, 8), (1, 3, 8)])
def test_lenet5_refuses_what_is_no_image(shape):
    """Flat samples and tiny images get an error that names another model."""
    with pytest.raises(ModelError, match=r"use mclr"):
        lenet5(input_shape=shape, num_classes=2)


@pytest.mark.parametrize("side", [1, 8, 28, 33])
def test_resnet8_normalises_by_groups_alone(side):
    """Eight layers with weights on the longest path, nine GroupNorms, and images of any size."""
    net = resnet8(input_shape=(3, side, side), num_classes=10)
    norms = [m for m in net.modules() if isinstance(m, nn.GroupNorm)]
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert len(norms) == len(convs) == 9
    assert sum(m.kernel_size == (3, 3) for m in convs) + 1 == 8
    assert size(net) == 78_042
    assert net(torch.randn(2, 3, side, side)).shape == (2, 10)


def test_resnet8_scores_a_sample_by_itself_alone():
    """What else is in the batch does not matter, as it would with BatchNorm."""
    net, x = resnet8(input_shape=(1, 8, 8), num_classes=4), torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))
    with pytest.raises(ModelError, match=r"resnet8 needs images.*\(64,\).*mclr"):
        resnet8(input_shape=(64,), num_classes=4)


@pytest.mark.parametrize("name", FOR_IMAGES)
def test_every_model_fits_a_federation_and_passes_the_check(name):
    """Sizes come from the federation; the head is re-initialisable; no buffers."""
    fed = from_dataset("digits", partition="iid", clients=3)
    net = MODELS[name](fed)
    assert net(fed.x[:5]).shape == (5, 10)
    check_module(net, net.head)
    assert callable(net.get_submodule(net.head).reset_parameters)
    assert not list(net.buffers())


@pytest.mark.parametrize("name", FOR_IMAGES)
def test_every_model_maps_over_clients(name):
    """Vmap over stacked parameters equals the networks one by one, gradients too."""
    nets = [MODELS[name](input_shape=(1, 8, 8), num_classes=4).double() for _ in range(3)]
    params = {
        k: torch.stack([dict(n.named_parameters())[k].detach() for n in nets])
        for k, _ in nets[0].named_parameters()
    }
    x, y = torch.randn(3, 5, 1, 8, 8).double(), torch.randint(0, 4, (3, 5))

    def loss(p, xs, ys):
        scores = torch.func.functional_call(nets[0], p, (xs,))
        return nn.functional.cross_entropy(scores, ys)

    grads = torch.func.vmap(torch.func.grad(loss))(params, x, y)
    for i, net in enumerate(nets):
        net.zero_grad()
        nn.functional.cross_entropy(net(x[i]), y[i]).backward()
        for k, p in net.named_parameters():
            assert torch.allclose(grads[k][i], p.grad, atol=1e-10)


@pytest.mark.parametrize(
    ("network", "convolutions", "shape", "whole"),
    [
        # 5x5 and 3x3 kernels by hand: (25 c + 1) o, (9 c + 1) o, then the two linear layers
        (cnn2, 2, (1, 28, 28), 832 + 51_264 + (64 * 4 * 4 + 1) * 128 + 1290),
        (cnn2, 2, (3, 32, 32), 2432 + 51_264 + (64 * 5 * 5 + 1) * 128 + 1290),
        (cnn3, 3, (3, 32, 32), 896 + 18_496 + 36_928 + (64 * 4 * 4 + 1) * 128 + 1290),
        (cnn3, 3, (1, 28, 28), 320 + 18_496 + 36_928 + (64 * 3 * 3 + 1) * 128 + 1290),
        (cnn5, 5, (1, 28, 28), 320 + 9248 + 18_496 + 36_928 + 73_856 + 147_584 + 1290),
        (cnn5, 5, (3, 32, 32), 896 + 9248 + 18_496 + 36_928 + 73_856 + 262_272 + 1290),
    ],
)
def test_convolutional_networks_have_their_layers_and_sizes(network, convolutions, shape, whole):
    """As many convolutions as the name says, the widths of the table, and scores for both sizes."""
    net = network(input_shape=shape, num_classes=10)
    assert sum(isinstance(m, nn.Conv2d) for m in net.modules()) == convolutions
    assert size(net) == whole
    x = torch.randn(2, *shape)
    torch.testing.assert_close(net(x), net.fc(net.fc1(_before(net, x)).relu()))
    assert net(x).shape == (2, 10)
    with pytest.raises(ModelError, match=r"at least \dx\d pixels, got 3x9; use mclr"):
        network(input_shape=(1, 3, 9), num_classes=2)


def _before(net, x):
    """Return what the first linear layer receives."""
    seen = []
    hook = net.fc1.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    net(x)
    hook.remove()
    return seen[0]


def test_cnn5_pools_after_the_second_fourth_and_fifth_convolution():
    """The feature maps are 28, 28, 14, 14 and 7 pixels wide, and 3 in the end."""
    net = cnn5(input_shape=(1, 28, 28), num_classes=10)
    seen = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda m, x, out: seen.append(out.shape[-1]))
    assert _before(net, torch.zeros(1, 1, 28, 28)).shape == (1, 128 * 3 * 3)
    assert seen == [28, 28, 14, 14, 7]


def test_the_stacks_are_convolution_pooling_and_relu_in_this_order():
    """CNN3 and CNN5 give the scores of their layers written down one after the other."""
    plans = {cnn3: "cprcprcpr", cnn5: "crcprcrcprcpr"}
    for network, plan in plans.items():
        net = network(input_shape=(1, 8, 8), num_classes=4)
        found = iter([m for m in net.modules() if isinstance(m, nn.Conv2d)])
        plain = {"p": nn.MaxPool2d(2), "r": nn.ReLU()}
        layers = [plain[message] if message in plain else next(found) for message in plan]
        body = nn.Sequential(*layers, nn.Flatten())
        x = torch.randn(3, 1, 8, 8)
        torch.testing.assert_close(net(x), net.fc(net.fc1(body(x)).relu()))


def test_cifarnet_is_lenet5():
    """Conv 5x5x6, pool, conv 5x5x16, pool, 120, 84, C: the same network under another name."""
    assert cifarnet is lenet5
    net = cifarnet(input_shape=(3, 32, 32), num_classes=10)
    shapes = [tuple(p.shape) for k, p in net.named_parameters() if k.endswith("weight")]
    assert shapes == [(6, 3, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]


def test_dnn_has_one_hidden_layer_with_leaky_slope_a_tenth():
    """784-100-10 has 79,510 parameters, and a negative activation passes at a tenth."""
    assert size(dnn(input_shape=(784,), num_classes=10)) == 79_510
    net = dnn(input_shape=(1,), num_classes=1, hidden=1)
    for p in net.parameters():
        p.data.fill_(0.0)
    net.fc1.weight.data.fill_(1.0)
    net.fc.weight.data.fill_(1.0)
    assert net(torch.tensor([[-2.0]])).item() == pytest.approx(-0.2)
    assert size(mclr(input_shape=(28, 28), num_classes=10)) == 7850


def test_regression_has_one_output_and_sizes_are_needed():
    """A federation with real targets gives one output; without sizes there is no model."""
    fed = Federation.from_arrays([[0.0, 1.0]], [0.5], client=[0], num_classes=0)
    assert mclr(fed)(fed.x).shape == (1, 1)
    with pytest.raises(ModelError, match="Give a federation"):
        mclr(num_classes=3)
    with pytest.raises(ModelError, match="hidden must be"):
        dnn(fed, hidden=0)
    assert mclr(fed, num_classes=5)(fed.x).shape == (1, 5)


@pytest.mark.parametrize(
    ("shape", "name"), [((1, 28, 28), "LeNet5"), ((1, 8, 8), "DNN"), ((5,), "DNN")]
)
def test_the_default_model_fits_the_data(shape, name):
    """Images of 16 pixels or more get LeNet-5, everything else one hidden layer."""
    fed = Federation.from_arrays(torch.zeros(2, *shape), [0, 1], client=[0, 1])
    assert type(default(fed)).__name__ == name


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class OwnGRU(nn.GRU):
    """A layer with a forward pass of its own."""

    def forward(self, x):  # type: ignore[override]
        return super().forward(x)[0]


class OwnNorm(nn.BatchNorm1d):
    """BatchNorm whose forward pass is its own."""

    def forward(self, x):
        return super().forward(x) * 2


def body(*layers):
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), *layers), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("module", "head", "message"),
    [
        (body(OwnNorm(4)), "1", r"OwnNorm at '0\.1'.*its forward pass is its own.*GroupNorm"),
        (body(nn.BatchNorm1d(4, track_running_stats=False)), "1", "track_running_stats=True"),
        (body(nn.InstanceNorm1d(4, track_running_stats=True)), "1", r"at '0\.1'.*GroupNorm"),
        (body(nn.LSTM(4, 4, proj_size=2)), "1", r"LSTM at '0\.1'.*nn\.Linear after it"),
        (body(OwnGRU(4, 4)), "1", r"OwnGRU at '0\.1'.*nn\.GRU or nn\.RNN itself"),
        (Tied(), "b", "'a.weight' and 'b.weight' are the same tensor, but only one"),
        (nn.ReLU(), None, "no parameters"),
        (nn.LazyLinear(3), None, "lazy layer"),
        (lenet5(input_shape=(1, 8, 8), num_classes=2), "fc_1", "did you mean 'fc1'"),
        (body(nn.ReLU()), "0.1", "has no parameters"),
        (nn.Linear(2, 2), "fc", "no submodules"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_mapped_over_clients_is_refused_by_layer(module, head, message):
    """The error names the layer and the way out."""
    with pytest.raises(ModelError, match=message):
        check_module(module, head)


def test_all_faults_of_a_model_are_listed_and_harmless_layers_pass():
    """Two bad layers give two faults; dropout, BatchNorm and norms of single samples are fine."""
    with pytest.raises(ModelError, match="2 faults") as caught:
        check_module(body(OwnNorm(4), nn.BatchNorm1d(4, track_running_stats=False)), "1")
    assert "OwnNorm at '0.1'" in str(caught.value)
    assert "BatchNorm1d at '0.2'" in str(caught.value)
    check_module(body(nn.GroupNorm(2, 4), nn.Dropout(0.5), nn.RReLU(), nn.InstanceNorm1d(4)), "1")
    check_module(body(nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval(), OwnNorm(4).eval()), "1")
    check_module(body(nn.LSTM(4, 4, 2, dropout=0.1)), "1")
    check_module(nn.MultiheadAttention(4, 2, dropout=0.1), None)
    check_module(body(nn.ReLU()), None)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_tied_weights_are_one_leaf(engine, frozen):
    """They train and travel as one tensor, whose gradient is the sum of both; or not at all."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 3, generator=draw), torch.randint(0, 3, (30,), generator=draw)
    fed = Federation.from_arrays(x, y, client=["one"] * 30)
    net = Tied()
    net.a.weight.requires_grad_(not frozen)
    start = sartor.models.pretrained(net)
    local = sartor.Local(batch=None, steps=4, lr=0.3)
    result = sartor.fit("fedavg", fed, model=start, rounds=1, local=local, engine=engine)
    rows, sgd = (
        fed.train.rows,
        torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.3),
    )
    for _ in range(4):
        sgd.zero_grad()
        nn.functional.cross_entropy(net(fed.x[rows]), fed.y[rows]).backward()
        sgd.step()
    found = result.model("one")
    assert found.a.weight is found.b.weight
    for name, value in net.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, atol=1e-6, rtol=0)
    assert result.ledger.bytes_up.sum() == 4 * (6 if frozen else 15)
