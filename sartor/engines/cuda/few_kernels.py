# mypy: ignore-errors
"""The Triton kernels behind ``triton_conv`` for few channels, which tensor cores would not fill."""

from __future__ import annotations

from sartor.engines.cuda.jit import jit, tl


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
    lane = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * GROUP
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    live = m < positions
    here = tl.minimum(m, positions - 1)
    image = here // (HO * WO)
    at = here % (HO * WO)
    top = (at // WO) * SH - PH
    left = (at % WO) * SW - PW
    corner = x + lane * x_lane + (image * (C * H * W) + top * W + left)
    w += lane * w_lane + first * K
    a0 = tl.zeros((BM,), dtype=tl.float32)
    a1 = tl.zeros((BM,), dtype=tl.float32)
    a2 = tl.zeros((BM,), dtype=tl.float32)
    a3 = tl.zeros((BM,), dtype=tl.float32)
    a4 = tl.zeros((BM,), dtype=tl.float32)
    a5 = tl.zeros((BM,), dtype=tl.float32)
    a6 = tl.zeros((BM,), dtype=tl.float32)
    a7 = tl.zeros((BM,), dtype=tl.float32)
    for _c in range(0, C):
        for k in tl.static_range(KH * KW):
            place = corner + ((k // KW) * W + k % KW)
            if PH > 0 or PW > 0:
                y = top + k // KW
                z = left + k % KW
                seen = (y >= 0) & (y < H) & (z >= 0) & (z < W)
                value = tl.load(place, mask=seen, other=0.0).to(tl.float32)
            else:
                value = tl.load(place).to(tl.float32)
            a0 += value * tl.load(w + k).to(tl.float32)
            if GROUP > 1:
                a1 += value * tl.load(w + (1 * K + k)).to(tl.float32)
            if GROUP > 2:
                a2 += value * tl.load(w + (2 * K + k)).to(tl.float32)
            if GROUP > 3:
                a3 += value * tl.load(w + (3 * K + k)).to(tl.float32)
            if GROUP > 4:
                a4 += value * tl.load(w + (4 * K + k)).to(tl.float32)
            if GROUP > 5:
                a5 += value * tl.load(w + (5 * K + k)).to(tl.float32)
            if GROUP > 6:
                a6 += value * tl.load(w + (6 * K + k)).to(tl.float32)
            if GROUP > 7:
                a7 += value * tl.load(w + (7 * K + k)).to(tl.float32)
        corner += H * W
        w += KH * KW
    if HAS_BIAS:
        b += lane * b_lane + first
        a0 += tl.load(b).to(tl.float32)
        if GROUP > 1:
            a1 += tl.load(b + 1).to(tl.float32)
        if GROUP > 2:
            a2 += tl.load(b + 2).to(tl.float32)
        if GROUP > 3:
            a3 += tl.load(b + 3).to(tl.float32)
        if GROUP > 4:
            a4 += tl.load(b + 4).to(tl.float32)
        if GROUP > 5:
            a5 += tl.load(b + 5).to(tl.float32)
        if GROUP > 6:
            a6 += tl.load(b + 6).to(tl.float32)
        if GROUP > 7:
            a7 += tl.load(b + 7).to(tl.float32)
    into = out + lane * positions * O + (image * (O * HO * WO) + at + first * (HO * WO))
    tl.store(into, a0.to(out.dtype.element_ty), mask=live)
    if GROUP > 1:
        tl.store(into + 1 * (HO * WO), a1.to(out.dtype.element_ty), mask=live)
    if GROUP > 2:
        tl.store(into + 2 * (HO * WO), a2.to(out.dtype.element_ty), mask=live)
    if GROUP > 3:
        tl.store(into + 3 * (HO * WO), a3.to(out.dtype.element_ty), mask=live)
    if GROUP > 4:
        tl.store(into + 4 * (HO * WO), a4.to(out.dtype.element_ty), mask=live)
    if GROUP > 5:
        tl.store(into + 5 * (HO * WO), a5.to(out.dtype.element_ty), mask=live)
    if GROUP > 6:
        tl.store(into + 6 * (HO * WO), a6.to(out.dtype.element_ty), mask=live)
    if GROUP > 7:
        tl.store(into + 7 * (HO * WO), a7.to(out.dtype.element_ty), mask=live)


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
    a0 = tl.zeros((BM,), dtype=tl.float32)
    a1 = tl.zeros((BM,), dtype=tl.float32)
    a2 = tl.zeros((BM,), dtype=tl.float32)
    a3 = tl.zeros((BM,), dtype=tl.float32)
    a4 = tl.zeros((BM,), dtype=tl.float32)
    a5 = tl.zeros((BM,), dtype=tl.float32)
    a6 = tl.zeros((BM,), dtype=tl.float32)
    a7 = tl.zeros((BM,), dtype=tl.float32)
    for tap in range(0, PLANE):
        y = down - tap // KW
        z = right - tap % KW
        seen = live & (y >= 0) & (z >= 0)
        if SH > 1:
            seen = seen & (y % SH == 0)
            y = y // SH
        if SW > 1:
            seen = seen & (z % SW == 0)
            z = z // SW
        seen = seen & (y < HO) & (z < WO)
        place = planes + (y * WO + z)
        taps = w + tap
        for _ in range(0, O, UNROLL):
            for u in tl.static_range(UNROLL):
                value = tl.load(place + u * (HO * WO), mask=seen, other=0.0).to(tl.float32)
                a0 += value * tl.load(taps + u * (C * PLANE)).to(tl.float32)
                if GROUP > 1:
                    a1 += value * tl.load(taps + (u * (C * PLANE) + 1 * PLANE)).to(tl.float32)
                if GROUP > 2:
                    a2 += value * tl.load(taps + (u * (C * PLANE) + 2 * PLANE)).to(tl.float32)
                if GROUP > 3:
                    a3 += value * tl.load(taps + (u * (C * PLANE) + 3 * PLANE)).to(tl.float32)
                if GROUP > 4:
                    a4 += value * tl.load(taps + (u * (C * PLANE) + 4 * PLANE)).to(tl.float32)
                if GROUP > 5:
                    a5 += value * tl.load(taps + (u * (C * PLANE) + 5 * PLANE)).to(tl.float32)
                if GROUP > 6:
                    a6 += value * tl.load(taps + (u * (C * PLANE) + 6 * PLANE)).to(tl.float32)
                if GROUP > 7:
                    a7 += value * tl.load(taps + (u * (C * PLANE) + 7 * PLANE)).to(tl.float32)
            place += UNROLL * (HO * WO)
            taps += UNROLL * (C * PLANE)
    into = out + lane * positions * C + (image * (C * H * W) + at + first * (H * W))
    tl.store(into, a0.to(out.dtype.element_ty), mask=live)
    if GROUP > 1:
        tl.store(into + 1 * (H * W), a1.to(out.dtype.element_ty), mask=live)
    if GROUP > 2:
        tl.store(into + 2 * (H * W), a2.to(out.dtype.element_ty), mask=live)
    if GROUP > 3:
        tl.store(into + 3 * (H * W), a3.to(out.dtype.element_ty), mask=live)
    if GROUP > 4:
        tl.store(into + 4 * (H * W), a4.to(out.dtype.element_ty), mask=live)
    if GROUP > 5:
        tl.store(into + 5 * (H * W), a5.to(out.dtype.element_ty), mask=live)
    if GROUP > 6:
        tl.store(into + 6 * (H * W), a6.to(out.dtype.element_ty), mask=live)
    if GROUP > 7:
        tl.store(into + 7 * (H * W), a7.to(out.dtype.element_ty), mask=live)


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
