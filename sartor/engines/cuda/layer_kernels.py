# mypy: ignore-errors
"""The Triton kernels behind ``dense``, ``losses`` and ``pooling``, for all lanes.

Without Triton the module can be imported, and nothing in it can be called.
"""

from __future__ import annotations

from sartor.engines.cuda.jit import jit, tl


@jit("a_lane", "b_lane", "bias_lane", "share")
def product(
    a, b, bias, out, sums, a_lane, b_lane, bias_lane, M, N, K, share, am, ak, bk,
    bn, HAS_BIAS: tl.constexpr,
    SUMS: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a (M, K) by b (K, N) in every lane; add a row, or sum each row of a.

    With more SPLITS than one, each program multiplies ``share`` columns of a, and ``out`` gets one
    product for each split.
    """
    lane = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(N, BN)
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    a += lane * a_lane
    b += lane * b_lane
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    begin, end = 0, K
    if SPLITS > 1:
        begin = tl.program_id(2) * share
        end = tl.minimum(begin + share, K)
        out += tl.program_id(2) * M * N + lane * (SPLITS - 1) * M * N
    for start in range(begin, end, BK):
        k = start + tl.arange(0, BK)
        inside = (m < M)[:, None] & (k < end)[None, :]
        at = m[:, None] * am + k[None, :] * ak
        left = tl.load(a + at, mask=inside, other=0.0)
        right = tl.load(
            b + (k[:, None] * bk + n[None, :] * bn),
            mask=(k < end)[:, None] & (n < N)[None, :],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    if HAS_BIAS:
        shift = tl.load(bias + lane * bias_lane + n, mask=n < N, other=0.0).to(tl.float32)
        acc += shift[None, :]
    into = out + lane * M * N + (m[:, None] * N + n[None, :])
    tl.store(into, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
    if SUMS:  # noqa: SIM102 (known when this is compiled)
        # By one program of a row of tiles, after its product: a sum inside the loop above would
        # make every program exchange numbers between its threads.
        if tl.program_id(0) % tiles == 0:
            plain = tl.zeros((BM,), dtype=tl.float32)
            for start in range(0, K, BK):
                k = start + tl.arange(0, BK)
                inside = (m < M)[:, None] & (k < K)[None, :]
                at = m[:, None] * am + k[None, :] * ak
                left = tl.load(a + at, mask=inside, other=0.0)
                plain += tl.sum(left.to(tl.float32), axis=1)
            tl.store(sums + lane * M + m, plain.to(sums.dtype.element_ty), mask=m < M)


@jit("rows")
def cross_entropy(
    scores, y, slope, out, rows, C: tl.constexpr, IGNORE: tl.constexpr, GRAD: tl.constexpr,
    BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Return −log softmax at the label of every row, or that loss's gradient times ``slope``."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    live = r < rows
    places = r[:, None] * C + c[None, :]
    inside = live[:, None] & (c < C)[None, :]
    values = tl.load(scores + places, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.where(live[:, None], values, 0.0)
    label = tl.load(y + r, mask=live, other=0)
    top = tl.max(values, axis=1)
    powers = tl.exp(values - top[:, None])
    total = tl.sum(powers, axis=1)
    here = c[None, :] == label[:, None]
    if GRAD:
        given = tl.load(slope + r, mask=live, other=0.0).to(tl.float32)
        found = (powers / total[:, None] - tl.where(here, 1.0, 0.0)) * given[:, None]
        found = tl.where((label == IGNORE)[:, None], 0.0, found)
        tl.store(out + places, found.to(out.dtype.element_ty), mask=inside)
    else:
        at = tl.sum(tl.where(here, values, 0.0), axis=1)
        loss = tl.where(label == IGNORE, 0.0, tl.log(total) + top - at)
        tl.store(out + r, loss.to(out.dtype.element_ty), mask=live)


@jit("total")
def pool(
    x, grad, out, total, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, GRAD: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the largest value of every window; or give its gradient to the first that has it.

    Places are 64-bit numbers only where they must be: they cost twice the arithmetic.
    """
    first = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    n = first * BLOCK + tl.arange(0, BLOCK)
    live = n < total
    plane = n // (HO * WO)
    at = n % (HO * WO)
    corner = plane * (H * W) + (at // WO) * (KH * W) + (at % WO) * KW
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), dtype=tl.int32)
    for k in tl.static_range(KH * KW):
        value = tl.load(x + corner + ((k // KW) * W + k % KW), mask=live, other=0.0)
        value = value.to(tl.float32)
        larger = (value > best) | (value != value)
        best = tl.where(larger, value, best)
        where = tl.where(larger, k, where)
    if GRAD:
        slope = tl.load(grad + n, mask=live, other=0.0)
        for k in tl.static_range(KH * KW):
            into = out + corner + ((k // KW) * W + k % KW)
            tl.store(into, tl.where(where == k, slope, 0.0).to(out.dtype.element_ty), mask=live)
    else:
        tl.store(out + n, best.to(out.dtype.element_ty), mask=live)


@jit("size")
def mean(
    values, mask, slope, out, values_lane, mask_lane, size, GRAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Average the values under a mask in every lane; or spread a gradient over them."""
    lane = tl.program_id(0).to(tl.int64)
    count = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        n = start + tl.arange(0, BLOCK)
        weight = tl.load(mask + lane * mask_lane + n, mask=n < size, other=0).to(tl.float32)
        count += weight
        if not GRAD:
            value = tl.load(values + lane * values_lane + n, mask=n < size, other=0.0)
            total += value.to(tl.float32) * weight
    number = tl.maximum(tl.sum(count, axis=0), 1.0)
    if GRAD:
        share = tl.load(slope + lane).to(tl.float32) / number
        for start in range(0, size, BLOCK):
            n = start + tl.arange(0, BLOCK)
            weight = tl.load(mask + lane * mask_lane + n, mask=n < size, other=0).to(tl.float32)
            tl.store(out + lane * size + n, (share * weight).to(out.dtype.element_ty), n < size)
    else:
        tl.store(out + lane, (tl.sum(total, axis=0) / number).to(out.dtype.element_ty))
