# mypy: ignore-errors
"""The Triton kernels behind ``draws``: Philox4x32-10 and the rule of Box and Muller in one pass.

Without Triton the module can be imported, and nothing in it can be called.
"""

from __future__ import annotations

from sartor.engines.cuda.jit import jit, tl


@jit()
def philox(k0, k1, c0, c1, c2, c3):
    """Return the four words of counters after ten rounds; all are uint32."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@jit("num")
def words(out, keys, blocks, num, key_step, word_step, BLOCK: tl.constexpr):
    """Put the four words of ``blocks`` of draws from keys (num, 2) into out (num, 4), as int64."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = n < num
    zero = tl.zeros((BLOCK,), tl.uint32)
    k0 = tl.load(keys + n * key_step, mask=live, other=0).to(tl.uint32)
    k1 = tl.load(keys + n * key_step + word_step, mask=live, other=0).to(tl.uint32)
    counter = tl.load(blocks + n, mask=live, other=0).to(tl.uint32)
    w0, w1, w2, w3 = philox(k0, k1, counter, zero, zero, zero)
    tl.store(out + 4 * n, w0.to(tl.int64), mask=live)
    tl.store(out + 4 * n + 1, w1.to(tl.int64), mask=live)
    tl.store(out + 4 * n + 2, w2.to(tl.int64), mask=live)
    tl.store(out + 4 * n + 3, w3.to(tl.int64), mask=live)


@jit()
def pair(first, second):
    """Return √(−2 log u) cos 2πv and √(−2 log u) sin 2πv, where u and v are words as fractions."""
    u = (first.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    v = (second.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt(-2.0 * tl.log(u))
    angle = tl.full(v.shape, 6.283185307179586, tl.float64) * v
    return radius * tl.cos(angle), radius * tl.sin(angle)


@jit()
def put(to, n, num, value):
    """Store the numbers ``n`` of a lane, rounded to float32 on the way to narrower types."""
    if to.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    tl.store(to + n, value.to(to.dtype.element_ty), mask=n < num)


@jit("num", "per_lane")
def normal(out, keys, num, per_lane, lane_step, word_step, BLOCK: tl.constexpr):
    """Draw (L, num) numbers of keys (L, 2); ``per_lane`` programs each draw from BLOCK counters."""
    lane = (tl.program_id(0) // per_lane).to(tl.int64)
    counter = (tl.program_id(0) % per_lane).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros((BLOCK,), tl.uint32)
    at = keys + lane * lane_step
    k0 = tl.load(at).to(tl.uint32)
    k1 = tl.load(at + word_step).to(tl.uint32)
    w0, w1, w2, w3 = philox(k0, k1, counter.to(tl.uint32), zero, zero, zero)
    z0, z1 = pair(w0, w1)
    z2, z3 = pair(w2, w3)
    to, n = out + lane * num, 4 * counter
    put(to, n, num, z0)
    put(to, n + 1, num, z1)
    put(to, n + 2, num, z2)
    put(to, n + 3, num, z3)
