# mypy: ignore-errors
"""The Triton kernels behind ``recurrence``: all steps of an LSTM layer, for some texts of a lane.

Program axis 0 counts the texts, BM a program, axis 1 the lanes. A state has H numbers, filled up to
HP. Without Triton the module can be imported, and nothing in it can be called.
"""

from __future__ import annotations

from sartor.engines.cuda.jit import jit, tl


@jit()
def _tanh(x):
    """Return tanh x; near 0, where one minus one loses digits, by its series."""
    small = x * x
    series = x * (1.0 + small * (-1.0 / 3 + small * (2.0 / 15 - small * (17.0 / 315))))
    return tl.where(small < 0.01, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@jit("given_lane", "weight_lane", "token_lane", "hidden_lane", "cell_lane", "batch")
def recurrence(
    given, weight, is_token, first_hidden, first_cell, outputs, gates, cells, given_lane,
    weight_lane, token_lane, hidden_lane, cell_lane, batch, STEPS: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, BACKWARD: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run the loop: outputs, gates after their functions, and memories of every step."""
    lane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, HP)
    k = tl.arange(0, HP)
    inside = (row < batch)[:, None] & (n < H)[None, :]
    within = (k < H)[:, None] & (n < H)[None, :]
    given += lane * given_lane
    is_token += lane * token_lane
    matrix = weight + lane * weight_lane + n[None, :] * H + k[:, None]
    outputs += lane * batch * STEPS * H
    cells += lane * batch * STEPS * H
    gates += lane * batch * STEPS * 4 * H
    kind = matrix.dtype.element_ty
    start = row[:, None] * H + n[None, :]
    hidden = tl.load(first_hidden + lane * hidden_lane + start, mask=inside, other=0.0)
    cell = tl.load(first_cell + lane * cell_lane + start, mask=inside, other=0.0)
    hidden = hidden.to(tl.float32)
    cell = cell.to(tl.float32)
    for step in range(STEPS):
        t = step
        if BACKWARD:
            t = STEPS - 1 - step
        at = row[:, None] * STEPS + t
        wide = at * (4 * H) + n[None, :]
        thin = at * H + n[None, :]
        there = tl.load(is_token + row * STEPS + t, mask=row < batch, other=0)[:, None] != 0
        state = hidden.to(kind)
        write = tl.load(given + wide, mask=inside, other=0.0).to(tl.float32)
        keep = tl.load(given + wide + H, mask=inside, other=0.0).to(tl.float32)
        new = tl.load(given + wide + 2 * H, mask=inside, other=0.0).to(tl.float32)
        read = tl.load(given + wide + 3 * H, mask=inside, other=0.0).to(tl.float32)
        part = tl.load(matrix, mask=within, other=0.0)
        write = tl.sigmoid(tl.dot(state, part, acc=write, input_precision=PRECISION))
        part = tl.load(matrix + H * H, mask=within, other=0.0)
        keep = tl.sigmoid(tl.dot(state, part, acc=keep, input_precision=PRECISION))
        part = tl.load(matrix + 2 * H * H, mask=within, other=0.0)
        new = _tanh(tl.dot(state, part, acc=new, input_precision=PRECISION))
        part = tl.load(matrix + 3 * H * H, mask=within, other=0.0)
        read = tl.sigmoid(tl.dot(state, part, acc=read, input_precision=PRECISION))
        after = keep * cell + write * new
        hidden = tl.where(there, read * _tanh(after), hidden)
        cell = tl.where(there, after, cell)
        tl.store(gates + wide, write.to(kind), mask=inside)
        tl.store(gates + wide + H, keep.to(kind), mask=inside)
        tl.store(gates + wide + 2 * H, new.to(kind), mask=inside)
        tl.store(gates + wide + 3 * H, read.to(kind), mask=inside)
        tl.store(outputs + thin, hidden.to(kind), mask=inside)
        tl.store(cells + thin, cell.to(kind), mask=inside)


@jit(
    "grad_lane", "last_lane", "weight_lane", "token_lane", "cell_lane", "gates_lane", "cells_lane",
    "batch",
)  # fmt: skip
def recurrence_gradient(
    grad, last, weight, is_token, first_cell, gates, cells, out, to_first_hidden, to_first_cell,
    grad_lane, last_lane, weight_lane, token_lane, cell_lane, gates_lane, cells_lane, batch,
    STEPS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, BACKWARD: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go back: from the gradients of outputs and last memory to that of what was given."""
    lane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.arange(0, HP)
    k = tl.arange(0, HP)
    inside = (row < batch)[:, None] & (n < H)[None, :]
    within = (k < H)[:, None] & (n < H)[None, :]
    grad += lane * grad_lane
    is_token += lane * token_lane
    gates += lane * gates_lane
    cells += lane * cells_lane
    out += lane * batch * STEPS * 4 * H
    matrix = weight + lane * weight_lane + k[:, None] * H + n[None, :]
    kind = matrix.dtype.element_ty
    hidden = tl.zeros((BM, HP), dtype=tl.float32)
    ends = row[:, None] * H + n[None, :]
    memory = tl.load(last + lane * last_lane + ends, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(first_cell + lane * cell_lane + ends, mask=inside, other=0.0).to(tl.float32)
    for step in range(STEPS):
        t = step
        earlier = step + 1
        if not BACKWARD:
            t = STEPS - 1 - step
            earlier = t - 1
        begins = step == STEPS - 1
        at = row[:, None] * STEPS + t
        wide = at * (4 * H) + n[None, :]
        thin = at * H + n[None, :]
        there = tl.load(is_token + row * STEPS + t, mask=row < batch, other=0)[:, None] != 0
        hidden += tl.load(grad + thin, mask=inside, other=0.0).to(tl.float32)
        write = tl.load(gates + wide, mask=inside, other=0.0).to(tl.float32)
        keep = tl.load(gates + wide + H, mask=inside, other=0.0).to(tl.float32)
        new = tl.load(gates + wide + 2 * H, mask=inside, other=0.0).to(tl.float32)
        read = tl.load(gates + wide + 3 * H, mask=inside, other=0.0).to(tl.float32)
        after = _tanh(tl.load(cells + thin, mask=inside, other=0.0).to(tl.float32))
        before = row[:, None] * (STEPS * H) + earlier * H + n[None, :]
        cell = tl.load(cells + before, mask=inside & (begins == 0), other=0.0).to(tl.float32)
        cell = tl.where(begins, first, cell)
        to_cell = memory + hidden * read * (1.0 - after * after)
        to_read = tl.where(there, hidden * after * read * (1.0 - read), 0.0).to(kind)
        to_write = tl.where(there, to_cell * new * write * (1.0 - write), 0.0).to(kind)
        to_keep = tl.where(there, to_cell * cell * keep * (1.0 - keep), 0.0).to(kind)
        to_new = tl.where(there, to_cell * write * (1.0 - new * new), 0.0).to(kind)
        tl.store(out + wide, to_write, mask=inside)
        tl.store(out + wide + H, to_keep, mask=inside)
        tl.store(out + wide + 2 * H, to_new, mask=inside)
        tl.store(out + wide + 3 * H, to_read, mask=inside)
        part = tl.load(matrix, mask=within, other=0.0)
        back = tl.dot(to_write, part, input_precision=PRECISION)
        part = tl.load(matrix + H * H, mask=within, other=0.0)
        back = tl.dot(to_keep, part, acc=back, input_precision=PRECISION)
        part = tl.load(matrix + 2 * H * H, mask=within, other=0.0)
        back = tl.dot(to_new, part, acc=back, input_precision=PRECISION)
        part = tl.load(matrix + 3 * H * H, mask=within, other=0.0)
        back = tl.dot(to_read, part, acc=back, input_precision=PRECISION)
        hidden = tl.where(there, back, hidden)
        memory = tl.where(there, to_cell * keep, memory)
    ends += lane * batch * H
    tl.store(to_first_hidden + ends, hidden.to(kind), mask=inside)
    tl.store(to_first_cell + ends, memory.to(kind), mask=inside)
