"""Attention by plain operations: fused forms have no rule for many clients, nor second derivatives.

Which forms ``F.scaled_dot_product_attention`` and the layers of ``nn`` take are switches of the
whole process. They are turned while a network is called for clients, by whatever thread, and then
put back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.backends import cuda

_LOCK = threading.Lock()
_BEFORE: list[bool] = []  # what the switches were before the first of the calls under way
_UNDER_WAY = [0]
_SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Let attention be products and a softmax."""
    with _LOCK:
        _UNDER_WAY[0] += 1
        if _UNDER_WAY[0] == 1:
            _BEFORE[:] = [enabled() for enabled, _ in _SWITCHES]
            for _, switch in _SWITCHES:
                switch(False)
    try:
        yield
    finally:
        with _LOCK:
            _UNDER_WAY[0] -= 1
            if _UNDER_WAY[0] == 0:
                _put_back()


def _put_back() -> None:
    for (_, switch), value in zip(_SWITCHES, _BEFORE, strict=True):
        switch(value)


def _in_child() -> None:
    """Begin anew in a process that was forked: the threads whose calls were under way are gone."""
    global _LOCK
    _LOCK = threading.Lock()
    if _UNDER_WAY[0]:
        _put_back()
    _UNDER_WAY[0] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
