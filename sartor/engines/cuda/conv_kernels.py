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

from sartor.engines.cuda.jit import jit, tl


@jit()
def window(
    m, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, HO: tl.constexpr,
    WO: tl.constexpr,
):  # fmt: skip
    """Return image and place of output positions, and where their windows begin."""
    image = m // (HO * WO)
    at = m % (HO * WO)
    return image, at, (at // WO) * SH - PH, (at % WO) * SW - PW


@jit()
def read(places, y, z, H: tl.constexpr, W: tl.constexpr, PADDED: tl.constexpr):
    """Load numbers of images; PADDED: what lies outside, by its row and column, is 0."""
    if PADDED:
        seen = (y >= 0) & (y < H) & (z >= 0) & (z < W)
        values = tl.load(places, mask=seen, other=0.0)
    else:
        values = tl.load(places)
    return values


@jit()
def output_at(y, z, live, SH: tl.constexpr, SW: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr):
    """Return row and column of the outputs whose windows begin at (y, z), and which there are."""
    seen = live & (y >= 0) & (z >= 0)
    if SH > 1:
        seen = seen & (y % SH == 0)
        y = y // SH
    if SW > 1:
        seen = seen & (z % SW == 0)
        z = z // SW
    return y, z, seen & (y < HO) & (z < WO)


@jit("x_lane", "w_lane", "b_lane", "positions", "patch")
def forward(
    x, w, b, out, x_lane, w_lane, b_lane, positions, patch, C: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,  # noqa: E741
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, HO: tl.constexpr,
    WO: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolve: BN output channels at BM output positions of one lane.

    Where blocks of channels are whole, the loop goes over taps of the kernel, then over blocks, as
    in ``input_grad``. Else it goes over the patch, and ``patch`` is K once more, as a number of run
    time: a loop of known length is unrolled, and the places of a patch become constants, half the
    instructions, while the cache holds them.
    """
    K: tl.constexpr = C * KH * KW
    BLOCKS: tl.constexpr = C // BK
    PADDED: tl.constexpr = PH > 0 or PW > 0
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(2) * BN + tl.arange(0, BN)
    image, at, top, left = window(tl.minimum(m, positions - 1), SH, SW, PH, PW, HO, WO)
    corner = image * (C * H * W) + top * W + left
    row = tl.minimum(o, O - 1) * K
    x += lane * x_lane
    w += lane * w_lane
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if C % BK == 0:
        c = tl.arange(0, BK)
        for step in range(0, KH * KW * BLOCKS):
            tap = step // BLOCKS
            first = (step % BLOCKS) * BK
            taps = first * (KH * KW) + tap + (c * (KH * KW))[:, None] + row[None, :]
            weights = tl.load(w + taps)
            places = x + (corner + first * (H * W) + (tap // KW) * W + tap % KW)
            places = places[:, None] + (c * (H * W))[None, :]
            y, z = (top + tap // KW)[:, None], (left + tap % KW)[:, None]
            values = read(places, y, z, H, W, PADDED)
            acc = tl.dot(values, weights, acc, input_precision=PRECISION)
    else:
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
            y, z = top[:, None] + i[None, :], left[:, None] + j[None, :]
            values = read(x + places, y, z, H, W, PADDED)
            acc = tl.dot(values, weights, acc, input_precision=PRECISION)
    if HAS_BIAS:
        shift = tl.load(b + lane * b_lane + o, mask=o < O, other=0.0).to(tl.float32)
        acc += shift[None, :]
    out += lane * positions * O
    into = out + ((image * (O * HO * WO) + at)[:, None] + (o * (HO * WO))[None, :])
    tl.store(into, acc.to(out.dtype.element_ty), mask=(m < positions)[:, None] & (o < O)[None, :])


@jit("g_lane", "w_lane", "positions")
def input_grad(
    g, w, out, g_lane, w_lane, positions, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr,  # noqa: E741
    SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        y, z, seen = output_at(down - tap // KW, right - tap % KW, live, SH, SW, HO, WO)
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


@jit("x_lane", "g_lane", "positions", "share", "splits")
def weight_grad(
    x, g, partial, x_lane, g_lane, positions, share, splits, C: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,  # noqa: E741
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, HO: tl.constexpr,
    WO: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum the outer products of patches and gradients over one share of a lane's output positions.

    One more program sums the gradients themselves, for the bias: a column after those of the
    kernel. (Summed beside the products, they would be put into shared memory in an order that
    makes the threads collide.)
    """
    K: tl.constexpr = C * KH * KW
    TILES: tl.constexpr = (K + BK - 1) // BK
    PADDED: tl.constexpr = PH > 0 or PW > 0
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
            image, at, top, left = window(tl.minimum(m, end - 1), SH, SW, PH, PW, HO, WO)
            place = g + (image * (O * HO * WO) + at)
            slopes = tl.load(place[:, None] + channel[None, :], mask=(m < end)[:, None], other=0.0)
            places = (image * (C * H * W) + top * W + left)[:, None] + tap[None, :]
            y, z = top[:, None] + i[None, :], left[:, None] + j[None, :]
            values = read(x + places, y, z, H, W, PADDED)
            acc = tl.dot(tl.trans(values), slopes, acc, input_precision=PRECISION)
        into = partial + (k[:, None] + (o * (K + 1))[None, :])
        tl.store(into, acc, mask=(k < K)[:, None] & (o < O)[None, :])


@jit("splits")
def sum_splits(
    partial, to_weight, to_bias, splits, K: tl.constexpr, O: tl.constexpr,  # noqa: E741
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    tl.store(to_bias + lane * O + o, total.to(to_bias.dtype.element_ty), mask=(n < SIZE) & (k == K))
