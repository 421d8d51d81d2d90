"""From a name and options to a record: options are checked, and those of every method applied."""

from __future__ import annotations

from typing import Any

from sartor.compose import fine_tuned, weighting
from sartor.compose.harm import HeldOut, do_no_harm
from sartor.compose.robust import Rule, robust
from sartor.core.errors import ConfigError, did_you_mean, refuse
from sartor.core.local import Local
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.methods.catalogue import Factory, find
from sartor.methods.fedavg import fedavg
from sartor.methods.local import local as local_train
from sartor.methods.options import COMMON, fits, say, static_options, taken


def build(method: str | Factory, task: Task, local: Local, options: dict[str, Any]) -> Method:
    """Build a method by name or factory, with its options checked.

    Raises:
        ConfigError: for an unknown method, option or value, naming the nearest legal one.
    """
    factory = find(method)
    known = static_options(factory)
    called = method if isinstance(method, str) else getattr(method, "__name__", "method")
    faults = []
    options = {k: taken(v, known[k][1]) if k in known else v for k, v in options.items()}
    for name, value in options.items():
        if name not in known:
            near = did_you_mean(name, known)
            faults.append(f"Unknown option {name!r} of method {called!r}{near}")
        elif not fits(value, known[name][1]):
            faults.append(f"Option {name} must be {say(known[name][1])}, got {value!r}.")
    refuse(faults)
    own = {name: value for name, value in options.items() if name not in COMMON}
    steps, epochs = options.get("finetune_steps"), options.get("finetune_epochs")
    weights = options.get("class_weights")
    if weights is not None:
        if own.get("parts") or called in ("auto", "evidence"):
            raise ConfigError(
                f"{called} works with the plain likelihood of the data, so it takes no "
                "class_weights; leave them out, or take a method that is trained by descent."
            )
        task = weighting.for_weights(task)
        weights = weighting.checked(task, weights)
    record = factory(task, local, **own)
    rule: Rule = options.get("robust", "none")
    for name in ("robust_share", "robust_mix"):
        if name in options and rule == "none":
            raise ConfigError(
                f"{name} has no effect without a rule; give one, such as robust='median', or leave "
                f"{name} out."
            )
    share, mix = float(options.get("robust_share", 0.2)), options.get("robust_mix")
    record = robust(record, rule, share, mix)
    if steps is not None or epochs is not None:
        record = fine_tuned(record, task, local, steps=steps, epochs=epochs)
    harm = {name: v for name, v in options.items() if name.startswith("harm_")}
    if options.get("do_no_harm"):
        on: HeldOut = "validation" if harm.get("harm_on") == "validation" else "holdout"
        share, score = float(harm.get("harm_share", 0.2)), harm.get("harm_score", "loss")
        record = do_no_harm(
            record, task, local, alone=local_train, common=fedavg, on=on, share=share, score=score
        )
    elif harm:
        raise ConfigError(
            f"No effect without do_no_harm: {', '.join(harm)}; set do_no_harm=True, or leave that "
            "out."
        )
    return record if weights is None else weighting.weighted(record, weights)
