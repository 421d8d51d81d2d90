"""Laws of the tasks: each is scored by the one evaluator as its definition says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import sartor
from sartor.core.errors import ConfigError, FederationError, ModelError
from sartor.core.task import binary_cross_entropy, next_tokens, token_cross_entropy
from sartor.data import Federation
from sartor.models import describe_model, dnn, language_lstm, lenet5, lstm, mclr, rebuild_model
from sartor.results.score_table import measure

CLIENTS = np.arange(60) % 3


@pytest.fixture(scope="module")
def texts() -> Federation:
    """Counting by one or by two, in texts of different lengths."""
    rng = np.random.default_rng(0)
    ids = np.zeros((60, 7), dtype=np.int64)
    for row, client in zip(ids, CLIENTS, strict=True):
        length = rng.integers(3, 8)
        row[:length] = (rng.integers(5) + np.arange(length) * (1 + client % 2)) % 5 + 1
    return Federation.from_arrays(ids, None, client=CLIENTS, task="next-token", val=0.2)


@pytest.fixture(scope="module")
def labelled() -> Federation:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    return Federation.from_arrays(x, x[:, :3] > 0, client=CLIENTS, task="multilabel")


@pytest.fixture(scope="module")
def targets() -> Federation:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 4))
    client = np.arange(150) % 3
    return Federation.from_arrays(x, x[:, 0] + (-1.0) ** client, client=client, task="regression")


# ---------------------------------------------------------------------- next token


def test_texts_are_shifted_by_one(texts):
    """Labels are the tokens that follow; padding is no answer."""
    assert texts.num_classes == 6
    assert torch.equal(texts.x[:, 1:], texts.y[:, :-1])
    rows = texts.test.of(0)
    assert texts.num_answers("test")[0] == (texts.y[rows] != 0).sum()
    assert texts.label_counts().sum() == (texts.y[texts.train.rows] != 0).sum()


def test_tokens_are_scored_one_by_one(texts):
    """Accuracy and loss of a client are those of its true tokens, computed by hand."""
    model = language_lstm(texts, embedding=8, hidden=8)
    result = sartor.fit("fedrep", texts, model=model, rounds=2, local=sartor.Local(lr=1.0))
    for client in range(3):
        rows = texts.test.of(client)
        scores, y = result.model(client)(texts.x[rows]).detach(), texts.y[rows]
        true = y != 0
        right = ((scores.argmax(-1) == y) & true).sum() / true.sum()
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=0)
        assert result.client_accuracy()[client] == pytest.approx(right.item())
        found = result.scores[result.headline, "test"].mean_loss(0)[-1, client]
        assert found == pytest.approx(loss.item(), rel=1e-5)
    assert ("pre", "val") in result.scores
    table = result.score(texts)
    assert [row[2] for row in table.rows[:3]] == pytest.approx(result.client_accuracy().tolist())


def test_engines_agree_on_tokens(texts):
    """The reference and the vectorised engine score tokens alike."""
    model = language_lstm(texts, embedding=4, hidden=4)
    found = [
        sartor.fit("ditto", texts, model=model, rounds=1, engine=engine, dtype="float64")
        for engine in ("sequential", "vectorised")
    ]
    one, two = (result.scores["pre", "test"] for result in found)
    assert np.array_equal(one.correct, two.correct)
    assert np.allclose(one.loss, two.loss, rtol=1e-9)


def test_padding_changes_no_token_loss():
    """Filling texts up changes neither the sum of their losses nor what is right."""
    torch.manual_seed(0)
    scores, y = torch.randn(3, 4, 5), torch.tensor([[1, 2, 3, 4], [1, 0, 0, 0], [2, 2, 0, 0]])
    longer = torch.cat([scores, torch.randn(3, 2, 5)], 1), F.pad(y, (0, 2))
    assert torch.allclose(4 * token_cross_entropy(scores, y), 6 * token_cross_entropy(*longer))
    assert next_tokens(scores, y).sum() == next_tokens(*longer).sum()
    assert not next_tokens(torch.zeros(3, 4, 5), torch.zeros(3, 4).long()).any()


def test_do_no_harm_chooses_by_tokens(texts):
    """The choice of a model by held-out error works for tokens too."""
    model = language_lstm(texts, embedding=4, hidden=4)
    result = sartor.fit(
        "fedavg",
        texts,
        model=model,
        rounds=1,
        do_no_harm=True,
        options={"harm_score": "error"},
        points=("pre",),
    )
    assert len(result.ended_with()) == 3


# ---------------------------------------------------------------------- several labels


def test_a_sample_is_right_if_all_its_labels_are(labelled):
    """Accuracy of a multi-label task is exact match, its loss the mean over labels."""
    result = sartor.fit("fedavg", labelled, rounds=2, local=sartor.Local(lr=0.5))
    rows = labelled.test.of(1)
    scores, y = result.model(1)(labelled.x[rows]).detach(), labelled.y[rows]
    right = ((scores > 0) == (y > 0)).all(1).double().mean().item()
    assert result.client_accuracy()[1] == pytest.approx(right)
    loss = F.binary_cross_entropy_with_logits(scores, y).item()
    assert result.scores["pre", "test"].mean_loss(0)[-1, 1] == pytest.approx(loss, rel=1e-5)
    assert binary_cross_entropy(scores, y).mean().item() == pytest.approx(loss, rel=1e-5)
    table = result.score(labelled)
    assert table.columns[2:5] == ["exact match", "labels right", "micro F1"]
    assert table.rows[1][2] == pytest.approx(right)


def test_methods_that_keep_classes_say_so(labelled, texts):
    """A method with something for every class is refused for other tasks, with a way out."""
    for name in ("fedproto", "fedrod", "fedpac"):
        with pytest.raises(ConfigError, match="keeps something for every class"):
            sartor.fit(name, labelled, rounds=1)
    with pytest.raises(FederationError, match="no advice for the task 'next-token'"):
        sartor.advise(texts)


@pytest.mark.parametrize(
    ("y", "task", "part"),
    [
        (np.full((60, 2), 3), "multilabel", "60 samples have labels other than 0 and 1"),
        (np.zeros(60), "multilabel", r"must be of shape \(samples"),
        (np.zeros((60, 3)), "next-token", "whole token ids"),
        (np.full((60, 2), -3), "next-token", "outside 0..1"),
        (np.zeros((60, 5), dtype=int), "next-token", "for every step of x"),
        (np.zeros(60), "ranking", "no task 'ranking'"),
    ],
)
def test_wrong_labels_are_refused(y, task, part):
    """Labels that do not fit the task are reported with the rows."""
    with pytest.raises(FederationError, match=part):
        Federation.from_arrays(np.ones((60, 2), dtype=int), y, client=CLIENTS, task=task)


def test_pytorch_marks_of_ignored_tokens_are_padding():
    """Labels of −100 are passed over, as in PyTorch."""
    fed = Federation.from_arrays(
        [[1, 2], [2, 1]], [[2, -100], [1, 2]], client=["a", "a"], task="next-token", test=0
    )
    assert fed.y.tolist() == [[2, 0], [1, 2]]


# ---------------------------------------------------------------------- targets


def test_a_regression_is_measured_by_its_error(targets):
    """Tables show root mean squared errors, and a gain is what the error falls by."""
    result = sartor.fit("ditto", targets, model=mclr(targets), rounds=3)
    rows = targets.test.of(2)
    gap = result.model(2)(targets.x[rows]).detach()[:, 0] - targets.y[rows]
    error = gap.square().mean().sqrt().item()
    assert result.client_measure()[2] == pytest.approx(error, rel=1e-5)
    alone = sartor.fit("local", targets, model=mclr(targets), rounds=3)
    gain = result.gain(alone)
    assert gain.rows[2][4] == pytest.approx(alone.client_measure()[2] - error, rel=1e-4)
    assert gain.notes["clients hurt"] == sum(row[4] < 0 for row in gain.rows)
    assert "RMSE pre" in result.per_client().columns
    assert repr(result).startswith("<Result ditto: RMSE ")
    both = sartor.Comparison({"local": alone, "ditto": result})
    assert both.table().columns[1] == "RMSE"
    assert both.table().rows[1][2] == max(result.client_measure())
    hurt = both.hurt("ditto")
    assert hurt is not None
    assert hurt[0] == gain.notes["clients hurt"]
    assert result.score(targets).rows[2][2] == pytest.approx(error, rel=1e-5)


def test_measures_have_their_known_values():
    """Worked numbers of every measure."""
    found = measure("regression", np.array([0.0, 2.0]), np.array([0.0, 1.0]))
    assert found == {"RMSE": pytest.approx(0.5**0.5), "MAE": 0.5, "R²": 0.5}
    found = measure("multilabel", np.array([[1, 0], [1, 1]]), np.array([[0.9, 0.9], [0.1, 0.9]]))
    expected = {"exact match": 0.0, "micro F1": pytest.approx(2 / 3), "labels right": 0.5}
    assert {name: found[name] for name in expected} == expected
    chance = np.array([[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]])
    found = measure("next-token", np.array([[1, 0]]), chance)
    assert found == {"tokens right": 0.0, "perplexity": pytest.approx(4)}
    found = measure("classification", np.array([0, 0, 0, 1]), np.eye(2)[[0, 0, 1, 1]])
    assert found["accuracy"] == 0.75
    assert found["balanced accuracy"] == pytest.approx(5 / 6)


# ---------------------------------------------------------------------- networks


@pytest.mark.parametrize(
    "network",
    [
        dnn(input_shape=(4,), num_classes=3, hidden=7),
        lenet5(input_shape=(1, 16, 16), num_classes=3),
        lstm(input_shape=(5,), num_classes=3, vocabulary=9, hidden=4, bidirectional=True),
        language_lstm(input_shape=(5,), num_classes=9, embedding=4, hidden=4, layers=2),
    ],
)
def test_a_network_is_made_again_from_its_description(network):
    """Name and arguments are enough to take the parameters back."""
    shape = (1, 16, 16) if network.head and hasattr(network, "conv1") else (4,)
    shape = (5,) if hasattr(network, "embedding") else shape
    reported = describe_model(network, shape, network.fc.out_features)
    rebuild_model(reported).load_state_dict(network.state_dict())
    assert describe_model(torch.nn.Linear(2, 2), (2,), 2) is None


def test_the_next_token_network_wants_its_task(labelled):
    """Another task is refused with the way to make the right one."""
    with pytest.raises(ModelError, match='task="next-token"'):
        language_lstm(labelled)
