"""Layers that draw, and layers that look at a batch: dropout and BatchNorm as pure functions.

A network of the user draws dropout from a generator of the process, and BatchNorm writes to its
buffers: neither can be mapped over clients, repeated, or resumed. Here

* dropout, in whatever form (``nn.Dropout`` and its kin, ``F.dropout``, attention, RReLU), draws
  from the key of the step: seed, stage, round, client, stream and step. The number of the draw
  within the step tells apart layers, and passes through the same layer. It acts where a gradient is
  taken, and nowhere else: not in scores, predictions, or passes that collect something.
* BatchNorm normalises by the real samples of the batch while clients work, whether a gradient is
  taken or not, and by statistics of the client's own training samples where models are scored.
  These are worked out when they are needed (``engines.evaluate``), for the very model that is
  scored. So they are no state: they cannot be averaged, travel, or be out of date.

A layer in evaluation mode (``.eval()``) does what it does in torch: no dropout, and statistics that
stay as they are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sartor.core import rng
from sartor.core.errors import ContractError, ModelError
from sartor.core.torch_private import BatchNorm, DropoutNd

STATISTICS = ("running_mean", "running_var")
"""The buffers of BatchNorm that a model has where it is used."""

Sums = dict[str, dict[str, Tensor]]
"""For a pass and a layer, as ``"0/body.bn"``: count, sum and sum of squares of its inputs."""


class _State(threading.local):
    """What the passes of this thread are part of."""

    key: Tensor | None = None  # of the step under way
    batches: tuple[Any, ...] | None = None  # of that step; None outside of steps
    drawn = 0  # draws of the step so far
    passes = 0  # passes since the step, or the collecting, began
    sums: Sums | None = None  # where statistics are collected
    given: Mapping[str, Mapping[str, Tensor]] | None = None  # statistics by pass
    mask: Tensor | None = None  # the real samples of the pass under way
    slope = False  # whether a gradient of the pass under way is taken
    asked = False  # whether some network asked for dropout


STATE = _State()


@contextmanager
def _holding(**values: Any) -> Iterator[None]:
    before = {name: getattr(STATE, name) for name in values}
    vars(STATE).update(values)
    try:
        yield
    finally:
        vars(STATE).update(before)


@contextmanager
def working(key: Tensor, batch: Any) -> Iterator[None]:
    """Say that a step of local work is under way, with its key and its batch (or batches)."""
    batches = (batch,) if hasattr(batch, "mask") else tuple(batch)
    with _holding(key=key, batches=batches, drawn=0, passes=0):
        yield


@contextmanager
def collecting(batch: Any) -> Iterator[Sums]:
    """Collect the statistics of the passes inside over the real samples of a batch."""
    sums: Sums = {}
    with _holding(key=None, batches=(batch,), passes=0, sums=sums):
        yield sums


@contextmanager
def using(statistics: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
    """Give the passes inside their statistics, by the number of the pass."""
    with _holding(passes=0, given=statistics):
        yield


@contextmanager
def passing(x: Tensor, slope: bool, draws: bool) -> Iterator[Mapping[str, Tensor]]:
    """Enter one pass through a network; yields the statistics that were given for it.

    Args:
        x: what the network receives; it says of which batch the pass is.
        slope: whether a gradient is taken.
        draws: whether the network may draw.
    """
    batches = STATE.batches or ()
    mask = next((batch.mask for batch in batches if batch.x is x), None)
    given = (STATE.given or {}).get(str(STATE.passes), {})
    with _holding(mask=mask, slope=slope):
        if draws:
            with _KeyedDraws():
                yield given
        else:
            yield given
    STATE.passes += 1


def in_batches() -> bool:
    """Say whether BatchNorm normalises by batches here: in local work, and where it collects."""
    return STATE.batches is not None


# ---- dropout ---------------------------------------------------------------------------------


def drawing_layers(module: nn.Module) -> list[str]:
    """Name the layers that draw in training, as they say themselves."""
    return [name for name, layer in module.named_modules() if layer.training and _draws(layer)]


def _draws(layer: nn.Module) -> bool:
    if isinstance(layer, DropoutNd):
        return bool(layer.p > 0)
    if isinstance(layer, nn.MultiheadAttention):
        return layer.dropout > 0
    if isinstance(layer, nn.RNNBase):
        return layer.dropout > 0 and layer.num_layers > 1
    return isinstance(layer, nn.RReLU)


def _next_draw() -> tuple[Tensor, int]:
    """Return the key of the step, and the number of this draw in it."""
    if STATE.key is None or STATE.key.shape[-1] != 2:
        raise ContractError(
            "A gradient is taken through dropout outside of a phase of local work, so there is no "
            "key to draw from; take it in a phase, or put the network in evaluation mode, .eval()."
        )
    STATE.drawn += 1
    return STATE.key, STATE.drawn - 1


def _kept(x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """Draw what of a shape is kept, each value with probability 1 − p: ones and zeros."""
    return rng.kept(*_next_draw(), shape, p).to(x.dtype)


def _share(p: float) -> float:
    if not 0.0 <= p <= 1.0:
        raise ModelError(f"The share that dropout leaves out must be from 0 to 1, got {p}.")
    return p


def _off(p: float, training: bool) -> bool:
    """Say whether dropout does nothing here, and note that the network asked for it."""
    asked = training and _share(p) > 0.0
    STATE.asked = STATE.asked or asked
    return not (asked and STATE.slope)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if _off(p, training):
        return x
    return _thinned(x, tuple(x.shape), p)


def _thinned(x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return x * (_kept(x, shape, p) * scale)


def _channels(axes: int) -> Callable[..., Tensor]:
    """Return dropout of whole channels, of inputs (batch, channels, and so many axes)."""

    def serve(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if _off(p, training):
            return x
        return _thinned(x, _by_channel(x, axes), p)

    return serve


def _by_channel(x: Tensor, axes: int) -> tuple[int, ...]:
    # As torch reads shapes: what has one axis less is one sample, but ``F.dropout2d`` takes three
    # for (batch, channels, length), and two are (batch, channels) where channels have axes.
    whole = x.dim() == axes + 2 or (axes == 2 and x.dim() == 3) or (axes > 1 and x.dim() == 2)
    lead = 2 if whole else 1
    return (*x.shape[:lead], *(1 for _ in x.shape[lead:]))


def _alpha_dropout(
    x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return x if _off(p, training) else _self_normal(x, tuple(x.shape), p)


def _feature_alpha(
    x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    shape = (*x.shape[:2], *(1 for _ in x.shape[2:]))
    return x if _off(p, training) else _self_normal(x, shape, p)


def _self_normal(x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """Return alpha dropout: what is left out becomes α', and mean and variance stay 0 and 1."""
    low = -1.7580993408473766  # −λα of SELU
    if p == 1.0:
        return x * 0.0
    scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * low * low))
    kept = _kept(x, shape, p)
    return scale * (x * kept + low * (1.0 - kept)) - scale * low * p


def _rrelu(
    x: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if _off(1.0, training):
        return F.leaky_relu(x, (lower + upper) / 2)
    words = rng.keep_words(*_next_draw(), x.numel()).reshape(x.shape)
    unit = ((words.double() + 0.5) * 2.0**-32).to(x.dtype)
    return torch.where(x >= 0, x, x * (lower + (upper - lower) * unit))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    plain = partial(F.scaled_dot_product_attention, query, key, value)
    if _off(dropout_p, True):
        return plain(attn_mask, 0.0, is_causal, **others)
    if others.get("enable_gqa"):
        raise ModelError("Dropout in attention of grouped queries is not supported; set it to 0.")
    scale = others.get("scale") or query.shape[-1] ** -0.5
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~ones.tril(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return _dropout(torch.softmax(scores, -1), dropout_p) @ value


def _whole_attention(*args: Any, **kwargs: Any) -> Any:
    """Run torch's attention layer with the forms above in place of what it calls itself.

    A function that a mode has caught calls others without that mode; so its own names are replaced.
    """
    own = F.multi_head_attention_forward
    names = {"dropout": _dropout, "scaled_dot_product_attention": _attention}
    names |= {"has_torch_function": lambda _: False}
    body = FunctionType(own.__code__, {**vars(F), **names}, own.__name__, own.__defaults__)
    body.__kwdefaults__ = own.__kwdefaults__
    return body(*args, **kwargs)


FORMS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    F.dropout1d: _channels(1),
    F.dropout2d: _channels(2),
    F.dropout3d: _channels(3),
    F.alpha_dropout: _alpha_dropout,
    F.feature_alpha_dropout: _feature_alpha,
    F.rrelu: _rrelu,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _whole_attention,
}
"""What draws in torch, and what takes its place."""


class _KeyedDraws(TorchFunctionMode):
    """While active, draw from the key of the step."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Catch what draws, and leave everything else as it is."""
        return FORMS.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def noticing() -> Iterator[Callable[[], bool]]:
    """Switch dropout off inside; yields a function that says whether a network asked for it."""
    with _holding(slope=False, asked=False), _KeyedDraws():
        yield lambda: STATE.asked


# ---- BatchNorm -------------------------------------------------------------------------------


def batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Name the layers that normalise by the batch in training, and by statistics in use."""
    return tuple(name for name, layer in module.named_modules() if is_live_norm(layer))


def is_live_norm(layer: nn.Module) -> bool:
    """Say whether a layer is BatchNorm in training mode, with statistics to use later."""
    own = isinstance(layer, BatchNorm) and type(layer).forward is nn.BatchNorm1d.forward
    return own and layer.training and layer.running_mean is not None


def normed(network: nn.Module) -> nn.Module:
    """Let BatchNorm in training mode look at real samples alone, in place; return the network."""
    for name in batch_norms(network):
        layer = network.get_submodule(name)
        layer.forward = partial(_normalise, layer, name)
    return network


def _normalise(layer: Any, name: str, x: Tensor) -> Tensor:
    shape = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    if STATE.batches is None:
        mean, var = layer.running_mean, layer.running_var
    else:
        weight = _weights(name, x)
        axes = (0, *range(2, x.dim()))
        count = weight.sum() * math.prod(x.shape[2:])
        mean = (x * weight).sum(axes) / count.clamp(min=1.0)
        away = (x - mean.reshape(shape)) * weight
        var = away.square().sum(axes) / count.clamp(min=1.0)
        _collect(name, x, weight, axes, count)
    scale = torch.rsqrt(var.to(x.dtype) + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    out = (x - mean.to(x.dtype).reshape(shape)) * scale.reshape(shape)
    return out if layer.bias is None else out + layer.bias.reshape(shape)


def _weights(name: str, x: Tensor) -> Tensor:
    """Return 1 for the real samples that a layer sees and 0 for padding, (batch, 1, ...)."""
    mask = STATE.mask
    if mask is None:
        raise ModelError(
            f"BatchNorm at {name!r} needs the samples of a batch, but this method looks at others "
            "or at single ones; put the layer in evaluation mode with .eval(), or use nn.GroupNorm."
        )
    if x.shape[0] != mask.shape[0]:
        raise ModelError(
            f"BatchNorm at {name!r} got {x.shape[0]} rows of a batch of {mask.shape[0]} samples, "
            "so it cannot tell which are real; keep the samples on the first axis, or use "
            "nn.GroupNorm or nn.LayerNorm."
        )
    return mask.to(x.dtype).reshape(-1, *(1 for _ in x.shape[1:]))


def _collect(name: str, x: Tensor, weight: Tensor, axes: Any, count: Tensor) -> None:
    if STATE.sums is None:
        return
    held = (x * weight).detach().double()
    found = {"count": count.double(), "sum": held.sum(axes), "square": held.square().sum(axes)}
    before = STATE.sums.get(f"{STATE.passes}/{name}")
    if before is not None:  # a layer that is called twice has one mean over both
        found = {k: v + before[k] for k, v in found.items()}
    STATE.sums[f"{STATE.passes}/{name}"] = found


def statistics(sums: Sums) -> dict[str, dict[str, Tensor]]:
    """Return means and variances by pass: of sums, as ``nn.BatchNorm`` keeps them (unbiased)."""
    found: dict[str, dict[str, Tensor]] = {}
    for place, held in sums.items():
        number, _, name = place.partition("/")
        count = held["count"].clamp(min=1.0)
        mean = held["sum"] / count
        var = (held["square"] / count - mean.square()).clamp(min=0.0)
        var = var * count / (count - 1.0).clamp(min=1.0)
        there = held["count"] > 0  # a client without samples has those of a new layer
        both = mean, torch.where(there, var, torch.ones_like(var))
        found.setdefault(number, {}).update(
            {f"{name}.{leaf}": value for leaf, value in zip(STATISTICS, both, strict=True)}
        )
    return found
