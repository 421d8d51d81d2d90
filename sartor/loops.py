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

``looped`` gives a network of the user such layers in the place of ``nn.LSTM``, ``nn.GRU`` and
``nn.RNN``: the same parameters, the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import handle_torch_function, has_torch_function

from sartor.errors import ModelError


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


class _Looped(nn.RNNBase):
    """A recurrent layer of torch whose forward pass is a loop; the parameters are torch's."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return what the layer of torch returns: all outputs, and the last state."""
        if isinstance(input, PackedSequence):
            raise ModelError(
                "A recurrent layer got a packed sequence, whose shape follows the data; give it "
                "padded samples and take each sample's output at its own last step, for example "
                "outputs[torch.arange(len(x)), lengths - 1]."
            )
        alone = input.dim() == 2
        x = input.unsqueeze(0 if self.batch_first else 1) if alone else input
        x = x if self.batch_first else x.transpose(0, 1)
        states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        starts = [state.unsqueeze(1) if alone else state for state in states]
        turns = (False, True) if self.bidirectional else (False,)
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            parts = []
            for backward in turns:
                start = tuple(state[len(last)] for state in starts)
                outputs, *more = self._direction(x, layer, backward, start)
                parts.append(outputs)
                last.append((outputs[:, 0 if backward else -1], *more))
            x = torch.cat(parts, dim=-1)
        x = x if self.batch_first else x.transpose(0, 1)
        ends = [torch.stack(end) for end in zip(*last, strict=True)]
        if alone:
            x, ends = x.squeeze(0 if self.batch_first else 1), [end.squeeze(1) for end in ends]
        return x, tuple(ends) if len(ends) > 1 else ends[0]

    def _direction(
        self, x: Tensor, layer: int, backward: bool, start: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the outputs ``(batch, steps, hidden)``; of an LSTM also the last memory."""
        weights, own, bias, own_bias = (
            getattr(self, f"{name}_l{layer}{'_reverse' * backward}", None)
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        assert weights is not None
        assert own is not None
        if self.mode == "GRU":
            given = F.linear(x, weights, bias)
            h = start[0] if start else given.new_zeros(len(x), self.hidden_size)
            return (_gru_loop(given, own, own_bias, backward, h),)
        both = None if bias is None or own_bias is None else bias + own_bias
        given = F.linear(x, weights, both)
        if self.mode == "LSTM":
            every = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            return lstm_loop(given, own, every, backward, start or None)  # type: ignore[arg-type]
        h = start[0] if start else given.new_zeros(len(x), self.hidden_size)
        phi = torch.tanh if self.mode == "RNN_TANH" else torch.relu
        return (_plain_loop(given, own, backward, h, phi),)


class _LSTM(_Looped, nn.LSTM):
    pass


class _GRU(_Looped, nn.GRU):
    pass


class _RNN(_Looped, nn.RNN):
    pass


_FORMS: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: _LSTM, nn.GRU: _GRU, nn.RNN: _RNN}


def loop_fault(layer: nn.RNNBase) -> str | None:
    """Say why a recurrent layer cannot be a loop, or return None if it can."""
    if type(layer) not in _FORMS:
        return (
            "it is a class of its own, whose forward pass is not known; use nn.LSTM, nn.GRU or "
            "nn.RNN itself, or write the cell with nn.Linear and a loop over time."
        )
    if layer.proj_size:
        return "projections (proj_size) cannot be mapped over clients; put an nn.Linear after it."
    return None


def looped(network: nn.Module) -> nn.Module:
    """Let the recurrent layers of a network be loops, in place, and return it."""
    for layer in network.modules():
        form = _FORMS.get(type(layer))
        if form is not None:
            layer.__class__ = form  # parameters, options and names stay as they are
    return network
