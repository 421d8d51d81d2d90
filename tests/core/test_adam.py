"""Adam and AdamW as local optimisers, step by step against torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sartor
from sartor import Local
from sartor.core.errors import ConfigError
from sartor.methods import METHODS, build
from tests.toys import Net, federation, net_task, run, simulation, states

KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
REFUSE = {"l2gd", "per-fedavg", "pfedme", "pfedbred", "scaffold", "apple", "evidence"}


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "reset"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_torch(kind, decay, kept, engine):
    """Three full-gradient steps a round, looked at after every round; also with one step each."""
    fed = federation()
    for steps, rounds in ((1, 9), (3, 4)):
        local = Local(
            steps=steps,
            batch=None,
            lr=0.03,
            optimizer=kind,
            betas=(0.8, 0.95),
            eps=1e-6,
            weight_decay=decay,
            keep_optimiser=kept,
        )
        task = net_task()
        sim = simulation(
            build("local", task, local, {}),
            task,
            [fed],
            rounds=rounds,
            participation=1.0,
            engine=engine,
        )
        nets = [Net().double() for _ in range(fed.num_clients)]
        start = task.init(0)
        for net in nets:
            net.load_state_dict({k: v.double() for k, v in start.items()})
        made = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": decay}
        opts = [KINDS[kind](net.parameters(), **made) for net in nets]
        for _ in range(rounds):
            sim.step()
            for i, net in enumerate(nets):
                if not kept:
                    opts[i] = KINDS[kind](net.parameters(), **made)
                x, y = fed.x[fed.train.of(i)], fed.y[fed.train.of(i)]
                for _ in range(steps):
                    opts[i].zero_grad()
                    F.cross_entropy(net(x), y).backward()
                    opts[i].step()
                ours = sim.params(i)
                for name, wanted in net.named_parameters():
                    np.testing.assert_allclose(
                        ours[name].numpy(), wanted.detach().numpy(), rtol=0, atol=1e-12
                    )


def test_float32_is_as_near_as_torch_itself():
    """The corrections by 1 − β^k are formed without cancellation."""
    fed, task = federation(), net_task()
    local = Local(steps=2, batch=None, lr=0.03, optimizer="adam")
    sims = [
        run(
            simulation(
                build("local", task, local, {}),
                task,
                [fed],
                rounds=1,
                participation=1.0,
                dtype=dtype,
            )
        )
        for dtype in (torch.float32, torch.float64)
    ]
    for i in range(fed.num_clients):
        one, two = (sim.params(i) for sim in sims)
        for name in one:
            np.testing.assert_allclose(one[name].numpy(), two[name].numpy(), atol=1e-6)


def test_every_method_trains_with_adam_or_says_why_not():
    """A method that does not refuse moves differently than with SGD of the same rate."""
    fed = federation()
    common = {"rounds": 2, "model": Net(), "dtype": "float64", "device": "cpu"}
    refused = set()
    for name in METHODS:
        adam, sgd = (Local(epochs=1, batch=4, lr=0.05, optimizer=k) for k in ("adam", "sgd"))
        try:
            ours = sartor.fit(name, fed, local=adam, **common)
        except ConfigError as error:
            refused.add(name)
            says = "optimizer='adam'" in str(error) or name == "fedbn"
            if not says:
                raise
            continue
        theirs = sartor.fit(name, fed, local=sgd, **common)
        assert not np.array_equal(ours.loss_curve()[1], theirs.loss_curve()[1]), name
    assert refused - {"fedbn"} == REFUSE


def test_what_adam_remembers_is_kept_on_the_client_and_never_sent(tmp_path):
    """It is the client's own state, also in files, and messages have the same size as with SGD."""
    fed, task = federation(), net_task()
    bytes_of = {}
    for kind, kept in (("sgd", False), ("adam", False), ("adam", True)):
        local = Local(epochs=1, batch=4, lr=0.01, optimizer=kind, keep_optimiser=kept)
        record = build("fedavg", task, local, {})
        sim = run(simulation(record, task, [fed], rounds=3, folder=tmp_path))
        bytes_of[kind, kept] = sim.ledger().bytes_up.tolist()
        named = [k for k in states(sim) if k.startswith("client/")]
        assert bool([k for k in named if "square" in k]) == kept
        if kept:
            taken = states(sim)["client/taken"]
            assert taken.shape == (1, fed.num_clients)
            assert taken.max() >= 3
    assert len({str(v) for v in bytes_of.values()}) == 1


def test_a_sweep_of_rates_is_the_single_runs():
    """Lanes with their own rates and decays train as alone."""
    fed = federation()
    local = Local(epochs=2, batch=4, optimizer="adamw", weight_decay=0.1)
    given = {"local": local, "model": Net(), "rounds": 2, "dtype": "float64", "device": "cpu"}
    grid = {"local_lr": [0.01, 0.1], "weight_decay": [0.0, 0.5]}
    both = sartor.fit("ditto", fed, sweep=grid, **given)
    for k, entry in enumerate(both.runs):
        hyper = {name: entry.hyper[name] for name in grid}
        alone = sartor.fit("ditto", fed, hyper=hyper, **given)
        np.testing.assert_allclose(
            both.loss_curve(run=k)[1], alone.loss_curve()[1], rtol=0, atol=1e-12
        )


def test_rates_follow_from_the_optimizer_and_what_cannot_be_right_is_refused():
    """Adam starts at 0.001; momentum, unknown names and odd betas are refused."""
    assert Local().lr == 0.1
    assert Local(optimizer="adam").lr == 0.001
    assert Local(optimizer="adam", lr=0.5).lr == 0.5
    with pytest.raises(ConfigError, match="did you mean 'adam'"):
        Local(optimizer="adan")
    with pytest.raises(ConfigError, match=r"momentum is of SGD, got 0\.9"):
        Local(optimizer="adam", momentum=0.9)
    with pytest.raises(ConfigError, match="betas must be two numbers"):
        Local(optimizer="adam", betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match="leave keep_optimiser out"):
        build("fedrep", net_task(), Local(optimizer="adam", keep_optimiser=True), {})
    with pytest.raises(ConfigError, match="corrects the gradients of SGD"):
        build("scaffold", net_task(), Local(optimizer="adam"), {})


def test_a_folder_knows_its_optimizer(tmp_path):
    """A run with Adam resumes, and is loaded, with Adam; one with SGD does not name it."""
    fed = federation()
    given = {"model": Net(), "rounds": 3, "checkpoint_every": 1, "device": "cpu"}
    local = Local(epochs=1, batch=4, optimizer="adam", keep_optimiser=True)
    straight = sartor.fit("fedavg", fed, local=local, out=tmp_path / "a", **given)
    assert straight.config["local"]["optimizer"] == "adam"

    class Stop:
        def on_round(self, event):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sartor.fit("fedavg", fed, local=local, out=tmp_path / "b", callbacks=[Stop()], **given)
    resumed = sartor.fit("fedavg", fed, local=local, out=tmp_path / "b", resume=True, **given)
    np.testing.assert_array_equal(straight.loss_curve()[1], resumed.loss_curve()[1])
    plain = sartor.fit("fedavg", fed, local=Local(), out=tmp_path / "c", **given)
    assert "optimizer" not in plain.config["local"]
    assert sartor.load(tmp_path / "a", model=Net()).onboard(fed, rounds=1)
