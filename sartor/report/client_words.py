"""What the page of a client says: the verdict, what would decide, what leaves the house."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sartor.methods import METHODS
from sartor.methods.catalogue import AUTO
from sartor.report.gains import Gains, interval, with_unit
from sartor.results.gains import ClientGain
from sartor.results.headline import HeadlineMetric
from sartor.results.metrics import t_quantile
from sartor.results.result import Result

MOST_TIMES = 50
"""Beyond so many times the samples, no realistic amount decides."""

MOST_DIVISIONS = 100

STAYS = (
    "Your samples stay with you: no row, no picture, no text and no name is ever part of a message."
)
HARMLESS = (
    "What is sent is computed from your samples, and it is not harmless: a curious server could "
    "sometimes reconstruct single samples from it, or infer whether a person was among them. That "
    "is not protected unless differential privacy or secure aggregation is added. Nor is it "
    "protected that a server lies, that other clients collude, or that they report false scores. "
    "The page “Deploy” of Sartor's documentation (docs/deploy.md) says what is protected, and how."
)
SEEN = (
    "The server also sees your name, when you are connected, how many training, validation and "
    "test samples you have, the names of your classes, how many test samples your model answers "
    "correctly, and its loss."
)
SIMULATED = (
    "This run was a rehearsal on one machine that had all the data; nothing was sent. Over a "
    "network (sartor serve, sartor join) these messages would travel, and the data would stay."
)

TERMS = {
    "model": "a model is the list of weights of a network, fitted to the samples",
    "head": "the head is the last layer of the network, the body or extractor the layers before it",
    "prototypes": "prototypes are the mean features of the samples of each class",
    "centroids": "centroids are the mean features of the samples of each class",
    "mean feature": "a mean feature is the average of what the network computes from the samples",
    "control": "a control is a mean gradient, with as many numbers as the model",
    "sums": "sums are totals of features and of their products over the samples",
    "scores": "scores are measures of models on the samples, a few numbers",
    "spreads": "means and spreads describe how certain each weight is",
}
"""Word of what travels -> what it means."""


def verdict_sentence(name: str, gains: Gains, one: ClientGain) -> str:
    """Return the verdict on a client in one sentence."""
    metric = gains.metric
    text = metric.text
    less = " (less is better)" if metric.sign < 0 else ""
    values = f"{metric.name} {text(one.federated)} together, {text(one.alone)} alone{less}"
    if not math.isfinite(one.gain):
        return f"{name} has no test samples that could show whether training together helps."
    if one.verdict == "gains":
        return f"{name} gains by training together: {values}."
    if one.verdict == "loses":
        return f"{name} loses by training together: {values}."
    return f"These data cannot tell whether {name} gains by training together: {values}."


def interval_sentence(gains: Gains, one: ClientGain) -> str:
    """Return how certain the difference is, in plain words."""
    metric = gains.metric
    ends = interval(metric, one.low, one.high)
    if not math.isfinite(one.gain):
        return "Without test samples nothing can be measured."
    if not ends:
        return (
            f"The difference is {with_unit(metric, one.gain)}. One division of the data into "
            "training and test samples does not say how certain it is."
        )
    where = {
        "gains": "all of it above zero, so the gain is more than chance",
        "loses": "all of it below zero, so the loss is more than chance",
        "cannot tell": "with zero in it, so the difference may be chance",
    }[one.verdict]
    over = (
        f"over {gains.divisions} divisions of the data into training and test samples"
        if gains.divisions > 1
        else "from one division of the data"
    )
    return (
        f"The difference is {with_unit(metric, one.gain)}, with a 95 % interval of "
        f"{ends} {over}: {where}."
    )


def samples_sentence(gains: Gains, one: ClientGain) -> str:
    """Return the difference in samples, where answers are right or wrong; else nothing."""
    if not gains.metric.has_samples or not math.isfinite(one.gain):
        return ""
    number = abs(one.gain * one.samples)
    more = "more" if one.gain >= 0 else "fewer"
    noun = "sample" if f"{number:.1f}" == "1.0" else "samples"
    return (
        f"Of {one.samples:.0f} test samples, the model trained together answers {number:.1f} "
        f"{noun} {more} correctly than the one trained alone."
    )


def class_sentence(metric: HeadlineMetric, one: ClientGain) -> str:
    """Return what always answering the most frequent class would reach, beside an accuracy."""
    if metric.name != "accuracy" or not math.isfinite(one.largest_class):
        return ""
    return (
        f"The most frequent class makes up {100 * one.largest_class:.1f} % of the training "
        "samples: a model that always answers it is right about as often."
    )


def what_would_decide(gains: Gains, one: ClientGain) -> str:
    """Return how many divisions or samples would roughly decide, if the difference stays as it is.

    The interval shrinks with the root of the number of samples, and over K divisions as
    t · √(1/K + overlap).
    """
    metric, half = gains.metric, (one.high - one.low) / 2
    if not math.isfinite(one.gain):
        return "Hold some samples out for a test, so that a difference can be measured."
    if not math.isfinite(half):
        return "Repeat the run over several divisions of the data: --seeds 10."
    wide = max(abs(one.low), abs(one.high))
    largest = with_unit(metric, wide).lstrip("+−")
    times = (half / abs(one.gain)) ** 2 if one.gain else math.inf
    if times > MOST_TIMES:
        return (
            f"The difference is at most {largest} either way, and so close to zero that no "
            "realistic amount of data would decide. In this measure it hardly matters which you "
            "take; training alone is simpler."
        )
    needed = _divisions_needed(gains, one.gain, half)
    if needed:
        return (
            f"About {needed} divisions of the data instead of {gains.divisions} would roughly "
            f"decide, if the difference stays as it is: --seeds {needed}."
        )
    more = f"{times:.0f}" if times >= 3 else f"{times:.1f}"
    first = "" if gains.divisions > 1 else "Several divisions (--seeds 10) say more than one. "
    return (
        f"{first}About {more} times as many samples would roughly decide, if the difference stays "
        f"as it is: {_rounded(times * one.samples)} test samples instead of {one.samples:.0f}, and "
        "training samples in proportion. More divisions alone would not."
    )


def _divisions_needed(gains: Gains, gain: float, half: float) -> int | None:
    """Return the smallest number of divisions whose interval leaves zero out, or None."""
    now = gains.divisions
    if now < 2:
        return None
    spread = half / (t_quantile(0.975, now - 1) * math.sqrt(1 / now + gains.overlap))
    for number in range(now + 1, MOST_DIVISIONS + 1):
        wide = t_quantile(0.975, number - 1) * math.sqrt(1 / number + gains.overlap)
        if wide * spread < abs(gain):
            return number
    return None


def _rounded(number: float) -> str:
    """Return a number of samples with two figures.

    >>> _rounded(1234.0), _rounded(37.4)
    ('1,200', '37')
    """
    digits = max(0, math.floor(math.log10(number)) - 1) if number > 0 else 0
    return f"{round(number, -digits):,.0f}"


def travels(result: Result) -> str:
    """Return what the method sends, in the words of the list of methods, with terms explained."""
    entry = METHODS.get(result.method)
    short = AUTO.travels if entry is None and result.method == "auto" else ""
    short = entry.travels if entry is not None else short
    if not short:
        return f"{result.method} is not in the list of methods, so what it sends is not described."
    if short == "nothing":
        return "This method sends nothing."
    terms = [meaning for word, meaning in TERMS.items() if word in short]
    if "body" in short or "extractor" in short:
        terms.append(TERMS["head"]) if TERMS["head"] not in terms else None
    explained = f" ({'; '.join(terms)})" if terms else ""
    shown = short.replace(" down", " to you").replace(" up", " from you")
    return f"In every round of {result.method} travels: {shown}{explained}."


def traffic(result: Result) -> str:
    """Return the bytes of a client and round in each direction, means over clients."""
    ledger = result.ledger
    trips = float(np.sum(ledger.participants[0])) or 1.0
    up, down = (float(np.sum(getattr(ledger, name)[0])) / trips for name in UP_AND_DOWN)
    rounds = ledger.num_rounds
    total = (up + down) * trips / max(len(result.clients), 1)
    if not total:
        return "No byte was sent."
    return (
        f"A client sends {size(up)} and receives {size(down)} in a round; {size(total)} in all "
        f"{rounds} rounds, both ways."
    )


UP_AND_DOWN = ("bytes_up", "bytes_down")


def size(number: float) -> str:
    """Return bytes in a readable unit.

    >>> size(950), size(20_800), size(3.25e6)
    ('950 bytes', '20.8 kB', '3.2 MB')
    """
    for unit, worth in (("MB", 1e6), ("kB", 1e3)):
        if number >= worth:
            return f"{number / worth:,.1f} {unit}"
    return f"{number:.0f} bytes"


def ended_sentence(name: str, result: Result) -> str:
    """Return what a client ended with, where each kept the best of several models."""
    index = result.client_index(name)
    runs = range(len(result.runs))
    words: Sequence[str] = [e[index] for r in runs if (e := result.ended_with(r)) is not None]
    if not words:
        return ""
    counts = {word: words.count(word) for word in sorted(set(words))}
    if len(words) == 1:
        return f"By its held-out samples, {name} kept this model: {words[0]}."
    parts = ", ".join(f"{word} in {number}" for word, number in counts.items())
    return f"By its held-out samples, {name} kept, of {len(words)} runs: {parts}."
