"""Settings for every test: one thread per worker, and the hypothesis profiles."""

from __future__ import annotations

import os

# Two workers share two cores; a thread pool in each would only make them wait for one another.
# This has to stand before torch is imported, and subprocesses inherit it.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("MPLBACKEND", "Agg")

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
