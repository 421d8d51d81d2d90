# mypy: ignore-errors
"""The Triton kernels behind ``triton_conv``: three implicit matrix products and one sum.

Every kernel serves all lanes: program axis 1 is the lane. Tiles are laid out (positions, channels):
where Triton can prove no axis of a tile contiguous, it gives neighbouring threads neighbouring
places of the first axis, and positions are the axis that is contiguous in memory. Shapes of an
image are compile-time numbers (divisions become multiplications); batch, lanes and splits are not,
so that a new lane width compiles at most another tile. What lies outside the tensors is read at the
nearest place inside and met with a weight or a gradient of zero, or not stored: that spares most
masks, which cost more than the products. Without Triton the module can be imported, and nothing in
it can be called.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # the caller asks first
    triton = tl = None


def _jit(*plain):
    """Compile with Triton where there is one; ``plain`` names the numbers not to specialise on."""
    return (
        triton.jit(do_not_specialize=list(plain)) if triton is not None else lambda kernel: kernel
    )


@_jit("x_lane", "w_lane", "b_lane", "positions", "patch")
def forward(
    x,
    w,
    b,
    out,
    x_lane,
    w_lane,
    b_lane,
    positions,
    patch,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Convolve: BN output channels at BM output positions of one lane.

    ``patch`` is K once more, as a number of run time. A loop of known length is unrolled, and the
    places of a patch become constants: half the instructions, while the cache holds them.
    """
    K: tl.constexpr = C * KH * KW
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(2) * BN + tl.arange(0, BN)
    here = tl.minimum(m, positions - 1)
    image = here // (HO * WO)
    at = here % (HO * WO)
    top = (at // WO) * SH - PH
    left = (at % WO) * SW - PW
    corner = image * (C * H * W) + top * W + left
    row = tl.minimum(o, O - 1) * K
    x += lane * x_lane
    w += lane * w_lane
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if K <= 192:  # noqa: SIM108 (the two have different types)
        end = K
    else:
        end = patch
    for start in range(0, end, BK):
        k = start + tl.arange(0, BK)
        if K % BK == 0:
            weights = tl.load(w + (k[:, None] + row[None, :]))
        else:
            weights = tl.load(w + (k[:, None] + row[None, :]), mask=(k < K)[:, None], other=0.0)
            k = tl.minimum(k, K - 1)
        i = (k % (KH * KW)) // KW
        j = k % KW
        places = corner[:, None] + ((k // (KH * KW)) * (H * W) + i * W + j)[None, :]
        if PH > 0 or PW > 0:
            y = top[:, None] + i[None, :]
            z = left[:, None] + j[None, :]
            seen = (y >= 0) & (y < H) & (z >= 0) & (z < W)
            values = tl.load(x + places, mask=seen, other=0.0)
        else:
            values = tl.load(x + places)
        acc = tl.dot(values, weights, acc, input_precision=PRECISION)
    if HAS_BIAS:
        shift = tl.load(b + lane * b_lane + o, mask=o < O, other=0.0).to(tl.float32)
        acc += shift[None, :]
    out += lane * positions * O
    into = out + ((image * (O * HO * WO) + at)[:, None] + (o * (HO * WO))[None, :])
    tl.store(into, acc.to(out.dtype.element_ty), mask=(m < positions)[:, None] & (o < O)[None, :])


@_jit("g_lane", "w_lane", "positions")
def input_grad(
    g,
    w,
    out,
    g_lane,
    w_lane,
    positions,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gather the gradient of BN input channels at BM input positions of one lane.

    The loop goes over taps of the kernel, then over blocks of output channels: within one tap the
    mask depends on the position alone, and elements cost no arithmetic of their own.
    """
    BLOCKS: tl.constexpr = (O + BK - 1) // BK
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(2) * BN + tl.arange(0, BN)
    live = m < positions
    image = m // (H * W)
    at = m % (H * W)
    down = at // W + PH
    right = at % W + PW
    plane = image * (O * HO * WO)
    kernel = tl.minimum(c, C - 1) * (KH * KW)
    g += lane * g_lane
    w += lane * w_lane
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, KH * KW * BLOCKS):
        tap = step // BLOCKS
        first = (step % BLOCKS) * BK
        o = first + tl.arange(0, BK)
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
        taps = (o * (C * KH * KW) + tap)[:, None] + kernel[None, :]
        # Addresses of positions plus constants per channel: the constants go into the instructions.
        if O % BK == 0:
            weights = tl.load(w + taps)
            o = tl.arange(0, BK)
        else:
            weights = tl.load(w + taps, mask=(o < O)[:, None], other=0.0)
            o = tl.minimum(tl.arange(0, BK), O - 1 - first)
        places = g + (plane + first * (HO * WO) + y * WO + z)
        values = tl.load(places[:, None] + (o * (HO * WO))[None, :], mask=seen[:, None], other=0.0)
        acc = tl.dot(values, weights, acc, input_precision=PRECISION)
    out += lane * positions * C
    into = out + ((image * (C * H * W) + at)[:, None] + (c * (H * W))[None, :])
    tl.store(into, acc.to(out.dtype.element_ty), mask=live[:, None] & (c < C)[None, :])


@_jit("x_lane", "g_lane", "positions", "share", "splits")
def weight_grad(
    x,
    g,
    partial,
    x_lane,
    g_lane,
    positions,
    share,
    splits,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum the outer products of patches and gradients over one share of a lane's output positions.

    One more program sums the gradients themselves, for the bias: a column after those of the
    kernel. (Summed beside the products, they would be put into shared memory in an order that
    makes the threads collide.)
    """
    K: tl.constexpr = C * KH * KW
    TILES: tl.constexpr = (K + BK - 1) // BK
    split = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2) % (TILES + 1)
    o = (tl.program_id(2) // (TILES + 1)) * BN + tl.arange(0, BN)
    channel = tl.minimum(o, O - 1) * (HO * WO)
    x += lane * x_lane
    g += lane * g_lane
    partial += (lane * splits + split) * (O * (K + 1))
    end = tl.minimum((split + 1) * share, positions)
    if tile == TILES:
        plain = tl.zeros((BM, BN), dtype=tl.float32)
        for start in range(split * share, end, BM):
            m = start + tl.arange(0, BM)
            place = g + ((m // (HO * WO)) * (O * HO * WO) + m % (HO * WO))
            slopes = tl.load(place[:, None] + channel[None, :], mask=(m < end)[:, None], other=0.0)
            plain += slopes.to(tl.float32)
        tl.store(partial + (o * (K + 1) + K), tl.sum(plain, axis=0), mask=o < O)
    else:
        k = tile * BK + tl.arange(0, BK)
        inside = tl.minimum(k, K - 1)
        i = (inside % (KH * KW)) // KW
        j = inside % KW
        tap = (inside // (KH * KW)) * (H * W) + i * W + j
        acc = tl.zeros((BK, BN), dtype=tl.float32)
        for start in range(split * share, end, BM):
            m = start + tl.arange(0, BM)
            here = tl.minimum(m, end - 1)
            image = here // (HO * WO)
            at = here % (HO * WO)
            top = (at // WO) * SH - PH
            left = (at % WO) * SW - PW
            place = g + (image * (O * HO * WO) + at)
            slopes = tl.load(place[:, None] + channel[None, :], mask=(m < end)[:, None], other=0.0)
            places = (image * (C * H * W) + top * W + left)[:, None] + tap[None, :]
            if PH > 0 or PW > 0:
                y = top[:, None] + i[None, :]
                z = left[:, None] + j[None, :]
                seen = (y >= 0) & (y < H) & (z >= 0) & (z < W)
                values = tl.load(x + places, mask=seen, other=0.0)
            else:
                values = tl.load(x + places)
            acc = tl.dot(tl.trans(values), slopes, acc, input_precision=PRECISION)
        into = partial + (k[:, None] + (o * (K + 1))[None, :])
        tl.store(into, acc, mask=(k < K)[:, None] & (o < O)[None, :])


@_jit("x_lane", "g_lane", "positions", "places", "share", "splits")
def weight_grad_rows(
    x,
    g,
    partial,
    x_lane,
    g_lane,
    positions,
    places,
    share,
    splits,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    BO: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
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


@_jit("splits")
def sum_splits(
    partial,
    to_weight,
    to_bias,
    splits,
    K: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the shares of a lane, always in the same order, and part kernel and bias."""
    SIZE: tl.constexpr = O * (K + 1)
    lane = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, SPLITS)
    shares = tl.load(
        partial + lane * splits * SIZE + s[:, None] * SIZE + n[None, :],
        mask=(s < splits)[:, None] & (n < SIZE)[None, :],
        other=0.0,
    )
    total = tl.sum(shares, axis=0)
    o = n // (K + 1)
    k = n % (K + 1)
    tl.store(
        to_weight + lane * (O * K) + o * K + k,
        total.to(to_weight.dtype.element_ty),
        mask=(n < SIZE) & (k < K),
    )
    tl.store(
        to_bias + lane * O + o,
        total.to(to_bias.dtype.element_ty),
        mask=(n < SIZE) & (k == K),
    )


@_jit("x_lane", "w_lane", "b_lane", "positions")
def forward_few(
    x,
    w,
    b,
    out,
    x_lane,
    w_lane,
    b_lane,
    positions,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
):
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


@_jit("g_lane", "w_lane", "positions")
def input_grad_few(
    g,
    w,
    out,
    g_lane,
    w_lane,
    positions,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    HO: tl.constexpr,
    WO: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    UNROLL: tl.constexpr,
):
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
