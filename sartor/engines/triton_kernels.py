# mypy: ignore-errors
"""The Triton kernels behind ``triton_conv``: three implicit matrix products and one sum.

Every kernel serves all lanes: program axis 1 is the lane. The products are laid out (channels, positions) so that
neighbouring threads touch neighbouring positions, in loads and in stores. Shapes of an image are compile-time numbers
(divisions become multiplications); batch, lanes and splits are not, so that a new lane width compiles nothing.
Without Triton the module can be imported, and nothing in it can be called.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:  # the caller asks first
    triton = tl = None


def _jit(*plain):
    """Compile with Triton where there is one; ``plain`` names the numbers not to specialise on."""
    return triton.jit(do_not_specialize=list(plain)) if triton is not None else lambda kernel: kernel


@_jit("x_lane", "w_lane", "b_lane", "positions")
def forward(
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
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Convolve: BN output channels at BM output positions of one lane."""
    K: tl.constexpr = C * KH * KW
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    o = tl.program_id(2) * BN + tl.arange(0, BN)
    live = m < positions
    image = m // (HO * WO)
    at = m % (HO * WO)
    top = (at // WO) * SH - PH
    left = (at % WO) * SW - PW
    corner = x + lane * x_lane + (image * (C * H * W) + top * W + left)
    rows = w + lane * w_lane + o * K
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        c = k // (KH * KW)
        i = (k % (KH * KW)) // KW
        j = k % KW
        weights = tl.load(
            rows[:, None] + k[None, :], mask=(o < O)[:, None] & (k < K)[None, :], other=0.0
        )
        seen = (k < K)[:, None] & live[None, :]
        if PH > 0 or PW > 0:
            y = i[:, None] + top[None, :]
            z = j[:, None] + left[None, :]
            seen = seen & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        values = tl.load(
            corner[None, :] + (c * (H * W) + i * W + j)[:, None], mask=seen, other=0.0
        )
        acc = tl.dot(weights, values, acc, input_precision=PRECISION)
    if HAS_BIAS:
        shift = tl.load(b + lane * b_lane + o, mask=o < O, other=0.0).to(tl.float32)
        acc += shift[:, None]
    first = out + lane * positions * O
    into = first + (image * (O * HO * WO) + at)[None, :] + (o * (HO * WO))[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=(o < O)[:, None] & live[None, :])


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

    The loop goes over taps of the kernel, then over blocks of output channels: within one tap the mask depends on the
    position alone, which leaves one addition per element loaded.
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
    plane = g + lane * g_lane + image * (O * HO * WO)
    kernel = w + lane * w_lane + c * (KH * KW)
    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for step in range(0, KH * KW * BLOCKS):
        tap = step // BLOCKS
        o = (step % BLOCKS) * BK + tl.arange(0, BK)
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
        weights = tl.load(
            kernel[:, None] + (o * (C * KH * KW) + tap)[None, :],
            mask=(c < C)[:, None] & (o < O)[None, :],
            other=0.0,
        )
        values = tl.load(
            (plane + y * WO + z)[None, :] + (o * (HO * WO))[:, None],
            mask=(o < O)[:, None] & seen[None, :],
            other=0.0,
        )
        acc = tl.dot(weights, values, acc, input_precision=PRECISION)
    first = out + lane * positions * C
    into = first + (image * (C * H * W) + at)[None, :] + (c * (H * W))[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=(c < C)[:, None] & live[None, :])


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
    """Sum the outer products of patches and gradients over one share of the output positions of a lane.

    The patch has one more entry, which is 1: its column is the gradient of the bias.
    """
    K: tl.constexpr = C * KH * KW
    TILES: tl.constexpr = (K + BK) // BK  # of K + 1 entries
    split = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    k = (tl.program_id(2) % TILES) * BK + tl.arange(0, BK)
    o = (tl.program_id(2) // TILES) * BN + tl.arange(0, BN)
    c = k // (KH * KW)
    i = (k % (KH * KW)) // KW
    j = k % KW
    tap = c * (H * W) + i * W + j
    images = x + lane * x_lane
    grads = g + lane * g_lane
    end = tl.minimum((split + 1) * share, positions)
    acc = tl.zeros((BK, BN), dtype=tl.float32)
    for start in range(split * share, end, BM):
        m = start + tl.arange(0, BM)
        live = m < end
        image = m // (HO * WO)
        at = m % (HO * WO)
        top = (at // WO) * SH - PH
        left = (at % WO) * SW - PW
        slopes = tl.load(
            (grads + image * (O * HO * WO) + at)[None, :] + (o * (HO * WO))[:, None],
            mask=(o < O)[:, None] & live[None, :],
            other=0.0,
        )
        seen = (k < K)[:, None] & live[None, :]
        if PH > 0 or PW > 0:
            y = i[:, None] + top[None, :]
            z = j[:, None] + left[None, :]
            seen = seen & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        corner = images + (image * (C * H * W) + top * W + left)
        values = tl.load(corner[None, :] + tap[:, None], mask=seen, other=0.0)
        values = tl.where((k == K)[:, None], tl.full((BK, BM), 1.0, values.dtype), values)
        acc = tl.dot(values, tl.trans(slopes), acc, input_precision=PRECISION)
    into = partial + (lane * splits + split) * (O * (K + 1)) + k[:, None] + (o * (K + 1))[None, :]
    tl.store(into, acc, mask=(k <= K)[:, None] & (o < O)[None, :])


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
