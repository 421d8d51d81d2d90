"""Check that the tests notice faults: put small faults into a file one at a time and run its tests.

    python -m bench.mutants [FILE ...] [--most N] [--seed S]
    python -m bench.mutants --named

A mutant is the file with one expression changed: a comparison negated or moved by one, an operator
swapped, a term or factor left out, a constant or a truth value changed, a condition negated, a sign
or a negation dropped. It is *killed* if a test fails, *timed out* if the tests do not finish (which
counts as noticed), and has *survived* otherwise. Error messages, annotations and imports are not
changed. Torch is imported once; every mutant is a fork that imports this project again with the
changed file, so a mutant takes about as long as the tests that run on it.

`TARGETS` lists the tests of each file; a later stage runs only for the survivors of the earlier
ones. `EQUIVALENT` lists mutants that compute the same as the file, with the reason; they are not
counted. Hypothesis draws the same examples every time. `NAMED` holds faults that are no single
changed expression, or that went unnoticed once; `--named` tries these and no others. Needs
`os.fork`: Linux or macOS.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import hypothesis
import pytest
import torch

import sartor.cli  # imports all third-party packages, so that no fork has to
import sartor.report
import sartor.runs  # noqa: F401
from sartor.results.tables import Table

ROOT = Path(__file__).resolve().parent.parent
BAR = 0.8
MEMORY = 16 << 30


class Target(NamedTuple):
    """The tests of a file, in stages, and the functions that are changed (all if none is named)."""

    stages: tuple[tuple[str, ...], ...]
    only: tuple[str, ...] = ()


TARGETS = {
    "sartor/methods/fedapa.py": Target((("tests/methods/test_fedapa.py",),)),
    "sartor/methods/pfedme.py": Target(
        (("tests/methods/test_pfedme.py",), ("tests/methods/test_pfedbred.py",))
    ),
    "sartor/methods/parts/proximal.py": Target(
        (("tests/methods/test_pfedme.py",), ("tests/methods/test_pfedbred.py",))
    ),
    "sartor/methods/ditto.py": Target(
        (
            ("tests/methods/test_ditto.py", "-k", "not to_the_bit and not smallest and not centre"),
            ("tests/methods/test_ditto.py",),
        )
    ),
    "sartor/engines/plan.py": Target(
        (("tests/engines/test_plan.py",), ("tests/engines/test_record_fields.py",))
    ),
    "sartor/engines/vectorised.py": Target(
        (("tests/engines/test_vectorised.py",), ("tests/engines/test_engines.py",))
    ),
    "sartor/engines/parts.py": Target((("tests/engines/test_parts.py",),)),
    "sartor/engines/evaluate.py": Target(
        (("tests/engines/test_evaluation.py",),), ("_score_phase", "_score_split")
    ),
    "sartor/core/tree.py": Target((("tests/core/test_tree.py",),), ("where",)),
    "sartor/core/task.py": Target(
        (("tests/core/test_task.py",), ("tests/core/test_tasks.py",)), ("masked_mean",)
    ),
}

# File -> line of the mutant -> why it is not a fault.
_BITS = "words have 32 bits, and there are fewer than 2^30 segments: they sort the same"
_EQUAL = "if both are equal, the line below changes nothing"
EQUIVALENT: dict[str, dict[str, str]] = {
    "sartor/engines/plan.py": {
        "if np.any(per_epoch != period) and (total_steps >= period):": _EQUAL,
        "value = (segment[:, None] << 33) + words": _BITS,
    },
    "sartor/engines/vectorised.py": {
        "if (width <= before):": "all lanes continue, and the other part is empty",
    },
    "sartor/methods/ditto.py": {
        "pairs = zip(tries, choices, strict=False)": "tries are made from choices, one each",
    },
}


class Named(NamedTuple):
    """A fault by hand: what is changed into what, and the tests that must notice."""

    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def _law(law: str, case: str) -> tuple[str, ...]:
    return (f"tests/methods/test_laws.py::test_law[{law}-{case}]",)


_PADDED = "padding_is_no_client"
NAMED = (
    Named(
        "sartor/methods/fedprox.py",
        "/ ctx.present.sum().clamp(min=1)",
        "/ len(ctx.present)",
        _law(_PADDED, "fedprox-paper_real-unbiased"),
    ),
    Named(
        "sartor/methods/fedavg.py",
        "num = ctx.present.sum().clamp(min=1)",
        "num = torch.tensor(len(ctx.present))",
        _law(_PADDED, "fedavg-chen"),
    ),
    Named(
        "sartor/methods/fedprox_two_stage.py",
        "/ ctx.present.sum().clamp(min=1).to(p.dtype)",
        "/ len(ctx.present)",
        _law(_PADDED, "fedprox-two-stage"),
    ),
    Named(
        "sartor/methods/pfedme.py",
        """rate = local.rate(ctx) * ctx.hyper["prox_strength"]""",
        """rate = local.rate(ctx) * ctx.hyper["prox_strength"].clamp(max=20.0)""",
        ("tests/methods/test_pfedme.py", "-k", "whole_pull"),
    ),
    Named(
        "sartor/methods/fedem.py",
        "torch.where(num > 0, mean",
        "torch.where(num > 1, mean",
        ("tests/methods/test_fedem.py", "-k", "one_sample"),
    ),
    Named(
        "sartor/results/metrics.py",
        "t_quantile(0.5 + confidence / 2, number - 1)",
        "t_quantile(0.5 + confidence / 2, number)",
        ("tests/results/test_metrics.py", "-k", "one_degree"),
    ),
    Named(
        "sartor/compose/choice.py",
        "weights = server_ctx.sizes.to(errors.dtype) * (count",
        "weights = torch.ones_like(errors[:, 0]) * (count",
        ("tests/methods/test_dichotomous.py", "-k", "outweighs"),
    ),
    Named(
        "sartor/training/onboarding.py",
        "round=ctx.round + past",
        "round=ctx.round",
        ("tests/core/test_schedule.py", "-k", "newcomers"),
    ),
    Named(
        "sartor/adviser/by_theory.py",
        "WORTH = 0.05",
        "WORTH = 0.1",
        ("tests/adviser/test_estimates.py", "-k", "five_percent"),
    ),
    Named(
        "sartor/training/onboarding.py",
        "rate_round=last",
        "rate_round=ctx.round + past",
        ("tests/core/test_schedule.py", "-k", "newcomers"),
    ),
    Named(
        "sartor/engines/context.py",
        "server_ctx.round - 1 if stage in AFTER and t else server_ctx.round",
        "server_ctx.round",
        ("tests/core/test_schedule.py", "-k", "rate_of_the_last_round"),
    ),
)
"""Faults that no test noticed, or that a number once had."""

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
MOVED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
SWAPPED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


class Mutant(NamedTuple):
    """One changed line, as it was and as it is, and the code of the changed file."""

    line: int
    before: str
    after: str
    code: CodeType


# ---- making mutants ------------------------------------------------------------------------------


def swapped(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    """Yield expressions that could replace an expression by mistake."""
    match node:
        case ast.Compare():
            for k, op in enumerate(node.ops):
                for table in (NEGATED, MOVED):
                    if type(op) in table:
                        other = copy.deepcopy(node)
                        other.ops[k] = table[type(op)]()
                        yield other
        case ast.BinOp(left, op, right) if type(op) in SWAPPED and not is_text(left, right):
            yield ast.BinOp(left, SWAPPED[type(op)](), right)
            yield left
            if isinstance(op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
                yield right
        case ast.AugAssign(target, op, value) if type(op) in SWAPPED and not is_text(value):
            yield ast.AugAssign(target, SWAPPED[type(op)](), value)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value) as operand):
            yield operand
            yield ast.Constant(1 - value)
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(float() as value):
            yield ast.Constant(2.0 * value + 0.1)


def is_text(*nodes: ast.expr) -> bool:
    """Return whether strings or lists are joined here instead of numbers added."""
    kinds = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)
    return any(isinstance(n, kinds) or isinstance(getattr(n, "value", 0), str) for n in nodes)


def negated(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions of a node that are neither comparisons nor negations themselves."""
    match node:
        case ast.If(test) | ast.IfExp(test) | ast.While(test):
            tests = [test]
        case ast.comprehension(ifs=ifs):
            tests = ifs
        case _:
            tests = []
    yield from (t for t in tests if not isinstance(t, ast.Compare | ast.UnaryOp | ast.BoolOp))


def walk(node: ast.AST, only: Sequence[str]) -> Iterator[ast.AST]:
    """Yield the nodes that may change, outermost first."""
    yield node
    children: list[ast.AST]
    if isinstance(node, ast.Module) and only:
        children = [n for n in ast.walk(node) if getattr(n, "name", "") in only]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        children = []  # a negative number is one constant
    else:
        fixed = {"annotation", "returns", "decorator_list", "op", "ops"}
        fields = (value for name, value in ast.iter_fields(node) if name not in fixed)
        listed = (v if isinstance(v, list) else [v] for v in fields)
        children = [child for values in listed for child in values if isinstance(child, ast.AST)]
    still = ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr
    for child in children:
        if not isinstance(child, still):
            yield from walk(child, only)


def mutants(path: Path, only: Sequence[str] = ()) -> list[Mutant]:
    """Return every mutant of a file, or of some of its functions and classes."""
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    found = {}
    for node in walk(ast.parse(source), only):
        changes: list[tuple[ast.expr | ast.stmt, str]] = [
            (test, f"not ({ast.unparse(test)})") for test in negated(node)
        ]
        if isinstance(node, ast.expr | ast.stmt):
            for other in swapped(node):
                plain = isinstance(other, ast.Constant | ast.Name | ast.stmt)
                text = ast.unparse(other)
                changes.append((node, text if plain else f"({text})"))
        for place, text in changes:
            assert place.end_lineno is not None
            first, last = place.lineno - 1, place.end_lineno - 1
            head, tail = lines[first][: place.col_offset], lines[last][place.end_col_offset :]
            middle = head + text.encode() + tail
            changed = b"".join([*lines[:first], middle, *lines[last + 1 :]])
            before = b" ".join(line.strip() for line in lines[first : last + 1]).decode()
            code = compile(changed, path, "exec", dont_inherit=True)
            after = middle.decode().strip()
            found[first, after] = Mutant(first + 1, before, after, code)
    return list(found.values())


# ---- trying them ---------------------------------------------------------------------------------


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module from the given code."""

    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self.name, self.path, self.code = name, path, code

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the changed module, and no other."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed code."""
        exec(self.code, module.__dict__)


def trial(file: str, code: CodeType, tests: Sequence[str], seconds: int) -> tuple[str, str]:
    """Run tests with changed code in a fork; return its fate and the end of pytest's output."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os._exit(tested(file, code, tests))
        _, status = os.waitpid(child, 0)
        said.seek(0)
        tail = said.read().decode(errors="replace")[-2000:]
    if os.WIFSIGNALED(status):
        return ("timed out" if os.WTERMSIG(status) == signal.SIGALRM else "killed"), tail
    return ("killed" if os.WEXITSTATUS(status) else "survived"), tail


def tested(file: str, code: CodeType, tests: Sequence[str]) -> int:
    """Import the project with changed code and run tests until one fails; return the status."""
    for name in [n for n in sys.modules if n.partition(".")[0] in ("sartor", "tests")]:
        del sys.modules[name]
    sys.meta_path.insert(0, Changed(file.removesuffix(".py").replace("/", "."), ROOT / file, code))
    quiet = ("-q", "--tb=line", "-n", "0", "-p", "no:cacheprovider")
    known = ("-W", "ignore:Module already imported")  # pytest's plugins are imported already
    try:
        return int(pytest.main(["-x", *quiet, *known, *tests]))
    except BaseException:
        traceback.print_exc()
        return 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def judge(file: str, target: Target, chosen: Sequence[Mutant]) -> list[str]:
    """Return the fate of every mutant, stage by stage."""
    plain = compile((ROOT / file).read_bytes(), ROOT / file, "exec", dont_inherit=True)
    fates = ["survived"] * len(chosen)
    for tests in target.stages:
        if "survived" not in fates:
            break
        begun = time.perf_counter()
        fate, said = trial(file, plain, tests, 600)
        if fate != "survived":
            raise SystemExit(
                f"{said}\n{' '.join(tests)}: {fate} without any fault; fix that first."
            )
        limit = 30 + int(5 * (time.perf_counter() - begun))
        for k, mutant in enumerate(chosen):
            if fates[k] == "survived":
                fates[k], _ = trial(file, mutant.code, tests, limit)
                reported = f"{file}:{mutant.line} {k + 1}/{len(chosen)} {fates[k]}: {mutant.after}"
                print(reported, file=sys.stderr, flush=True)
    return fates


def try_named() -> int:
    """Put every named fault into its file; the exit status is 1 if a test did not notice."""
    unnoticed = 0
    for one in NAMED:
        source = (ROOT / one.file).read_text(encoding="utf-8")
        if source.count(one.before) != 1:
            raise SystemExit(f"NAMED: {one.before!r} is not once in {one.file}; write it anew.")
        for text, wanted in ((source, "survived"), (source.replace(one.before, one.after), "")):
            code = compile(text, ROOT / one.file, "exec", dont_inherit=True)
            fate, said = trial(one.file, code, one.tests, 120)
            if wanted and fate != wanted:
                raise SystemExit(f"{said}\n{' '.join(one.tests)}: {fate} without any fault.")
        unnoticed += fate == "survived"
        print(f"{fate}: {one.file}: {one.after}", flush=True)
    return int(unnoticed > 0)


def counted(file: str, target: Target) -> list[Mutant]:
    """Return the mutants of a file that are faults."""
    made = mutants(ROOT / file, target.only)
    known = EQUIVALENT.get(file, {}).keys()
    if gone := known - {m.after for m in made}:
        raise SystemExit(f"EQUIVALENT names lines of {file} that no mutant has: {sorted(gone)}")
    return [m for m in made if m.after not in known]


def prepare() -> None:
    """Set up what all forks have in common: one thread, and the same examples every time."""
    torch.set_num_threads(1)
    os.chdir(ROOT)
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    gc.freeze()  # the garbage collector of a fork skips what was imported here


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the survivors; the exit status is 1 if a file is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--most", type=int, help="the most mutants per file, a random sample")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--named", action="store_true", help="the faults of NAMED alone")
    options = parser.parse_args(arguments)
    if unknown := set(options.files) - set(TARGETS):
        parser.error(f"no tests are listed for {sorted(unknown)}; add them to TARGETS")
    prepare()
    if options.named:
        return try_named()
    rows, alive, low = [], [], False
    for file in options.files or TARGETS:
        begun = time.perf_counter()
        chosen = made = counted(file, TARGETS[file])
        if options.most is not None and options.most < len(made):
            picked = sorted(random.Random(options.seed).sample(range(len(made)), options.most))
            chosen = [made[k] for k in picked]
        fates = judge(file, TARGETS[file], chosen)
        left = fates.count("survived")
        share = 1.0 - left / max(len(fates), 1)
        low |= share < BAR
        reported = [str(fates.count(fate)) for fate in ("killed", "timed out", "survived")]
        taken = f"{time.perf_counter() - begun:.0f}"
        excused = str(len(EQUIVALENT.get(file, {})))
        rows.append(
            [file, f"{len(made)}", f"{len(fates)}", *reported, f"{share:.1%}", excused, taken]
        )
        both = zip(chosen, fates, strict=True)
        alive += [(file, m) for m, fate in both if fate == "survived"]
    head = ("file", "mutants", "tried", "killed", "timed out", "survived", "noticed", "same", "s")
    print(Table(head, rows))
    for file, mutant in alive:
        print(f"\n{file}:{mutant.line}\n  - {mutant.before}\n  + {mutant.after}")
    return int(low)


if __name__ == "__main__":
    raise SystemExit(main())
