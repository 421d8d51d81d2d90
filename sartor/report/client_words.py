"""What the page of a client says: the verdict, what would decide, what leaves the house."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

import numpy as np

from sartor.methods import METHODS
from sartor.methods.catalogue import AUTO
from sartor.report.gains import Gains, gain_text, interval, with_unit
from sartor.results.gains import ClientGain
from sartor.results.headline import HeadlineMetric
from sartor.results.metrics import t_quantile
from sartor.results.result import Result

MOST_TIMES = 50
"""Beyond so many times the samples, no realistic amount decides."""

MOST_DIVISIONS = 100

NOT_YET = "Do not decide by this run alone."

STAYS = "Your samples: no row of a table, no picture and no text is ever part of a message."
HARMLESS = (
    "What you send is computed from your samples, and it is not harmless: a curious server could "
    "sometimes reconstruct single samples from it, or infer whether a person was among them. "
    "Unless differential privacy or secure aggregation is added, nothing prevents that. Nothing "
    "prevents a server that lies, clients that collude, or false scores either. “What is "
    "protected, and what is not” in Sartor's documentation (docs/deploy.md) has the whole list."
)
SEEN = (
    "Your name, when you are connected, how many training, validation and "
    "test samples you have, the names of your classes, how many test samples your model answers "
    "correctly, and its loss."
)
SIMULATED = (
    "This run was a rehearsal on one machine that had all the data; nothing was sent. Over a "
    "network (sartor serve, sartor join) these messages would travel, and the data would stay."
)

TERMS = {
    "model": "the model is the list of weights of a network, fitted to the samples",
    "head": "the head is the last layer of the network",
    "body": "the body is the network without its last layer",
    "extractor": "the extractor is the network without its last layer",
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
        f"The difference is {gain_text(metric, one)}, with a 95 % interval of "
        f"{ends} {over}: {where}."
    )


def samples_sentence(gains: Gains, one: ClientGain) -> str:
    """Return the difference in samples, where answers are right or wrong; else nothing."""
    if not gains.metric.has_samples or not math.isfinite(one.gain):
        return ""
    number = abs(one.gain * one.samples)
    if number < 0.05:
        return (
            f"Of {one.samples:.0f} test samples, the model trained together answers as many "
            "correctly as the one trained alone."
        )
    more = "more" if one.gain > 0 else "fewer"
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
        return f"{NOT_YET} Repeat the run over several divisions of the data: --seeds 10."
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
            f"{NOT_YET} About {needed} divisions of the data instead of {gains.divisions} would "
            f"roughly decide, if the difference stays as it is: --seeds {needed}."
        )
    more = f"{times:.0f}" if times >= 3 else f"{times:.1f}"
    first = "" if gains.divisions > 1 else "Several divisions (--seeds 10) say more than one. "
    return (
        f"{NOT_YET} {first}About {more} times as many samples would roughly decide, if the "
        f"difference stays as it is: {_rounded(times * one.samples)} test samples instead of "
        f"{one.samples:.0f}, and training samples in proportion. More divisions alone would not."
    )


@functools.cache
def _wide(number: int) -> float:
    """Return t for an interval over a number of divisions; it takes milliseconds to work out."""
    return t_quantile(0.975, number - 1)


def _divisions_needed(gains: Gains, gain: float, half: float) -> int | None:
    """Return the smallest number of divisions whose interval leaves zero out, or None."""
    now = gains.divisions
    if now < 2:
        return None
    spread = half / (_wide(now) * math.sqrt(1 / now + gains.overlap))
    for number in range(now + 1, MOST_DIVISIONS + 1):
        wide = _wide(number) * math.sqrt(1 / number + gains.overlap)
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


def travels(result: Result) -> list[tuple[str, str]]:
    """Return what the method sends, as questions and answers, with the terms explained."""
    found = _sent(result)
    if result.choices:
        extra = "What the choice between several models needs; it is counted below."
        found.append(("What does the option do-no-harm add?", extra))
    return found


def _sent(result: Result) -> list[tuple[str, str]]:
    entry = METHODS.get(result.method)
    if entry is None:
        what = AUTO.travels if result.method == "auto" else "what its author says"
        return [("What do you send and receive?", f"{what[0].upper()}{what[1:]}.")]
    if entry.travels == "nothing":
        return [("What do you send?", "Nothing.")]
    words = entry.travels
    terms = [meaning for word, meaning in TERMS.items() if re.search(rf"\b{word}", words)]
    explained = "".join(f" {t[0].upper()}{t[1:]}." for t in dict.fromkeys(terms))
    parts = re.split(r"[,;] ", words)
    ways = [re.fullmatch(r"(.+) (down|up)( once)?", part) for part in parts]
    found = [way for way in ways if way is not None]
    if len(found) < len(parts):
        return [("What do you send and receive?", f"{words[0].upper()}{words[1:]}.{explained}")]
    both: dict[str, list[str]] = {"up": [], "down": []}
    for way in found:
        both[way[2]].append(f"{'Once' if way[3] else 'Every round'}: {way[1]}.")
    sent, received = (" ".join(both[way]) for way in ("up", "down"))
    return [("What do you send?", sent + explained), ("What do you receive?", received)]


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
        f"{size(up)} out and {size(down)} in, every round; {size(total)} in all {rounds} rounds, "
        "both ways (mean of the clients)."
    )


UP_AND_DOWN = ("bytes_up", "bytes_down")

MEANINGS = {
    "largest class": "what always answering your most frequent class would reach",
    "accuracy": "share of right answers",
    "balanced accuracy": "share of right answers in each class, then their mean",
    "F1": "balance of found and false alarms; 1 is best",
    "AUROC": "chance that a true case gets a higher score than another; ½ is guessing",
    "average precision": "share of true cases among those with high scores; 1 is best",
    "Brier": "squared error of the probabilities; 0 is best",
    "log loss": "how surprised the probabilities are by the truth; 0 is best",
    "calibration error": "how far probabilities lie from frequencies; 0 is best",
    "sensitivity": "share of the true cases that are found",
    "specificity": "share of the other samples that raise no alarm",
    "threshold": "probability from which a case is called",
    "exact match": "share of samples with all labels right",
    "labels right": "share of labels that are right",
    "micro F1": "balance of found and false labels, all together; 1 is best",
    "macro F1": "the same, mean over the labels; 1 is best",
    "RMSE": "typical error, large ones count more; in the units of the data",
    "MAE": "mean error, in the units of the data",
    "R²": "share of the variation that is explained; 1 is best, 0 is answering the mean",
}
"""Measure -> what it is, in a few words."""


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
