"""Trackers: the three verbs, and each program by a small stand-in or, where it is there, itself."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import sartor
from sartor import fit
from sartor.core.errors import ConfigError, MissingExtraError
from sartor.core.local import Local
from sartor.results.result import Result
from sartor.trackers import TRACKERS, Tracker, numbers_of, track
from tests.toys import Net, federation

SETTINGS: dict[str, Any] = {
    "model": Net(),
    "device": "cpu",
    "rounds": 3,
    "eval_every": 2,
    "local": Local(lr=0.2, batch=3),
    "sweep": {"prox_strength": [0.1, 1.0]},
}
NAMES = ["fedprox prox_strength=0.1", "fedprox prox_strength=1"]


class Log(Tracker):
    """Writes down the three verbs."""

    def __init__(self) -> None:
        self.opened: dict[int, tuple[str, str, dict[str, Any]]] = {}
        self.logged: list[tuple[int, int, dict[str, float]]] = []
        self.closed: dict[int, Any] = {}

    def open(self, run: int, name: str, group: str, settings: dict[str, Any]) -> None:
        self.opened[run] = (name, group, settings)

    def log(self, run: int, numbers: dict[str, float], step: int) -> None:
        self.logged.append((run, step, numbers))

    def close(self, run: int, summary: dict[str, Any] | None) -> None:
        self.closed[run] = summary


def trained(tracker: Any, **more: Any) -> Result:
    """Train a sweep of two runs under a tracker."""
    return fit("fedprox", federation(), callbacks=[tracker], **{**SETTINGS, **more})


def test_every_run_is_opened_logged_and_closed() -> None:
    """The names say what differs; evaluations and costs arrive with the number of rounds."""
    log = Log()
    result = trained(log)
    assert [log.opened[run][0] for run in (0, 1)] == NAMES
    assert log.opened[1][1] == "fedprox"
    assert log.opened[1][2]["hyper/prox_strength"] == 1.0
    assert log.opened[1][2]["local/batch"] == 3
    scored = [(r, step) for r, step, row in log.logged if "accuracy/pre/test" in row]
    assert scored == [(0, 2), (1, 2), (0, 3), (1, 3)]
    final = {r: row for r, step, row in log.logged if "accuracy/pre/test" in row and step == 3}
    assert [final[r]["accuracy/pre/test"] for r in (0, 1)] == list(result.accuracy)
    sent = sum(
        row["cost/bytes_up"] for r, _, row in log.logged if r == 1 and "cost/bytes_up" in row
    )
    assert sent == result.bytes_up[1]
    assert log.closed == dict(enumerate(result.summaries()))


def test_a_run_that_breaks_off_is_closed_without_a_summary() -> None:
    """So that files are whole, whatever happens."""

    class Break:
        def on_round(self, seen: Any) -> None:
            raise KeyboardInterrupt

    log = Log()
    with pytest.raises(KeyboardInterrupt):
        fit("fedavg", federation(), callbacks=[log, Break()], model=Net(), device="cpu")
    assert log.closed == {0: None}


def _other_task(kind: str) -> sartor.Federation:
    """Two clients of another task: prices that are standardised, pairs of labels, or texts."""
    draw = np.random.default_rng(0)
    client = np.repeat(["a", "b"], 20)
    if kind == "regression":
        area = draw.uniform(30, 200, 40)
        price = 100 + 2 * area + draw.normal(0, 20, 40)
        table = {"town": client, "area": area, "price": price}
        return sartor.Federation.from_dataframe(table, client="town", label="price")
    x = draw.normal(size=(40, 3)).astype("f4")
    if kind == "multilabel":
        return sartor.Federation.from_arrays(x, x[:, :2] > 0, client=client, task=kind)
    texts = draw.integers(1, 5, (40, 6))
    texts[::2, 3:] = 0  # half of them are short
    return sartor.Federation.from_arrays(texts, None, client=client, task=kind)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("regression", "RMSE"), ("multilabel", "exact_match"), ("next-token", "tokens_right")],
)
def test_what_is_logged_is_what_the_task_is_measured_by(kind: str, name: str) -> None:
    """The measure of the result, under its name, in every evaluation; no accuracy of 0."""
    log = Log()
    fed = _other_task(kind)
    result = fit("fedavg", fed, rounds=3, eval_every=2, callbacks=[log], device="cpu")
    rounds, curve = result.measure_curve()
    losses = result.loss_curve()[1]
    wanted = [(t, curve[rounds.index(t)], losses[rounds.index(t)]) for t in (2, 3)]
    logged = [
        (step, row[f"{name}/pre/test"], row["loss/pre/test"])
        for _, step, row in log.logged
        if "loss/pre/test" in row
    ]
    assert [step for step, *_ in logged] == [t for t, *_ in wanted]
    for found, expected in zip(logged, wanted, strict=True):
        assert found == pytest.approx(expected)
    assert logged[-1][1] > 0
    assert not any(key.startswith("accuracy") for _, _, row in log.logged for key in row)
    assert numbers_of(log.closed[0])[name] == pytest.approx(result.pooled_measure())
    if kind == "regression":
        assert not any(key.startswith("accuracy") for key in numbers_of(log.closed[0]))


class FakeRun:
    """What wandb and Trackio return: a run that is logged to."""

    def __init__(self, **words: Any) -> None:
        self.words = words
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] = {}
        self.ended: Any = None

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.rows.append((step, numbers))

    def finish(self, exit_code: int = 0) -> None:
        self.ended = exit_code


def _fake_mlflow(made: list[Any]) -> ModuleType:
    class Client:
        def __init__(self, tracking_uri: str | None) -> None:
            self.uri, self.runs = tracking_uri, {}  # type: ignore[var-annotated]
            made.append(self)

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return f"id of {name}"

        def create_run(self, home: str, tags: dict[str, str]) -> Any:
            run = FakeRun(home=home, name=tags["mlflow.runName"], config={})
            self.runs[tags["mlflow.runName"]] = run
            return SimpleNamespace(info=SimpleNamespace(run_id=tags["mlflow.runName"]))

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            self.runs[run].words["config"].update({p.key: p.value for p in params})
            for metric in metrics:
                self.runs[run].log({metric.key: metric.value}, metric.step)

        def set_terminated(self, run: str, status: str) -> None:
            self.runs[run].ended = status

    def pair(*names: str) -> Any:
        return lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True)))

    found = ModuleType("mlflow")
    entities = SimpleNamespace(
        Param=pair("key", "value"), Metric=pair("key", "value", "timestamp", "step")
    )
    vars(found).update(MlflowClient=Client, entities=entities)
    return found


def _fake_init(name: str, made: list[Any]) -> ModuleType:
    found = ModuleType(name)

    def init(**words: Any) -> FakeRun:
        if name == "trackio":  # it has one run open at a time
            assert all(run.ended is not None for run in made)
        made.append(FakeRun(**words))
        return made[-1]

    vars(found).update(init=init)
    return found


def _rows(run: FakeRun, key: str) -> list[tuple[int, float]]:
    return [(step, row[key]) for step, row in run.rows if key in row]


@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio"])
def test_each_program_is_called_as_it_wants_to_be(name: str, monkeypatch, tmp_path) -> None:
    """One run per run with its name and settings, all evaluations, an end."""
    made: list[Any] = []
    module = _fake_mlflow(made) if name == "mlflow" else _fake_init(name, made)
    monkeypatch.setitem(sys.modules, name, module)
    place = tmp_path / "some.db"
    result = trained(track(f"{name}:{place}" if name == "mlflow" else f"{name}:mine"))
    runs = made
    if name == "mlflow":
        assert made[0].uri == f"sqlite:///{place}"
        runs = list(made[0].runs.values())
    assert [run.words["name"] for run in runs] == NAMES
    for index, run in enumerate(runs):
        assert float(run.words["config"]["hyper/prox_strength"]) == (0.1, 1.0)[index]
        curve = result.curve(run=index)
        wanted = [(t, curve[1][curve[0].index(t)]) for t in (2, 3)]
        assert _rows(run, "accuracy/pre/test") == wanted
        assert run.ended == ("FINISHED" if name == "mlflow" else 0)
    if name == "wandb":
        assert (runs[0].words["mode"], runs[0].words["project"]) == ("offline", "mine")
        assert runs[1].summary["accuracy"] == result.accuracy[1]
    else:
        assert _rows(runs[1], "final/accuracy") == [(3, result.accuracy[1])]


def test_tensorboard_gets_a_folder_per_run(monkeypatch, tmp_path) -> None:
    """By a stand-in for its writer."""
    made: dict[str, Any] = {}

    class Writer:
        def __init__(self, folder: str) -> None:
            self.rows, self.open = [], True  # type: ignore[var-annotated]
            made[folder] = self

        def add_text(self, tag: str, text: str) -> None:
            self.text = text

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.rows.append((tag, value, step))

        def close(self) -> None:
            self.open = False

    fake = ModuleType("torch.utils.tensorboard")
    vars(fake)["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    result = trained(track(f"tensorboard:{tmp_path}"))
    assert [folder.rpartition("/")[0] for folder in made] == [str(tmp_path)] * 2
    first, second = made.values()
    assert ("accuracy/pre/test", result.accuracy[1], 3) in second.rows
    assert "| hyper/prox_strength | 0.1 |" in first.text
    assert not first.open


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_reported_at_once(name: str, monkeypatch) -> None:
    """Before anything trains, with what to install."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=f"needs the package {name}.*pip install"):
        track(name)


def test_an_unknown_tracker_is_named() -> None:
    """With the nearest one."""
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        track("wandbb:x")


@pytest.mark.slow
def test_tensorboard_itself(tmp_path) -> None:
    """The event files hold the curve."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = trained(track(f"tensorboard:{tmp_path}"), sweep=None)
    found = accumulator.EventAccumulator(str(tmp_path / "fedprox"))
    found.Reload()
    rows = [(row.step, row.value) for row in found.Scalars("accuracy/pre/test")]
    assert rows[-1] == (3, pytest.approx(result.accuracy))


@pytest.mark.slow
def test_mlflow_itself(tmp_path) -> None:
    """The database holds the runs and their curves."""
    mlflow = pytest.importorskip("mlflow")
    result = trained(track(f"mlflow:{tmp_path / 'runs.db'}"))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs.db'}")
    home = client.get_experiment_by_name("sartor").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([home])}
    assert sorted(runs) == NAMES
    assert runs[NAMES[1]].data.metrics["final/accuracy"] == pytest.approx(result.accuracy[1])
    assert runs[NAMES[0]].data.params["hyper/prox_strength"] == "0.1"


@pytest.mark.slow
def test_wandb_itself(tmp_path, monkeypatch) -> None:
    """Offline runs lie in the folder; nothing is sent."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trained(track("wandb:mine"))
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2
