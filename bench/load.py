"""Measure how busy other processes keep the machine, to wait until it is idle (Linux only)."""

from __future__ import annotations

import os
import time
from pathlib import Path

QUIET = 0.1
"""The share of one processor below which other processes count as idle."""

_STAT = Path("/proc/stat")


def _busy() -> float:
    """Return the processor-seconds of the whole machine that were not idle."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = _STAT.read_text().split("\n")[0].split()[1:9]
    ticks = sum(map(int, (user, nice, system, irq, softirq, steal)))
    return ticks / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Meter:
    """A meter of the other processes' load since it was created."""

    def __init__(self) -> None:
        self.start, self.busy, self.own = time.perf_counter(), _busy(), _own()

    def others(self) -> float:
        """Return the mean number of processors that other processes kept busy."""
        seconds = max(time.perf_counter() - self.start, 1e-9)
        return max((_busy() - self.busy) - (_own() - self.own), 0.0) / seconds


def wait_for_quiet(end: float, look: float = 0.04) -> bool:
    """Sleep until other processes are idle, or until ``end`` on the performance counter."""
    while time.perf_counter() < end:
        meter = Meter()
        time.sleep(look)
        if meter.others() < QUIET:
            return True
    return False
