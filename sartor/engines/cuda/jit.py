# mypy: ignore-errors
"""Triton, where it is installed: kernels can be imported without it, but not called."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # the caller asks first
    triton = tl = None


def jit(*plain):
    """Compile with Triton where there is one; ``plain`` names the numbers not to specialise on."""
    return (
        triton.jit(do_not_specialize=list(plain)) if triton is not None else lambda kernel: kernel
    )
