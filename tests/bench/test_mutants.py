"""The faults that `python -m bench.mutants` puts into a file."""

from __future__ import annotations

from pathlib import Path

from bench.mutants import EQUIVALENT, NAMED, ROOT, TARGETS, mutants

SOURCE = '''\
"""Words are left alone."""
import math

def f(a: int | None, b: float = 2.0) -> float:
    if a < b and not a:
        raise ValueError(f"{a + 1} is no number")
    return 0.5 * a - math.log(b) if b else -1

def g(θ):
    θ += 3
    return [x for x in θ if x]
'''


def test_one_expression_is_changed_at_a_time(tmp_path: Path) -> None:
    """Every kind of fault is made on its line; errors and annotations are not changed."""
    path = tmp_path / "small.py"
    path.write_text(SOURCE, encoding="utf-8")
    assert [(m.line, m.after) for m in mutants(path)] == [
        (4, "def f(a: int | None, b: float = 4.1) -> float:"),
        (5, "if (a < b or not a):"),
        (5, "if (a >= b) and not a:"),
        (5, "if (a <= b) and not a:"),
        (5, "if a < b and a:"),
        (7, "return 0.5 * a - math.log(b) if not (b) else -1"),
        (7, "return (0.5 * a + math.log(b)) if b else -1"),
        (7, "return (0.5 * a) if b else -1"),
        (7, "return (0.5 / a) - math.log(b) if b else -1"),
        (7, "return 0.5 - math.log(b) if b else -1"),
        (7, "return a - math.log(b) if b else -1"),
        (7, "return 1.1 * a - math.log(b) if b else -1"),
        (7, "return 0.5 * a - math.log(b) if b else 1"),
        (7, "return 0.5 * a - math.log(b) if b else 0"),
        (10, "θ -= 3"),
        (10, "θ += 4"),
        (11, "return [x for x in θ if not (x)]"),
    ]
    assert {m.line for m in mutants(path, ("g",))} == {10, 11}


def test_the_lists_name_what_exists() -> None:
    """Files, their functions and their tests; and a mutant is not what was there before."""
    assert EQUIVALENT.keys() <= TARGETS.keys()
    for file, target in TARGETS.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"def {name}(" in text for name in target.only)
        tests = [word for stage in target.stages for word in stage if word.endswith(".py")]
        assert tests
        assert all((ROOT / test).exists() for test in tests)
    found = mutants(ROOT / "sartor/methods/fedapa.py")
    assert len(found) > 20
    assert all(m.before != m.after for m in found)


def test_named_faults_can_be_put_in() -> None:
    """What is changed stands in its file once, the changed file is Python, and the tests exist."""
    for fault in NAMED:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.before) == 1, fault
        compile(text.replace(fault.before, fault.after), fault.file, "exec")
        assert (ROOT / fault.tests[0].partition("::")[0]).exists()
