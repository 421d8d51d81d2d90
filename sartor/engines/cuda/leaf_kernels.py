# mypy: ignore-errors
"""The Triton kernels behind ``leaves``: one launch for all leaves of a tree, in all lanes.

Tensors come as tuples; program axis 0 counts the blocks of all leaves, axis 1 the lanes. Without
Triton the module can be imported, and nothing in it can be called.
"""

from __future__ import annotations

from sartor.engines.cuda.jit import jit, tl


@jit()
def update(
    out, a, b, c, factor, strength, KIND: tl.constexpr, STEPS: tl.constexpr, SIZES: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make one leaf of two or three: see the function of the same KIND in ``sartor.core.tree``.

    SIZES has the numbers of a lane of every leaf, FIRST the first blocks; and STEPS, for what is
    written and all that is read, the steps of every leaf from lane to lane.
    """
    block = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    scale = tl.load(factor + lane)
    for i in tl.static_range(COUNT):
        if (block >= FIRST[i]) & (block < FIRST[i + 1]):
            n = (block - FIRST[i]) * BLOCK + tl.arange(0, BLOCK)
            inside = n < SIZES[i]
            first = tl.load(a[i] + lane * STEPS[1][i] + n, mask=inside)
            second = tl.load(b[i] + lane * STEPS[2][i] + n, mask=inside)
            if KIND == "addcmul":
                found = first + scale * second
            else:
                third = tl.load(c[i] + lane * STEPS[3][i] + n, mask=inside)
                if KIND == "add_difference":
                    found = first + scale * (second - third)
                else:
                    pull = tl.load(strength + lane)
                    found = first - scale * (second + pull * (first - third))
            tl.store(out[i] + lane * SIZES[i] + n, found, mask=inside)


@jit()
def settle(
    into, values, limit, counter, STEPS: tl.constexpr, SIZES: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy values into buffers in the lanes whose limit is above the counter."""
    block = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    live = tl.load(limit + lane) > tl.load(counter)
    for i in tl.static_range(COUNT):
        if (block >= FIRST[i]) & (block < FIRST[i + 1]):
            n = (block - FIRST[i]) * BLOCK + tl.arange(0, BLOCK)
            inside = (n < SIZES[i]) & live
            value = tl.load(values[i] + lane * STEPS[1][i] + n, mask=inside)
            tl.store(into[i] + lane * STEPS[0][i] + n, value, mask=inside)


@jit("lane_step", "capacity")
def fetch(
    table, counter, period, row_of, x, palette, y, out_x, out_y, out_mask, out_rows, out_last,
    lane_step, capacity, F: tl.constexpr, HAS_ROWS: tl.constexpr, CODED: tl.constexpr,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gather one sample of a batch: its entry of the table, its features, label and place."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    lane = r // SIZE
    j = r % SIZE
    at = tl.load(counter) % tl.load(period)
    entry = table + lane * lane_step + at * COLUMNS
    index = tl.load(entry + j)
    row = index
    if HAS_ROWS:
        row = tl.load(row_of + index)
    f = c * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * F + f, mask=f < F)
    if CODED:
        value = tl.load(palette + value.to(tl.int32), mask=f < F)
    tl.store(out_x + r * F + f, value, mask=f < F)
    if c == 0:
        place = tl.load(entry + SIZE + j)
        tl.store(out_y + r, tl.load(y + index))
        tl.store(out_mask + r, (place >= 0).to(out_mask.dtype.element_ty))
        tl.store(out_rows + r, tl.where(place >= 0, place, capacity))
        if j == 0:
            last = tl.load(entry + COLUMNS - 1) > 0
            tl.store(out_last + lane, last.to(out_last.dtype.element_ty))
