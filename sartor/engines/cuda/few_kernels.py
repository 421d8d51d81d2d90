# mypy: ignore-errors
"""The Triton kernels behind ``triton_conv`` for few channels, which tensor cores would not fill."""

from __future__ import annotations

from sartor.engines.cuda.conv_kernels import output_at, read, window
from sartor.engines.cuda.jit import jit, tl


@jit()
def add_products(a0, a1, a2, a3, a4, a5, a6, a7, value, w, STEP: tl.constexpr, GROUP: tl.constexpr):
    """Add to the sums of GROUP channels a value times the weight of each."""
    a0 += value * tl.load(w).to(tl.float32)
    if GROUP > 1:
        a1 += value * tl.load(w + 1 * STEP).to(tl.float32)
    if GROUP > 2:
        a2 += value * tl.load(w + 2 * STEP).to(tl.float32)
    if GROUP > 3:
        a3 += value * tl.load(w + 3 * STEP).to(tl.float32)
    if GROUP > 4:
        a4 += value * tl.load(w + 4 * STEP).to(tl.float32)
    if GROUP > 5:
        a5 += value * tl.load(w + 5 * STEP).to(tl.float32)
    if GROUP > 6:
        a6 += value * tl.load(w + 6 * STEP).to(tl.float32)
    if GROUP > 7:
        a7 += value * tl.load(w + 7 * STEP).to(tl.float32)
    return a0, a1, a2, a3, a4, a5, a6, a7


@jit()
def put(into, a0, a1, a2, a3, a4, a5, a6, a7, live, STEP: tl.constexpr, GROUP: tl.constexpr):
    """Store the sums of GROUP channels."""
    kind = into.dtype.element_ty
    tl.store(into, a0.to(kind), mask=live)
    if GROUP > 1:
        tl.store(into + 1 * STEP, a1.to(kind), mask=live)
    if GROUP > 2:
        tl.store(into + 2 * STEP, a2.to(kind), mask=live)
    if GROUP > 3:
        tl.store(into + 3 * STEP, a3.to(kind), mask=live)
    if GROUP > 4:
        tl.store(into + 4 * STEP, a4.to(kind), mask=live)
    if GROUP > 5:
        tl.store(into + 5 * STEP, a5.to(kind), mask=live)
    if GROUP > 6:
        tl.store(into + 6 * STEP, a6.to(kind), mask=live)
    if GROUP > 7:
        tl.store(into + 7 * STEP, a7.to(kind), mask=live)


@jit("x_lane", "w_lane", "b_lane", "positions")
def forward_few(
    x, w, b, out, x_lane, w_lane, b_lane, positions, C: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,  # noqa: E741
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, HO: tl.constexpr,
    WO: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Convolve into few channels: a thread has up to eight channels of its positions.

    Splitting numbers for tensor cores costs more than the products while channels are few. GROUP
    is a divisor of O, at most eight; program axis 2 counts the groups.
    """
    K: tl.constexpr = C * KH * KW
    PADDED: tl.constexpr = PH > 0 or PW > 0
    lane = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * GROUP
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    live = m < positions
    image, at, top, left = window(tl.minimum(m, positions - 1), SH, SW, PH, PW, HO, WO)
    corner = x + lane * x_lane + (image * (C * H * W) + top * W + left)
    w += lane * w_lane + first * K
    zero = tl.zeros((BM,), dtype=tl.float32)
    a0, a1, a2, a3 = zero, zero, zero, zero
    a4, a5, a6, a7 = zero, zero, zero, zero
    for _c in range(0, C):
        for k in tl.static_range(KH * KW):
            place = corner + ((k // KW) * W + k % KW)
            value = read(place, top + k // KW, left + k % KW, H, W, PADDED).to(tl.float32)
            a0, a1, a2, a3, a4, a5, a6, a7 = add_products(
                a0, a1, a2, a3, a4, a5, a6, a7, value, w + k, K, GROUP
            )
        corner += H * W
        w += KH * KW
    if HAS_BIAS:
        b += lane * b_lane + first
        a0, a1, a2, a3, a4, a5, a6, a7 = add_products(
            a0, a1, a2, a3, a4, a5, a6, a7, 1.0, b, 1, GROUP
        )
    into = out + lane * positions * O + (image * (O * HO * WO) + at + first * (HO * WO))
    put(into, a0, a1, a2, a3, a4, a5, a6, a7, live, HO * WO, GROUP)


@jit("g_lane", "w_lane", "positions")
def input_grad_few(
    g, w, out, g_lane, w_lane, positions, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,  # noqa: E741
    SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    GROUP: tl.constexpr, BM: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Gather the gradient of few input channels: a thread has up to eight of its positions.

    GROUP is a divisor of C, UNROLL one of O; program axis 2 counts the groups.
    """
    PLANE: tl.constexpr = KH * KW
    lane = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * GROUP
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    live = m < positions
    image = m // (H * W)
    at = m % (H * W)
    down = at // W + PH
    right = at % W + PW
    planes = g + lane * g_lane + image * (O * HO * WO)
    w += lane * w_lane + first * PLANE
    zero = tl.zeros((BM,), dtype=tl.float32)
    a0, a1, a2, a3 = zero, zero, zero, zero
    a4, a5, a6, a7 = zero, zero, zero, zero
    for tap in range(0, PLANE):
        y, z, seen = output_at(down - tap // KW, right - tap % KW, live, SH, SW, HO, WO)
        place = planes + (y * WO + z)
        taps = w + tap
        for _ in range(0, O, UNROLL):
            for u in tl.static_range(UNROLL):
                value = tl.load(place + u * (HO * WO), mask=seen, other=0.0).to(tl.float32)
                a0, a1, a2, a3, a4, a5, a6, a7 = add_products(
                    a0, a1, a2, a3, a4, a5, a6, a7, value, taps + u * (C * PLANE), PLANE, GROUP
                )
            place += UNROLL * (HO * WO)
            taps += UNROLL * (C * PLANE)
    into = out + lane * positions * C + (image * (C * H * W) + at + first * (H * W))
    put(into, a0, a1, a2, a3, a4, a5, a6, a7, live, H * W, GROUP)


@jit("x_lane", "g_lane", "positions", "places", "share", "splits")
def weight_grad_rows(
    x, g, partial, x_lane, g_lane, positions, places, share, splits, C: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr,  # noqa: E741
    KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum like ``weight_grad``, with the columns of a kernel on the side of the gradients.

    The sum over a row of the input, dW[o, c, i, j] = Σ x[c, y + i, q] · g[o, y, q − j], is a
    product of the C·KH rows with the O·KW shifted gradients at (image, y, q). Few channels fill a
    tile of it better than one of C·KH·KW by O, and fewer numbers are fetched. The last program of
    axis 2 sums the gradients, for the bias. The stride to the right is 1.
    """
    K: tl.constexpr = C * KH * KW
    R: tl.constexpr = C * KH
    S: tl.constexpr = O * KW
    ACROSS: tl.constexpr = (S + BN - 1) // BN
    TILES: tl.constexpr = ((R + BK - 1) // BK) * ACROSS
    split = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    x += lane * x_lane
    g += lane * g_lane
    partial += (lane * splits + split) * (O * (K + 1))
    if tile == TILES:
        output = tl.arange(0, BO)
        plane = tl.minimum(output, O - 1) * (HO * WO)
        each = (positions + splits - 1) // splits
        stop = tl.minimum((split + 1) * each, positions)
        plain = tl.zeros((BM, BO), dtype=tl.float32)
        for start in range(split * each, stop, BM):
            m = start + tl.arange(0, BM)
            place = g + ((m // (HO * WO)) * (O * HO * WO) + m % (HO * WO))
            found = tl.load(place[:, None] + plane[None, :], mask=(m < stop)[:, None], other=0.0)
            plain += found.to(tl.float32)
        tl.store(partial + (output * (K + 1) + K), tl.sum(plain, axis=0), mask=output < O)
    else:
        r = (tile // ACROSS) * BK + tl.arange(0, BK)
        row = tl.minimum(r, R - 1)
        down = row % KH - PH
        line = (row // KH * H + down) * W
        s = (tile % ACROSS) * BN + tl.arange(0, BN)
        column = tl.minimum(s, S - 1)
        o = column // KW
        j = column % KW - PW
        shift = o * (HO * WO) - j
        end = tl.minimum((split + 1) * share, places)
        acc = tl.zeros((BK, BN), dtype=tl.float32)
        for start in range(split * share, end, BM):
            m = start + tl.arange(0, BM)
            here = tl.minimum(m, end - 1)
            q = here % W
            y = (here // W) % HO
            image = here // (W * HO)
            top = y * SH
            into = (image * (C * H * W) + top * W + q)[:, None] + line[None, :]
            if PH > 0:
                level = top[:, None] + down[None, :]
                values = tl.load(x + into, mask=(level >= 0) & (level < H), other=0.0)
            else:
                values = tl.load(x + into)
            z = q[:, None] - j[None, :]
            seen = (z >= 0) & (z < WO) & (m < end)[:, None]
            at = (image * (O * HO * WO) + y * WO + q)[:, None] + shift[None, :]
            slopes = tl.load(g + at, mask=seen, other=0.0)
            acc = tl.dot(tl.trans(values), slopes, acc, input_precision=PRECISION)
        # r · KW is where row r begins among the taps of a kernel.
        to = (r * KW)[:, None] + (s // KW * (K + 1) + s % KW)[None, :]
        tl.store(partial + to, acc, mask=(r < R)[:, None] & (s < S)[None, :])
