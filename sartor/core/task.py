"""The task: a network as pure functions of its parameters, with its loss and the name of its head.

The network of the user stays an ordinary ``nn.Module``; its parameters travel as a dict of tensors.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sartor.core import layers, rng, tree
from sartor.core.attention import plain_attention
from sartor.core.errors import ConfigError, ContractError
from sartor.core.loops import looped
from sartor.core.method import Batch
from sartor.core.tree import Tree

Criterion = Callable[[Tensor, Tensor], Tensor]
"""``(scores, labels) -> losses``, one per sample."""

PADDING = 0
"""The token that fills a text up to its full length, and is no answer."""

Predict = Callable[[Tree, Tensor], Tensor]
"""``(model, x) -> scores``."""


def cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Return the negative log-likelihood of each sample under softmax scores."""
    return F.cross_entropy(scores, y, reduction="none")


class Weighted:
    """A criterion whose losses count by class where they are descended, inside ``weighing``.

    Where they are only measured they are plain.
    """

    def __init__(self, plain: Criterion) -> None:
        self.plain = plain

    def __call__(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample."""
        losses = self.plain(scores, y)
        if _METER.weights is None or not _METER.depth:
            return losses
        return losses * _METER.weights[y]


def squared_error(scores: Tensor, y: Tensor) -> Tensor:
    """Return ½ (score − y)² of each sample, summed over outputs."""
    flat = scores.reshape(y.shape[0], -1) - y.reshape(y.shape[0], -1).to(scores.dtype)
    return 0.5 * flat.square().sum(-1)


def binary_cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Return the mean over labels of −y log σ(s) − (1 − y) log(1 − σ(s)), for each sample."""
    target = y.to(scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, target, reduction="none").mean(-1)


def token_cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Return (1/T) Σ_t −log softmax(s_t)[y_t] of each text, over the steps that are not padding.

    T is the full length, so that every token of a batch weighs alike.
    """
    losses = F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="none")
    return (losses.reshape(y.shape) * (y != PADDING)).mean(-1)


def given(scores: Tensor, y: Tensor) -> Tensor:
    """Take the network's output as the loss of each sample, as for quadratics."""
    return scores.reshape(scores.shape[0])


def most_likely(scores: Tensor, y: Tensor) -> Tensor:
    """Say for each sample whether the largest score is the label's."""
    return scores.argmax(-1) == y


def all_labels(scores: Tensor, y: Tensor) -> Tensor:
    """Say for each sample whether every one of its labels is right: exact match."""
    return ((scores > 0) == (y > 0.5)).all(-1)


def next_tokens(scores: Tensor, y: Tensor) -> Tensor:
    """Say for each step of each text, ``(steps, batch)``, whether the token is right.

    Padding is never right, and is not counted either. Steps come first, so that the mask of a
    batch fits.
    """
    return ((scores.argmax(-1) == y) & (y != PADDING)).transpose(0, 1)


def never(scores: Tensor, y: Tensor) -> Tensor:
    """Count no answer as correct: for losses without a notion of a right answer."""
    return torch.zeros(scores.shape[:1], dtype=torch.bool, device=scores.device) & (y == y)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return Σ values·mask / max(1, Σ mask); an engine may catch the call, as torch's own."""
    if has_torch_function((values, mask)):
        return handle_torch_function(masked_mean, (values, mask), values, mask)
    weight = mask.to(values.dtype)
    return (values * weight).sum() / weight.sum().clamp(min=1.0)


def head_of(module: nn.Module) -> str | None:
    """Return the dotted name of a network's head, as it says in ``head``, if it says so.

    ``sartor_head`` is for networks that have a layer of that name.
    """
    found = getattr(module, "sartor_head", getattr(module, "head", None))
    return found if isinstance(found, str) else None


def is_pretrained(module: nn.Module) -> bool | None:
    """Say whether clients start from a network's own weights; None if it does not say.

    It says so in ``pretrained``; ``sartor_pretrained`` is for networks that have a layer of that
    name.
    """
    found = getattr(module, "sartor_pretrained", getattr(module, "pretrained", None))
    return found if isinstance(found, bool) else None


@dataclass(frozen=True)
class Task:
    """A network, its loss, and the split of its leaves into body and head.

    Attributes:
        module: the network; its own parameters give shapes and are otherwise unused.
        head: the dotted name of the head's submodule, or None.
        criterion: losses of scores and labels.
        is_correct: which answers count as correct: ``(batch,)``, or ``(steps, batch)`` where a
            sample asks for several.
        compute: the dtype of the forward and backward pass, if not that of the parameters.
        kind: what there is to learn, as ``Federation.task`` says it.
        measure: a measure of a client's labels and scores that has no sums, such as the AUROC.
        leaf_names: the names of the parameters that are trained.
        draws: whether the network draws in training, as dropout does; if None, its layers say.
        unmapped: why the network cannot be mapped over clients; None if it can.
        fixed: frozen parameters and buffers by name. They are the same for all clients, so no
            client has a copy of them, and they never travel.
        norms: the names of its BatchNorm layers in training mode; see `sartor/core/layers.py`.
    """

    module: nn.Module
    head: str | None = None
    criterion: Criterion = cross_entropy
    is_correct: Criterion = most_likely
    compute: torch.dtype | None = None
    kind: str = "classification"
    measure: Callable[[np.ndarray, np.ndarray], float] | None = None
    draws: bool | None = None
    unmapped: str | None = None
    leaf_names: tuple[str, ...] = field(init=False, default=())
    norms: tuple[str, ...] = field(init=False, default=())
    fixed: dict[str, Tensor] = field(init=False, default_factory=dict, repr=False, compare=False)
    _copies: threading.local = field(init=False, default_factory=threading.local, repr=False)
    _settled: dict[Any, dict[str, Tree]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Take a private copy of the module."""
        names = tuple(k for k, p in self.module.named_parameters() if p.requires_grad)
        if not names:
            raise ConfigError(
                "Every parameter of the network is frozen, so nothing can be trained; unfreeze "
                "some, such as those of its head: module.fc.requires_grad_(True)."
            )
        module = copy.deepcopy(self.module).cpu()
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "leaf_names", names)
        norms = layers.batch_norms(module)
        object.__setattr__(self, "norms", norms)
        if self.draws is None:
            object.__setattr__(self, "draws", bool(layers.drawing_layers(module)))
        own = {f"{name}.{k}" for name in norms for k in (*layers.STATISTICS, "num_batches_tracked")}
        held = (*module.named_parameters(), *module.named_buffers())
        self.fixed.update({k: v.detach() for k, v in held if k not in names and k not in own})

    def init(self, seed: int) -> Tree:
        """Return the initial parameters of a seed.

        Every submodule with ``reset_parameters`` is drawn anew (torch's own initialisation, on the
        CPU in float32, so that device and dtype do not matter); parameters outside such modules
        keep their values. A module with ``pretrained = True`` keeps them all, for every seed.
        """
        if is_pretrained(self.module):
            return {k: self.module.get_parameter(k).detach().clone() for k in self.leaf_names}
        module = copy.deepcopy(self.module)
        word = int(rng.fold(rng.key(seed), "init")[0])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(word)
            for part in module.modules():
                reset = getattr(part, "reset_parameters", None)
                if callable(reset):
                    reset()
            for part in module.modules():
                if isinstance(part, nn.MultiheadAttention):  # its own method has another name
                    part._reset_parameters()
        return {k: module.get_parameter(k).detach().clone() for k in self.leaf_names}

    def settle(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tree]:
        """Bring what is fixed to a device, in a dtype; by part of the network.

        An engine calls it before the first step, since what is recorded or traced there must find
        it in place.
        """
        kind = self.compute or dtype
        index: int | None = device.index
        if index is None:  # as tensors have it
            index = torch.cuda.current_device() if device.type == "cuda" else 0
        key = (device.type, index, kind)
        if key not in self._settled:
            there = {
                k: v.to(device, kind) if v.is_floating_point() else v.to(device)
                for k, v in self.fixed.items()
            }
            skip = 0 if self.head is None else len(self.head) + 1
            self._settled[key] = {
                "whole": there,
                "body": {k: v for k, v in there.items() if self.is_body(k)},
                "head": {k[skip:]: v for k, v in there.items() if self.is_head(k)},
            }
        return self._settled[key]

    @property
    def num_trained(self) -> int:
        """How many numbers are trained."""
        return sum(self.module.get_parameter(k).numel() for k in self.leaf_names)

    def given_weights(self) -> dict[str, Any]:
        """Return what settings say of weights that a network brought with it; often nothing.

        How many numbers are trained, and a SHA-256 of what is fixed and of what training starts
        from: a run that is resumed must find the same.
        """
        said: dict[str, Any] = {}
        if self.draws:
            said["dropout"] = True
        if self.norms:
            said["statistics"] = "of each client's own training samples"
        if self.unmapped:
            said["unmapped"] = self.unmapped
        if self.fixed:
            said["trained"] = self.num_trained
            said["fixed"] = _digest(self.fixed)
        if is_pretrained(self.module):
            said["start"] = _digest(self.init(0))
        return said

    def logits(self, params: Tree, x: Tensor) -> Tensor:
        """Return the scores of a batch: (batch, classes), or (batch, steps, tokens)."""
        return self._call("whole", params, x, self._kind(params, x))

    def features(self, params: Tree, x: Tensor) -> Tensor:
        """Return what the head receives: (batch, feature_dim).

        Args:
            params: of the whole network, or of its body.
            x: inputs.
        """
        body = {k: v for k, v in params.items() if self.is_body(k)}
        return self._call("body", body, x, self._kind(params, x))

    def classify(self, params: Tree, features: Tensor) -> Tensor:
        """Return the scores that the head gives to features: (batch, classes).

        ``classify(params, features(params, x))`` is ``logits(params, x)``.
        """
        skip = len(f"{self._linear_head()[0]}.")
        head = {k[skip:]: v for k, v in params.items() if self.is_head(k)}
        return self._call("head", head, features, self._kind(params, features))

    def represent(self, params: Tree, batch: Batch) -> Tensor:
        """Return the features of a batch, and count the pass, as ``losses`` does.

        A step counts each pass over a batch once: by ``losses``, ``judge`` or this.
        """
        _METER.count()
        return self.features(params, batch.x)

    @property
    def measured_as(self) -> str | None:
        """Its kind, or None where the network gives its own loss.

        It decides the headline metric; see ``sartor.results.headline``.
        """
        return None if self.criterion is given else self.kind

    @property
    def feature_dim(self) -> int:
        """The number of features that the head receives."""
        return self._linear_head()[1].in_features

    @property
    def num_classes(self) -> int:
        """The number of scores that the head gives.

        Methods that keep something for every class ask for it, so other tasks are refused.
        """
        if self.kind != "classification":
            raise ConfigError(
                f"This method keeps something for every class, but the task is {self.kind!r}; use "
                "one without, such as fedavg, ditto or fedrep."
            )
        return self._linear_head()[1].out_features

    def _linear_head(self) -> tuple[str, nn.Linear]:
        head = None if self.head is None else self.module.get_submodule(self.head)
        if self.head is None or not isinstance(head, nn.Linear):
            what = "not named" if head is None else f"a {type(head).__name__}"
            raise ConfigError(
                "This method splits the network into features and a linear head, but its head is "
                f"{what}; set module.head to the name of its last nn.Linear, such as 'fc'."
            )
        if not any(self.is_body(leaf) for leaf in (*self.leaf_names, *self.fixed)):
            raise ConfigError(
                f"This method splits the network into features and a head, but {self.head!r} is "
                "all there is; use a network with a body, such as dnn."
            )
        return self.head, head

    def _kind(self, params: Tree, x: Tensor) -> torch.dtype:
        """Return the dtype of parameters; where none are given, of real inputs, or the network."""
        leaf = next(iter(params.values()), None)
        if leaf is None:
            own = (p for p in self.module.parameters() if p.is_floating_point())
            leaf = x if x.is_floating_point() else next(own)
        found: torch.dtype = leaf.dtype
        return found

    def _call(self, part: str, params: Tree, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Run the whole network, its body or its head, in the precision of computation."""
        # A functional call swaps parameters in and out of the module it is given: one a thread.
        module = getattr(self._copies, part, None)
        module = self._own_module(part) if module is None else module
        given = x
        if self.compute is not None:
            params = {k: v.to(self.compute) for k, v in params.items()}
            x = x.to(self.compute) if x.is_floating_point() else x
        if self.fixed:
            fixed = self.settle(x.device, dtype)["whole" if part == "inputs" else part]
            params = {**fixed, **params}
        with _METER.around(), plain_attention():
            if self.draws or self.norms:
                return self._live_call(module, part, params, given, dtype)
            found: Tensor = torch.func.functional_call(module, params, (x,))
        return found if self.compute is None else found.to(dtype)

    def _live_call(
        self, module: nn.Module, part: str, params: Tree, x: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Run a network whose layers draw, or look at batches."""
        with layers.passing(x, slope=_METER.depth > 0, draws=bool(self.draws)) as own:
            if own:
                params = {**params, **{k: v.to(dtype) for k, v in own.items()}}
            if part != "head" and self.norms and not layers.in_batches():
                self._check_statistics(params)
            if self.compute is not None and x.is_floating_point():
                x = x.to(self.compute)
            found: Tensor = torch.func.functional_call(module, params, (x,))
        return found if self.compute is None else found.to(dtype)

    def _check_statistics(self, params: Tree) -> None:
        if f"{self.norms[0]}.{layers.STATISTICS[0]}" not in params:
            raise ContractError(
                f"The network has BatchNorm ({self.norms[0]}) and is used outside of local work "
                "without the statistics of a client; use the model of a client, or put the layers "
                "in evaluation mode with .eval()."
            )

    def _own_module(self, part: str) -> nn.Module:
        """Make this thread's copy."""
        # What is fixed is handed in with every call; the copies share it meanwhile.
        held = (*self.module.named_parameters(), *self.module.named_buffers())
        shared = {id(t): t for name, t in held if name in self.fixed}
        module = layers.normed(looped(copy.deepcopy(self.module, shared)))
        if part != "whole":
            name, head = (part == "inputs" and self.linear_layer) or self._linear_head()
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Identity())
            module = copy.deepcopy(head) if part == "head" else module
        setattr(self._copies, part, module)
        return module

    def with_criterion(self, criterion: Criterion) -> Task:
        """Return the same network with another loss."""
        return replace(self, criterion=criterion)

    def losses(
        self,
        params: Tree,
        batch: Batch,
        predict: Predict | None = None,
        criterion: Criterion | None = None,
    ) -> Tensor:
        """Return the loss of each sample of a batch, padding included.

        ``predict``, the network's logits if None, takes ``params`` and inputs; ``criterion``, the
        task's if None, takes scores and labels.
        """
        _METER.count()
        return (criterion or self.criterion)((predict or self.logits)(params, batch.x), batch.y)

    def jacobian(self, params: Tree, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the scores of a batch and their derivatives, sample by sample.

        Counted as one gradient for each score.

        Returns:
            (batch, scores), and (batch, scores, parameters) in the order of ``tree.flat``.
        """

        def scores(row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            found = self.logits(tree.shaped(row, params), x[None]).reshape(-1)
            return found, found

        with _nested():
            each = torch.func.vmap(torch.func.jacrev(scores, has_aux=True), in_dims=(None, 0))
            slopes, found = each(tree.flat(params), batch.x)
        _METER.backward += found.shape[1]
        return found, slopes

    @property
    def linear_layer(self) -> tuple[str, nn.Linear] | None:
        """The name and layer that alone is trained and gives the scores; None if there is none.

        It is the network itself, its head, or the end of an ``nn.Sequential``.
        """
        name = self.head or ""
        if self.head is None and isinstance(self.module, nn.Sequential):
            name = list(self.module._modules)[-1]
        layer = self.module.get_submodule(name)
        if type(layer) is not nn.Linear:
            return None
        inside = {f"{name}.{leaf}" if name else leaf for leaf, _ in layer.named_parameters()}
        return (name, layer) if inside == set(self.leaf_names) else None

    def inputs(self, params: Tree, batch: Batch, models: int = 1) -> Tensor:
        """Return what the linear layer receives that alone is trained: (batch, features).

        Counted as one gradient for each score of each model.
        """
        found = self.linear_layer
        if found is None:
            raise ConfigError("More is trained here than one linear layer; use jacobian.")
        name, layer = found
        _METER.backward += layer.out_features * models
        if not name:
            return batch.x
        return self._call("inputs", {}, batch.x, self._kind(params, batch.x))

    def is_wrong(self, scores: Tensor, y: Tensor) -> Tensor:
        """Return 1 for each sample that does not count as correct, else 0: a criterion.

        Where a sample asks for several answers, the share of its steps that are wrong.
        """
        right = self.is_correct(scores, y)
        if right.ndim == 1:
            return (~right).to(scores.dtype)
        return (~right & (y != PADDING).transpose(0, 1)).to(scores.dtype).mean(0)

    def judge(
        self, params: Tree, batch: Batch, predict: Predict | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of losses and the number of wrong answers on a batch, in one pass.

        The arguments are those of ``losses``.
        """
        _METER.count()
        scores = (predict or self.logits)(params, batch.x)
        losses = self.criterion(scores, batch.y)
        wrong = self.is_wrong(scores, batch.y)
        return (losses * batch.mask).sum(), (wrong * batch.mask).sum().to(losses.dtype)

    def mean(self, values: Tensor, batch: Batch) -> Tensor:
        """Average over the real samples of a batch."""
        return masked_mean(values, batch.mask)

    def loss(self, params: Tree, batch: Batch, predict: Predict | None = None) -> Tensor:
        """Return the mean loss over the real samples of a batch; see ``losses``."""
        return self.mean(self.losses(params, batch, predict), batch)

    def is_head(self, leaf: str) -> bool:
        """Say whether a leaf belongs to the head."""
        return self.head is not None and (leaf == self.head or leaf.startswith(self.head + "."))

    def is_body(self, leaf: str) -> bool:
        """Say whether a leaf belongs to the body: everything that is not the head."""
        return not self.is_head(leaf)

    def with_params(self, params: Tree) -> nn.Module:
        """Return an ordinary module that holds the given parameters, ready to use.

        It is in evaluation mode: without dropout, and with the statistics that it was given.
        """
        module = copy.deepcopy(self.module).to(next(iter(params.values())).dtype)
        module.load_state_dict(
            {k: v.detach().cpu().clone() for k, v in params.items()}, strict=False
        )
        vars(module)["sartor_statistics"] = tuple(self.statistics)  # they belong to the model too
        return module.eval()

    # ---- BatchNorm: statistics of a client's own samples, where a model is used

    @property
    def statistics(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of what a client's model has beside its trained parameters."""
        found = {}
        for name in self.norms:
            shape = tuple(self.module.get_buffer(f"{name}.{layers.STATISTICS[0]}").shape)
            found.update({f"{name}.{leaf}": shape for leaf in layers.STATISTICS})
        return found

    def answer(self, predict: Predict | None) -> Predict:
        """Return ``(model, x) -> scores`` for models as they are used, statistics included.

        ``predict`` is that of a method; where it is None, statistics are leaves of the model.
        """
        if predict is None:
            return self.logits
        if not self.norms:
            return predict

        def by_pass(model: Tree, x: Tensor) -> Tensor:
            with layers.using(model["passes"]):
                return predict(model["model"], x)

        return by_pass

    def collect(self, model: Tree, batch: Batch, predict: Predict | None) -> layers.Sums:
        """Return what a batch adds to the statistics of a model, and count the pass."""
        _METER.count()
        return self._collected(model, batch, predict)

    def no_sums(self, model: Tree, batch: Batch, predict: Predict | None) -> layers.Sums:
        """Return the zeros that sums of statistics start from; any model and batch will do."""
        with torch.no_grad():
            sums = self._collected(model, batch, predict)
        zeros: layers.Sums = tree.map(torch.zeros_like, sums)
        return zeros

    def _collected(self, model: Tree, batch: Batch, predict: Predict | None) -> layers.Sums:
        with layers.collecting(batch) as sums:
            (predict or self.logits)(model, batch.x)
        return sums

    def equipped(self, model: Tree, sums: layers.Sums, predict: Predict | None) -> Tree:
        """Return a model with the statistics of collected sums, as ``answer`` takes it."""
        found = layers.statistics(sums)
        kind = next(leaf.dtype for leaf in tree.leaves(model) if leaf.is_floating_point())
        cast: Tree = tree.map(lambda leaf: leaf.to(kind), found)
        if predict is not None:
            return {"model": model, "passes": cast}
        found = cast.get("0", {})
        like = next(iter(model.values()))
        for name, shape in self.statistics.items():  # a layer that no pass goes through
            fill = 0.0 if name.endswith(layers.STATISTICS[0]) else 1.0
            found.setdefault(name, like.new_full(shape, fill))
        return {**model, **found}


def _digest(tensors: dict[str, Tensor]) -> str:
    """Return a SHA-256 of names, types, shapes and values, in hexadecimal digits."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class Predictor(nn.Module):
    """A model that is more than one set of parameters of the network, as an ordinary module.

    Args:
        model: a tree of tensors; its leaves become parameters (buffers, if they are not real).
        predict: ``(model, x) -> scores``.
        fixed: what is frozen in the network that ``predict`` calls; kept as buffers, so that files
            have it.
    """

    def __init__(self, model: Tree, predict: Predict, fixed: Tree | None = None) -> None:
        super().__init__()
        for name, value in (fixed or {}).items():
            self.register_buffer(f"fixed__{name.replace('.', '__')}", value)
        self.predict = predict
        self.paths: dict[str, str] = {}
        for path, leaf in tree.items(model):
            name = path.replace("/", "__").replace(".", "__")
            self.paths[path] = name
            value = leaf.detach().cpu().clone()
            if value.is_floating_point():
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of a batch."""
        return self.predict(self.tree(), x)

    def tree(self) -> Tree:
        """Return the model as the method has it."""
        model: Tree = {}
        for path, name in self.paths.items():
            *above, last = path.split("/")
            place = model
            for key in above:
                place = place.setdefault(key, {})
            place[last] = getattr(self, name)
        return model


class _Meter(threading.local):
    """Counts, per thread, the batches whose loss was computed, with and without a gradient."""

    alone = False
    weights: Tensor | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    depth = 0
    forward = 0
    backward = 0

    def count(self) -> None:
        if self.depth:
            self.backward += 1
        else:
            self.forward += 1


_METER = _Meter()


@contextmanager
def weighing(weights: Tensor) -> Iterator[None]:
    """Let every sample count by the weight of its class, (classes,), where losses are descended."""
    before, _METER.weights = _METER.weights, weights
    try:
        yield
    finally:
        _METER.weights = before


@contextmanager
def metered() -> Iterator[Callable[[], tuple[int, int]]]:
    """Count the losses computed inside.

    Yields a function that returns (forward only, with gradient).
    """
    start = (_METER.forward, _METER.backward)
    yield lambda: (_METER.forward - start[0], _METER.backward - start[1])


@contextmanager
def unmetered() -> Iterator[None]:
    """Do not count the losses computed inside."""
    before = _METER.forward, _METER.backward
    try:
        yield
    finally:
        _METER.forward, _METER.backward = before


def grad(fn: Callable[[Any], Any], has_aux: bool = False) -> Callable[[Any], Any]:
    """Differentiate ``fn`` by its first argument, and count the losses inside as gradients."""

    def watched(*args: Any) -> Any:
        _METER.depth += 1
        try:
            return fn(*args)
        finally:
            _METER.depth -= 1

    if _METER.alone and not _METER.depth:
        return _plain_grad(watched, has_aux)
    return torch.func.grad(watched, has_aux=has_aux)


def hessian_product(fn: Callable[[Tree], Tensor], at: Tree, direction: Tree) -> Tree:
    """Return ∇²fn(at) · direction, counted as one gradient, without forming the Hessian."""
    with _nested():
        slope = grad(fn)
        product: Tree = torch.func.grad(lambda p: tree.dot(slope(p), direction))(at)
    return product


@contextmanager
def _nested() -> Iterator[None]:
    """Derive by ``torch.func`` even where one lane is alone: autograd cannot be nested."""
    before = _METER.alone, _METER.around
    _METER.alone, _METER.around = False, nullcontext
    try:
        yield
    finally:
        _METER.alone, _METER.around = before


@contextmanager
def alone(around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
    """Say that one lane is computed without vmap.

    Plain autograd then gives the same gradient with less machinery.

    Args:
        around: entered around every forward pass of the network.
    """
    before = _METER.alone, _METER.around
    _METER.alone, _METER.around = True, around
    try:
        yield
    finally:
        _METER.alone, _METER.around = before


def _plain_grad(fn: Callable[..., Any], has_aux: bool) -> Callable[[Tree], Any]:
    def slope(at: Tree, *rest: Any) -> Any:
        with torch.enable_grad():
            variables = tree.map(lambda leaf: leaf.detach().requires_grad_(), at)
            found = fn(variables, *rest)
            value, aux = found if has_aux else (found, None)
            leaves = tree.leaves(variables)
            # Without leaves, as of a body that is frozen, there is nothing to derive by.
            found = torch.autograd.grad(value, leaves, materialize_grads=True) if leaves else ()
            parts = iter(found)
        # ``map`` walks in the order of ``leaves``.
        result = tree.map(lambda leaf: next(parts), variables)
        return (result, tree.map(torch.detach, aux)) if has_aux else result

    return slope
