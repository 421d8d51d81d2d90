"""``advise``: from a federation to a recommendation with its reason, its λ and its cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from sartor import models
from sartor.adviser.advice import Advice, Subject
from sartor.adviser.by_evidence import by_evidence
from sartor.adviser.by_theory import by_theory
from sartor.adviser.by_trial import by_trial
from sartor.adviser.estimates import Target, estimate, well_posed
from sartor.adviser.features import View, view
from sartor.adviser.refusals import check, refusal, too_few, ways_out
from sartor.adviser.sharing import all_samples, most_features
from sartor.adviser.trial import try_pulls
from sartor.adviser.verification import Verification
from sartor.core.errors import ConfigError, FederationError, PFLError
from sartor.core.local import Local
from sartor.data.federation import Federation
from sartor.results.headline import chosen_metric
from sartor.training.progress import Progress

SCALED = "scaled"
"""How features are seen if nothing is said."""


def advise(
    federation: Federation,
    *,
    model: nn.Module | None = None,
    features: str | None = None,
    ridge: float = 0.0,
    basis: Literal["auto", "evidence", "theory", "trial"] = "auto",
    target: Target = "loss",
    budget_mb: float | None = None,
    budget_rounds: int | None = None,
    accuracy: float | None = None,
    local: Local | None = None,
    rounds: int = 20,
    draws: int = 20,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
    measure: str | None = None,
) -> Advice:
    """Say whether to federate, how much each client should personalise, and what it will cost.

    With a linear model (the default) every client alone, one model for all and a prior that is
    learned from all are compared by the losses of samples left out, over all samples, and by the
    evidence; no number is chosen by hand, and the answer is the same for every seed. For a network
    all λ are trained as lanes of one pass and judged on validation data.

    Args:
        federation: the data.
        model: a network; None is linear, logistic or softmax regression on ``features``. A network
            that trains a linear head alone is such a regression on what its body makes of the
            samples; see ``sartor.models.pretrained``.
        features: "raw", "scaled", or "pca:K", for the convex model; "scaled" if None. For those of
            a network, None takes them as they are with an intercept, so that λ is for its head.
        ridge: ν of (ν/2)‖w‖² in every client's loss, for the theory or a trial; the evidence learns
            its own.
        basis: "evidence", "theory" (of Yu et al. and Chen et al.; refused where its conditions do
            not hold) or "trial"; "auto" is the evidence, or a trial where the model is a network.
        target: what λ of the theory shall make small: excess "loss", or the error of "parameters".
        budget_mb: megabytes that may be sent, both ways, all clients.
        budget_rounds: communication rounds at most.
        accuracy: squared distance to the solution that the theory's plan shall reach; 1% of the
            statistical error if None.
        local: local training of a trial; for a convex model 5 epochs of step 0.1 if None.
        rounds: rounds of a trial.
        draws: drawings that calibrate the noise of the fits.
        seed: of draws and trials.
        device: of a trial.
        progress: shows how far a trial is.
        measure: what the answer is shown by beside the losses, such as "auroc" or "mae"; with the
            evidence.

    Raises:
        FederationError: one client, one class, or features that never vary.
        ConfigError: a value that cannot be right, or ``basis="theory"`` where it does not hold.

    >>> import sartor
    >>> from sartor.data.synthetic import logistic
    >>> fed, _ = logistic(spread=0.05, clients=10, samples=200, dim=3, test_samples=50)
    >>> sartor.advise(fed, features="raw").strategy
    'global'
    """
    check(federation, budget_mb, budget_rounds, accuracy, rounds, draws, basis)
    metric = None if measure is None else chosen_metric(federation.task, measure)
    if basis in ("auto", "evidence"):
        if ridge > 0:
            raise ConfigError(
                "The evidence learns the ridge of every model; leave ridge out, or take "
                "basis='theory' or basis='trial', which use yours."
            )
        whole = all_samples(federation)
        if model is None and features is None and federation.x.is_floating_point():
            features = most_features(whole)
        seen = _seen(whole, model, features, ridge, basis)
        if seen is not None:
            beside = _theory_beside(federation, model, features, target, draws, seed)
            advice = by_evidence(federation, seen, beside, budget_mb, budget_rounds, metric)
            return replace(advice, verifier=_verify)
        if basis == "evidence":
            raise ConfigError(
                "The evidence is for linear models; leave model out, freeze all of the network but "
                "a linear head (sartor.models.pretrained), or take basis='trial'."
            )
    if metric is not None:
        raise ConfigError(
            "The theory and a trial are judged by losses alone; leave measure out, or take a "
            "linear model and basis='evidence'."
        )
    found, reasons = None, []
    seen = _seen(federation, model, features, ridge, basis) if basis == "theory" else None
    if seen is not None:
        clients = seen.clients()
        reasons = too_few(federation, clients)
        if not reasons:
            weights = clients.sizes / clients.sizes.sum()
            found = estimate(clients, weights, target=target, draws=draws, seed=seed)
            reasons = refusal(federation, clients, found)
    elif basis == "theory":
        raise ConfigError(
            "The theory is for convex models; leave model out for a linear model of the features, "
            "freeze all of the network but a linear head, or take basis='trial'."
        )
    if found is not None and seen is not None and not reasons:
        advice = by_theory(
            federation, seen, clients, found, target, budget_mb, budget_rounds, accuracy, seed
        )
        return replace(advice, verifier=_verify)
    ways = ways_out(federation, seen, model) if reasons else []
    if basis == "theory":
        raise FederationError("\n".join([*reasons, *(f"Way out: {way}" for way in ways)]))
    if budget_rounds is not None:
        rounds = min(rounds, budget_rounds)
    network = model
    used, words = federation, "the network that was given"
    training = local or Local()
    if model is None:
        shown = seen if seen is not None else view(federation, features or SCALED, ridge)
        network, used = shown.network(), shown.federation
        words = f"{shown.family} regression on {shown.kept}, trained by SGD"
        if local is None:
            training = Local(epochs=5, batch=32, lr=0.1, weight_decay=ridge)
    trial = try_pulls(
        used,
        model=network,
        local=training,
        rounds=rounds,
        seed=seed,
        device=device,
        progress=progress,
    )
    about = Subject(used, None, None, network, training, rounds, seed, device)
    advice = by_trial(used, trial, words, reasons, ways, about, budget_mb)
    return replace(advice, verifier=_verify)


def _theory_beside(
    federation: Federation,
    model: nn.Module | None,
    features: str | None,
    target: Target,
    draws: int,
    seed: int,
) -> Advice | None:
    """Return what the theory says of the training samples; None where it does not hold."""
    try:
        seen = _seen(federation, model, features, 0.0, "theory")
        if seen is None or not well_posed(seen.clients()):
            return None
        return advise(
            federation,
            model=model,
            features=features,
            basis="theory",
            target=target,
            draws=draws,
            seed=seed,
        )
    except PFLError:
        return None


def _verify(advice: Advice, progress: Progress | None) -> Verification:
    """Train the recommendation and both ends; what that needs is imported when it is asked for."""
    from sartor.adviser.verify import verify

    return verify(advice, progress)


def _seen(
    federation: Federation,
    model: nn.Module | None,
    features: str | None,
    ridge: float,
    basis: str,
) -> View | None:
    """Return how a convex model sees the samples: by themselves, or through a frozen network."""
    if model is None:
        return view(federation, features or SCALED, ridge)
    if not models.trains_head_alone(model) or federation.task in ("multilabel", "next-token"):
        return None
    try:
        through = models.features(model, federation)
        if features is None:
            one = through.x.new_ones(len(through.x), 1)
            found = view(replace(through, x=torch.cat((through.x, one), 1)), "raw", ridge)
            words = f"{through.input_shape[0]} features and an intercept"
        else:
            found = view(through, features, ridge)
            words = f"{found.kept} (for which λ holds)"
    except PFLError:
        if basis == "theory" or features is not None:
            raise
        return None  # a network of which the theory has too much, or nothing, is tried
    return replace(found, kept=f"{words}, through the frozen {type(model).__name__}")
