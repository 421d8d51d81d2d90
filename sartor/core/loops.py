"""Recurrent layers as loops over steps, which can be mapped over clients; fused ones cannot.

The loop of an LSTM layer, with all its inputs multiplied at once before it (the four quarters of
the gates in this order):

    i, f, g, o = W_ih x_t + b_ih + W_hh h_{t−1} + b_hh
    c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
    h_t = σ(o) ⊙ tanh(c_t)

of a GRU layer (three thirds):

    r, z = σ(W_i x_t + b_i + W_h h_{t−1} + b_h)
    n = tanh(W_in x_t + b_in + r ⊙ (W_hn h_{t−1} + b_hn))
    h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

and of a plain one: h_t = φ(W_ih x_t + b_ih + W_hh h_{t−1} + b_hh), with φ = tanh or ReLU.

``looped`` lets ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` of a user's network run so: the same
parameters, the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import handle_torch_function, has_torch_function

from sartor.core.errors import ModelError


def lstm_loop(
    given: Tensor,
    weight: Tensor,
    is_token: Tensor,
    backward: bool = False,
    start: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the loop of an LSTM layer; an engine may catch the call, as torch's own.

    Args:
        given: ``(batch, steps, 4 · hidden)`` W_ih x_t + b_ih + b_hh.
        weight: ``(4 · hidden, hidden)`` W_hh.
        is_token: ``(batch, steps)`` which steps count; the others leave the state as it is.
        backward: whether to begin with the last step.
        start: the first output and memory ``(batch, hidden)``, if they are not zero.

    Returns:
        The outputs ``(batch, steps, hidden)`` and the last memory ``(batch, hidden)``.
    """
    if has_torch_function((given, weight, is_token)):
        tensors = (given, weight, is_token)
        found: tuple[Tensor, Tensor] = handle_torch_function(
            lstm_loop, tensors, *tensors, backward, start
        )
        return found
    zero = given.new_zeros(()).expand(given.shape[0], weight.shape[1])
    hidden, cell = (zero, zero) if start is None else start
    # Unbound at once: the gradient of a slice is as large as the whole, one for every step.
    steps = list(zip(given.unbind(1), is_token.unsqueeze(-1).unbind(1), strict=True))
    outputs = []
    for step, there in reversed(steps) if backward else steps:
        gates = step + F.linear(hidden, weight)
        write, keep, new, read = gates.chunk(4, dim=-1)
        after = torch.sigmoid(keep) * cell + torch.sigmoid(write) * torch.tanh(new)
        hidden = torch.where(there, torch.sigmoid(read) * torch.tanh(after), hidden)
        cell = torch.where(there, after, cell)
        outputs.append(hidden)
    return _in_order(outputs, backward), cell


def _gru_loop(given: Tensor, weight: Tensor, bias: Tensor | None, backward: bool, h: Any) -> Tensor:
    outputs = []
    for step in _from(given.unbind(1), backward):
        reset, update, new = step.chunk(3, dim=-1)
        own_reset, own_update, own_new = F.linear(h, weight, bias).chunk(3, dim=-1)
        new = torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new)
        gate = torch.sigmoid(update + own_update)
        h = (1.0 - gate) * new + gate * h
        outputs.append(h)
    return _in_order(outputs, backward)


def _plain_loop(given: Tensor, weight: Tensor, backward: bool, h: Any, phi: Any) -> Tensor:
    outputs = []
    for step in _from(given.unbind(1), backward):
        h = phi(step + F.linear(h, weight))
        outputs.append(h)
    return _in_order(outputs, backward)


def _from(steps: Iterable[Tensor], backward: bool) -> Iterable[Tensor]:
    return reversed(list(steps)) if backward else steps


def _in_order(outputs: list[Tensor], backward: bool) -> Tensor:
    return torch.stack(outputs[::-1] if backward else outputs, dim=1)


# ---- layers of torch -------------------------------------------------------------------------


_KINDS = (nn.LSTM, nn.GRU, nn.RNN)


def loop_fault(layer: nn.RNNBase) -> str | None:
    """Say why a recurrent layer cannot train as a loop, or return None if it can."""
    if type(layer).forward not in {kind.forward for kind in _KINDS}:
        return (
            "its forward pass is its own; use nn.LSTM, nn.GRU or nn.RNN itself, or write the cell "
            "with nn.Linear and a loop over time."
        )
    if layer.proj_size:
        return "projections (proj_size) cannot be mapped over clients; put an nn.Linear after it."
    return None


def looped(network: nn.Module) -> nn.Module:
    """Let the recurrent layers of a network run as loops, in place, and return it.

    Raises:
        ModelError: a layer cannot; see ``loop_fault``.
    """
    for name, layer in network.named_modules():
        if isinstance(layer, nn.RNNBase):
            fault = loop_fault(layer)
            if fault is not None:
                raise ModelError(f"Model has {type(layer).__name__} at {name!r}: {fault}")
            layer.forward = MethodType(_forward, layer)  # all else stays torch's own
    return network


def _forward(layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    """Return what the layer of torch returns: all outputs, and the last state."""
    if isinstance(input, PackedSequence):
        place = "[torch.arange(batch), lengths - 1]"
        if not layer.batch_first:
            place = "[lengths - 1, torch.arange(batch)]"
        raise ModelError(
            "A recurrent layer got a packed sequence, whose shape follows the data; give it padded "
            f"samples and take each one's output at its last step, outputs{place}. A backward "
            "direction would read the padding: sartor.models.lstm(bidirectional=True) does not."
        )
    alone = input.dim() == 2
    states = () if hx is None else tuple(hx) if layer.mode == "LSTM" else (hx,)
    _check(layer, input, states)
    x = input.unsqueeze(0 if layer.batch_first else 1) if alone else input
    x = x if layer.batch_first else x.transpose(0, 1)
    starts = [state.unsqueeze(1) if alone else state for state in states]
    turns = (False, True) if layer.bidirectional else (False,)
    last: list[tuple[Tensor, ...]] = []
    for number in range(layer.num_layers):
        parts = []
        for backward in turns:
            start = tuple(state[len(last)] for state in starts)
            outputs, *more = _direction(layer, x, number, backward, start)
            parts.append(outputs)
            last.append((outputs[:, 0 if backward else -1], *more))
        x = torch.cat(parts, dim=-1)
        if layer.dropout and number + 1 < layer.num_layers:  # between layers, as torch does it
            x = F.dropout(x, layer.dropout, layer.training)
    x = x if layer.batch_first else x.transpose(0, 1).contiguous()
    ends = [torch.stack(end) for end in zip(*last, strict=True)]
    if alone:
        x, ends = x.squeeze(0 if layer.batch_first else 1), [end.squeeze(1) for end in ends]
    return x, tuple(ends) if layer.mode == "LSTM" else ends[0]


def _check(layer: nn.RNNBase, input: Tensor, states: tuple[Tensor, ...]) -> None:
    """Raise what torch would: what trains must be what the layer takes afterwards."""
    if input.dim() not in (2, 3) or input.shape[-1] != layer.input_size:
        raise ModelError(
            f"{type(layer).__name__} takes samples (..., steps, {layer.input_size}), in two or "
            f"three axes, but got {tuple(input.shape)}."
        )
    steps = input.shape[1 if layer.batch_first and input.dim() == 3 else 0]
    if steps == 0:
        raise ModelError(f"{type(layer).__name__} got samples of no steps; it needs one at least.")
    lead = layer.num_layers * (2 if layer.bidirectional else 1)
    batch = () if input.dim() == 2 else (input.shape[0 if layer.batch_first else 1],)
    wanted = (lead, *batch, layer.hidden_size)
    number = 2 if layer.mode == "LSTM" else 1
    if states and (len(states) != number or any(tuple(s.shape) != wanted for s in states)):
        given = ", ".join(str(tuple(state.shape)) for state in states)
        raise ModelError(
            f"{type(layer).__name__} takes {number} first state{'s' * (number > 1)} of shape "
            f"{wanted}, but got {given}."
        )


def _direction(
    layer: nn.RNNBase, x: Tensor, number: int, backward: bool, start: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the outputs ``(batch, steps, hidden)``; of an LSTM also the last memory."""
    weights, own, bias, own_bias = (
        getattr(layer, f"{name}_l{number}{'_reverse' * backward}", None)
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    assert weights is not None
    assert own is not None
    if layer.mode == "GRU":
        given = F.linear(x, weights, bias)
        h = start[0] if start else given.new_zeros(len(x), layer.hidden_size)
        return (_gru_loop(given, own, own_bias, backward, h),)
    both = None if bias is None or own_bias is None else bias + own_bias
    given = F.linear(x, weights, both)
    if layer.mode == "LSTM":
        every = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return lstm_loop(given, own, every, backward, start or None)  # type: ignore[arg-type]
    h = start[0] if start else given.new_zeros(len(x), layer.hidden_size)
    phi = torch.tanh if layer.mode == "RNN_TANH" else torch.relu
    return (_plain_loop(given, own, backward, h, phi),)
