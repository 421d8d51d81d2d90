from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sartor
from sartor import runs
from sartor.core.errors import ConfigError, RunFolderError
from sartor.runs import (
    ComparisonFolder,
    RunFolder,
    open_folder,
    slug,
    storage,
)
from tests.synthetic_results import make_comparison, make_result

CONFIG = {"method": "fedapa", "rounds": 20, "hyper": {"local_lr": 0.05}, "seeds": (0, 1)}


def strict_json(path):
    """Read JSON and refuse NaN and infinity."""

    def refuse(word):
        raise AssertionError(f"{path} contains {word}")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def same_bits(first, second):
    """Whether two trees have the same structure, dtypes, shapes and bits (NaN included)."""
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and list(first) == list(second)
            and all(same_bits(first[key], second[key]) for key in first)
        )
    if isinstance(first, np.ndarray):
        return (first.dtype, first.shape) == (second.dtype, second.shape) and (
            first.tobytes() == second.tobytes()
        )
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8),
        second.contiguous().reshape(-1).view(torch.uint8),
    )


def ordered(tree):
    """Sort the keys at every level: a dict's order is not part of its value."""
    if not isinstance(tree, dict):
        return tree
    return {key: ordered(tree[key]) for key in sorted(tree)}


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", CONFIG)


def tree_of(value):
    return {"server": {"w": torch.full((3, 4), float(value))}, "client": {}}


# --- checkpoints --------------------------------------------------------------------------------


def test_a_checkpoint_returns_every_bit_dtype_shape_and_empty_dict(folder):
    """Trees of any dtype, scalars, empty tensors, NaN, views, and dicts with nothing in them."""
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    trees = {
        "server": {
            "f32": torch.tensor([1.5, float("nan"), float("-inf"), -0.0, 1e-45]),
            "f64": torch.tensor([0.1, float("nan")], dtype=torch.float64),
            "bf16": torch.tensor([1.0, 3.14], dtype=torch.bfloat16),
            "i64": torch.tensor([2**62, -1]),
            "u8": torch.tensor([0, 255], dtype=torch.uint8),
            "flag": torch.tensor([True, False]),
            "scalar": torch.tensor(0.3),
            "none": torch.zeros(0, 5),
        },
        "client": {},
        "deep": {"a": {"b": {}, "c": {"d/e~f": torch.ones(1)}}},
        "views": {"t": base.t(), "row": base[1], "again": base, "wide": torch.ones(1).expand(4)},
    }
    arrays = {
        "loss": np.array([[0.1, np.nan]]),
        "count": np.array([3], dtype=np.int32),
        "done": np.array([True]),
        "scalar": np.float64(2.5),
        "none": np.zeros((2, 0)),
    }
    meta = {"seconds": [0.1, 0.2], "nested": {"x": None}, "n": np.int64(3)}
    folder.write_checkpoint(7, trees, arrays, meta)
    saved = RunFolder.open(folder.path).read_checkpoint()
    assert saved is not None
    round_index, found, found_arrays, found_meta = saved
    assert round_index == 7
    assert same_bits(ordered(trees), ordered(found))
    arrays["scalar"] = np.asarray(arrays["scalar"])
    assert same_bits(ordered(arrays), ordered(found_arrays))
    assert found_meta == {"seconds": [0.1, 0.2], "nested": {"x": None}, "n": 3}


keys = st.text(min_size=1, max_size=4)
leaves = st.integers(0, 3).map(lambda size: torch.arange(size))
trees = st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=8)


@given(st.dictionaries(keys, trees, max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_of_any_names_survives(folder, tree):
    """Slashes, tildes, blanks and other alphabets in keys; nested empty dicts."""
    folder.write_checkpoint(1, tree)
    assert same_bits(ordered(tree), ordered(folder.read_checkpoint()[1]))


def test_no_checkpoint_is_none_and_the_newest_wins(folder):
    """Rounds are read back in the order they were written."""
    assert folder.read_checkpoint() is None
    for t in (10, 20, 30):
        folder.write_checkpoint(t, tree_of(t))
        assert folder.read_checkpoint()[0] == t


def test_only_two_checkpoints_stay_on_disk(folder):
    """The disk does not fill with the past, nor with leftovers of killed writes."""
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / ".round-000000-000000.safetensors.x.tmp").write_bytes(b"x")
    for t in range(5):
        folder.write_checkpoint(t, tree_of(t))
    names = sorted(path.name for path in (folder.path / "checkpoints").iterdir())
    assert names == [
        "latest.json",
        "round-000003-000004.safetensors",
        "round-000004-000005.safetensors",
    ]


def newest(folder):
    return max((folder.path / "checkpoints").glob("round-*"))


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flip, empty, os.unlink])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_warning(folder, damage):
    """Cut short, one bit flipped, emptied or deleted: nothing is trusted unread."""
    folder.write_checkpoint(10, tree_of(10))
    folder.write_checkpoint(20, tree_of(20))
    damage(newest(folder))
    with pytest.warns(UserWarning, match="round 10"):
        round_index, found, _, _ = folder.read_checkpoint()
    assert round_index == 10
    assert same_bits(found, tree_of(10))


def test_a_folder_whose_checkpoints_are_all_damaged_never_starts_over_silently(folder):
    """None would mean "begin at round 0"; this is an error instead."""
    folder.write_checkpoint(10, tree_of(10))
    cut(newest(folder))
    with pytest.raises(RunFolderError, match="No checkpoint"):
        folder.read_checkpoint()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "checkpoints": 3}']
)
def test_a_damaged_pointer_is_fixed_from_the_files_beside_it(folder, text):
    """The pointer is a convenience; the checkpoints speak for themselves."""
    folder.write_checkpoint(10, tree_of(10))
    folder.write_checkpoint(20, tree_of(20))
    (folder.path / "checkpoints" / "latest.json").write_text(text)
    with pytest.warns(UserWarning, match="damaged"):
        assert folder.read_checkpoint()[0] == 20


def test_a_checkpoint_of_a_later_release_is_an_error_and_not_a_fallback(folder, monkeypatch):
    """Resuming from an older one would lose work without a word."""
    folder.write_checkpoint(10, tree_of(10))
    monkeypatch.setattr(storage, "FORMAT", 2)
    folder.write_checkpoint(20, tree_of(20))
    monkeypatch.undo()
    with pytest.raises(RunFolderError, match="newer release"):
        folder.read_checkpoint()


WRITER = """
import sys, torch
from sartor.runs import RunFolder
folder = RunFolder.open(sys.argv[1])
t = 0
while True:
    t += 1
    folder.write_checkpoint(t, {"w": torch.full((50_000,), float(t)), "e": {}}, {}, {"t": t})
    print(t, flush=True)
"""


def test_kill_nine_at_any_moment_leaves_a_whole_checkpoint(folder):
    """A writer is killed again and again; what is read is always one whole write, none lost."""
    for delay in (0.004, 0.02):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder.path)], stdout=subprocess.PIPE, text=True
        )
        reported = int(writer.stdout.readline())
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0].split()
        reported = int(rest[-1]) if rest else reported
        round_index, trees, _, meta = folder.read_checkpoint()
        assert round_index in (reported, reported + 1)
        assert meta == {"t": round_index}
        assert (trees["w"] == round_index).all()


STOPPER = """
import os, signal, sys, torch
from sartor.runs import RunFolder
folder = RunFolder.open(sys.argv[1])
tree = lambda t: {"w": torch.full((50,), float(t)), "e": {}}
folder.write_checkpoint(1, tree(1))

def child(moment):
    left = [moment]
    def hook(event, args):
        if args and str(args[0]).startswith(sys.argv[1]):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    folder.write_checkpoint(2, tree(2))
    os._exit(0)

for moment in range(200):
    process = os.fork()
    if process == 0:
        child(moment)
    killed = os.waitpid(process, 0)[1] != 0
    t, trees, _, _ = folder.read_checkpoint()
    assert t in (1, 2) and (trees["w"] == t).all() and trees["e"] == {}, (moment, t)
    if not killed:
        assert t == 2
        break
    if t == 2:  # the pointer was moved: put the old one back for the next moment
        folder.write_checkpoint(1, tree(1))
print(moment)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_nine_before_each_single_file_operation_leaves_a_whole_checkpoint(folder):
    """A process is killed before its 1st, 2nd, ... access to the folder, until it gets through."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPER, str(folder.path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) >= 8


def interrupted(monkeypatch, call):
    """Make the n-th file operation of a write fail, for n = 0, 1, ... until none does."""
    names = ["mkstemp", "fsync", "replace"]
    for moment in range(100):
        left = [moment]

        def wrap(function, left=left):
            def stopped(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return function(*args, **kwargs)

            return stopped

        with monkeypatch.context() as patch:
            patch.setattr(tempfile, names[0], wrap(tempfile.mkstemp))
            patch.setattr(os, names[1], wrap(os.fsync))
            patch.setattr(os, names[2], wrap(os.replace))
            try:
                call()
            except RunFolderError as error:
                yield str(error)
            else:
                return
    raise AssertionError("the write never succeeded")


def test_a_full_disk_at_any_step_keeps_the_old_checkpoint_and_says_what_to_do(folder, monkeypatch):
    """Every file operation of a checkpoint fails in turn; the last good one is always there."""
    folder.write_checkpoint(10, tree_of(10))
    messages = []
    for message in interrupted(monkeypatch, lambda: folder.write_checkpoint(20, tree_of(20))):
        messages.append(message)
        assert "disk is full" in message
        assert str(folder.path) in message
        assert folder.read_checkpoint()[0] == 10
    assert len(messages) >= 4
    assert folder.read_checkpoint()[0] == 20
    assert not list((folder.path / "checkpoints").glob(".*"))


# --- creating and opening -----------------------------------------------------------------------


def test_a_new_folder_reports_settings_and_environment(folder):
    """config.json is the resolved configuration itself; the environment names the versions."""
    config = strict_json(folder.path / "config.json")
    assert config == {**CONFIG, "seeds": [0, 1]}
    found = strict_json(folder.path / "environment.json")
    assert {"python", "torch", "numpy", "platform", "cpus", "gpu", "sartor"} <= set(found)
    assert RunFolder.open(folder.path).config == config


def test_a_run_is_never_overwritten_by_accident(folder):
    """A second create is refused with the three ways on; overwrite keeps foreign files."""
    folder.write_checkpoint(10, tree_of(10))
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match=r"resume.*another folder.*overwrite"):
        RunFolder.create(folder.path, CONFIG)
    fresh = RunFolder.create(folder.path, CONFIG, overwrite=True)
    assert fresh.read_checkpoint() is None
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_a_folder_that_is_not_ours_is_never_cleared(tmp_path):
    """Even with overwrite: a stranger's config.json and models stay."""
    (tmp_path / "models").mkdir()
    (tmp_path / "config.json").write_text("theirs")
    with pytest.raises(RunFolderError, match="already holds"):
        RunFolder.create(tmp_path, CONFIG)
    with pytest.raises(RunFolderError, match="not overwritten"):
        RunFolder.create(tmp_path, CONFIG, overwrite=True)
    assert (tmp_path / "config.json").read_text() == "theirs"
    assert (tmp_path / "models").is_dir()


def test_opening_what_is_not_a_run_folder_says_so(tmp_path):
    """Missing, empty, damaged and later folders are four different sentences."""
    with pytest.raises(RunFolderError, match="There is no folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="not a run folder"):
        RunFolder.open(tmp_path)
    (tmp_path / "folder.json").write_text("{")
    with pytest.raises(RunFolderError, match="not JSON"):
        RunFolder.open(tmp_path)
    (tmp_path / "folder.json").write_text('{"format": 99, "kind": "run"}')
    with pytest.raises(RunFolderError, match=r"format 99.*newer release"):
        RunFolder.open(tmp_path)
    (tmp_path / "folder.json").write_text('{"kind": "run"}')
    with pytest.raises(RunFolderError, match="which format"):
        RunFolder.open(tmp_path)


def test_a_path_under_a_file_is_a_clear_error(tmp_path):
    """No traceback from the depths: the path, and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"file.*choose another folder"):
        RunFolder.create(tmp_path / "file" / "run", CONFIG)


def test_a_read_only_folder_is_a_clear_error(tmp_path, monkeypatch):
    """The error of a read-only file system names the path and the way out."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(RunFolderError, match=r"run.*not writable"):
        RunFolder.create(tmp_path / "run", CONFIG)


def test_a_resumed_run_removes_what_was_left_half_written(tmp_path):
    """Also where a killed writer of models left it; nothing of the user's is touched."""
    x = np.random.default_rng(0).normal(size=(40, 3))
    fed = sartor.Federation.from_arrays(x, x[:, 0] > 0, client=[i % 2 for i in range(40)])
    common = {"model": sartor.models.mclr(fed), "out": tmp_path / "run"}
    sartor.fit("fedavg", fed, rounds=1, **common)
    left = [
        tmp_path / "run" / name for name in ("models/.c0.safetensors.x1.tmp", ".metrics.csv.q.tmp")
    ]
    stays = [tmp_path / "run" / name for name in ("notes.tmp", ".hidden", ".mine.tmp")]
    for path in (*left, *stays):
        path.write_text("half")
    sartor.fit("fedavg", fed, rounds=1, resume=True, **common)
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in stays)


def test_resuming_with_other_settings_names_every_key_that_differs(folder):
    """Both values of each; equal settings (tuples or lists) and ignored keys pass."""
    folder.check_config(CONFIG)
    folder.check_config({**CONFIG, "rounds": 99}, ignore=["rounds"])
    other = {**CONFIG, "rounds": 50, "hyper": {"local_lr": 0.1}, "new": True}
    with pytest.raises(ConfigError) as caught:
        folder.check_config(other)
    message = str(caught.value)
    for part in ("rounds: 20 in the folder, 50 now", "hyper.local_lr: 0.05", "new: None"):
        assert part in message
    assert "method" not in message.replace(str(folder.path), "")


# --- results and models -------------------------------------------------------------------------


def test_a_result_read_back_is_the_same_to_the_last_bit(folder):
    """Scores, ledger, labels, snapshots, summaries; a diverged run included."""
    result = make_result(
        seeds=(0, 1), val=True, diverged={"round": 3, "client": "client-02"}, rounds=5
    )
    folder.write_result(result)
    found = RunFolder.open(folder.path).read_result()
    for key, scores in result.scores.items():
        assert found.scores[key].rounds == scores.rounds
        for name in ("correct", "loss", "count"):
            assert same_bits(getattr(found.scores[key], name), getattr(scores, name))
    assert same_bits(found.label_counts, result.label_counts)
    assert same_bits(found.snapshots[1]["mix"], result.snapshots[1]["mix"])
    assert found.summaries() == result.summaries()
    assert found.runs == result.runs
    assert found.config == result.config


def test_the_baseline_travels_with_the_result_if_it_was_trained(folder):
    """A report from the folder can then show the gain; without it nothing is invented."""
    result = make_result(rounds=3)
    folder.write_result(result)
    assert folder.read_result().known_baseline is None
    result.attach_baseline(make_result("local", rounds=3))
    folder.write_result(result)
    assert folder.read_result().gain().notes == result.gain().notes


def test_the_tables_on_disk_reproduce_the_result(folder):
    """metrics.csv gives the headline again, ledger.csv the bytes; JSON has no NaN."""
    result = make_result(rounds=4, diverged=None, seeds=(0, 1))
    folder.write_result(result)
    rows = list(csv.DictReader((folder.path / "metrics.csv").read_text().splitlines()))
    last = [
        row
        for row in rows
        if (row["run"], row["round"], row["point"], row["split"]) == ("1", "3", "post", "test")
    ]
    pooled = sum(float(r["accuracy"]) * int(r["count"]) for r in last)
    assert pooled / sum(int(r["count"]) for r in last) == pytest.approx(result.accuracy[1])
    ledger = list(csv.DictReader((folder.path / "ledger.csv").read_text().splitlines()))
    up = sum(int(row["bytes_up"]) for row in ledger if row["run"] == "0")
    assert up == result.bytes_up[0]
    assert strict_json(folder.path / "summary.json") == result.summaries()


def test_a_diverged_result_writes_strict_json_and_empty_cells(folder):
    """NaN is nowhere in a file that others read."""
    folder.write_result(make_result(rounds=4, diverged={"round": 1, "client": "client-00"}))
    assert strict_json(folder.path / "summary.json")[0]["accuracy"] is None
    assert "nan" not in (folder.path / "metrics.csv").read_text()


def test_a_run_without_an_end_has_no_result_and_says_how_to_continue(folder):
    """The message holds the command."""
    assert not folder.has_result
    with pytest.raises(RunFolderError, match="sartor resume"):
        folder.read_result()


def test_models_come_back_by_client_name_whatever_the_name(folder):
    """Names with slashes, dots, markup; two that look alike as file names."""
    names = ["../../etc/passwd", "<script>", "ward 1", "ward/1", "", "Zürich"]
    trees = [{"fc.weight": torch.full((2, 2), float(i))} for i in range(len(names))]
    path = folder.write_models(names, trees)
    found = folder.read_models()
    assert list(found) == names
    assert all(same_bits(found[name], tree) for name, tree in zip(names, trees, strict=True))
    assert all(file.resolve().is_relative_to(folder.path.resolve()) for file in path.iterdir())
    with pytest.raises(RunFolderError, match="run 3"):
        folder.read_models(run=3)


@given(st.text())
def test_a_slug_is_always_a_safe_file_name(name):
    """No separator, no leading dot, never empty, never long."""
    found = slug(name)
    assert 1 <= len(found) <= 60
    assert not set(found) & set('/\\:*?"<>| ')
    assert not found.startswith(".")


def test_a_comparison_read_back_is_the_same(tmp_path):
    """One run folder per method, comparison.json, and the same table."""
    comparison = make_comparison(seeds=(0, 1), rounds=4, clients=5)
    folder = ComparisonFolder.create(tmp_path / "all", {"rounds": 4})
    with pytest.raises(RunFolderError, match="sartor resume"):
        folder.read_comparison()
    folder.write_comparison(comparison)
    found = open_folder(tmp_path / "all")
    assert isinstance(found, ComparisonFolder)
    assert str(found.read_comparison().table()) == str(comparison.table())
    assert strict_json(tmp_path / "all" / "comparison.json")["reference"] == "local"
    assert isinstance(open_folder(tmp_path / "all" / "fedapa"), RunFolder)
    with pytest.raises(RunFolderError, match="comparison folder"):
        RunFolder.open(tmp_path / "all")


def test_overwriting_a_comparison_clears_its_runs(tmp_path):
    """No method of an earlier comparison is left to be mistaken for a new one."""
    folder = ComparisonFolder.create(tmp_path / "all", {})
    folder.write_comparison(make_comparison(rounds=3, clients=3))
    ComparisonFolder.create(tmp_path / "all", {}, overwrite=True)
    left = {path.name for path in (tmp_path / "all").iterdir()}
    assert left == {"config.json", "environment.json", "folder.json"}


def test_a_run_folder_around_other_runs_leaves_them_alone(tmp_path):
    """Parts of a sweep lie inside their sweep's folder; making or replacing it keeps them."""
    part = RunFolder.create(tmp_path / "sweep" / "part-0", CONFIG)
    part.write_checkpoint(5, tree_of(5))
    RunFolder.create(tmp_path / "sweep", CONFIG)
    RunFolder.create(tmp_path / "sweep", CONFIG, overwrite=True)
    saved = part.read_checkpoint()
    assert saved is not None
    assert saved[0] == 5


def test_nothing_is_ever_pickled():
    """The sources of the folder import no pickle and call no torch.load or torch.save."""
    sources = sorted(Path(runs.__file__).parent.glob("*.py"))
    assert {"folder.py", "run_folder.py", "storage.py"} <= {path.name for path in sources}
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not any(word in text for word in ("import pickle", "torch.load", "torch.save"))


def test_one_module_alone_knows_pickles():
    """The reader of CIFAR's files, which are pickles, has an unpickler that builds nothing else."""
    package = Path(runs.__file__).parents[1]
    sources = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }
    assert [name for name, text in sources.items() if "import pickle" in text] == [
        "data/readers.py"
    ]
    assert not any("allow_pickle=True" in text for text in sources.values())


def test_a_folder_of_an_unknown_kind_is_reported(tmp_path):
    """An edited folder.json is refused, with what may stand there."""
    run = RunFolder.create(tmp_path / "run", CONFIG)
    marker = json.loads((run.path / "folder.json").read_text())
    (run.path / "folder.json").write_text(json.dumps({**marker, "kind": "cake"}))
    with pytest.raises(RunFolderError, match="'cake', expected one of run, comparison, advice"):
        open_folder(run.path)
