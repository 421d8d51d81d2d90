"""Settings for every test: one thread per worker, and the hypothesis profiles."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

# Two workers share two cores; a thread pool in each would only make them wait for one another.
# This has to stand before torch is imported, and subprocesses inherit it.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["SARTOR_ACCELERATE"] = "all"  # so that every way is tested

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(1)

# dev: quick feedback. ci: more examples, and the same ones every time.
settings.register_profile("dev", max_examples=10, deadline=None, print_blob=True)
settings.register_profile(
    "ci",
    max_examples=30,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


@pytest.fixture(autouse=True)
def one_core() -> Generator[None, Any, Any]:
    """Find the test that leaves this thread more cores, not one that is rounded otherwise by it."""
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    assert left == 1, f"the test leaves torch {left} threads; set what it found before"


LAWS = "tests/methods/test_laws.py::test_law["


def together(nodeid: str) -> str:
    """Name what a test shares runs and fixtures with: its file, or the case whose law it is."""
    if nodeid.startswith(LAWS):
        return nodeid.removeprefix(LAWS).partition("-")[2]
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Keep tests that share something on one worker: what is made for them is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave what collection makes, thousands of tests and modules, out of every later search.

    They stay to the end, so looking for garbage among them again and again finds none.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the laws last: 125 small groups, with which both workers come to an end together."""
    items.sort(key=lambda item: item.nodeid.startswith(LAWS))
