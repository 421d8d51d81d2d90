"""One client of a federation: its data, its private states, and what it does with a message.

The work itself is that of `engines.work.InProcess` on an arena in which only this client has
samples, with one lane; so a client over a network does what its lane does in a simulation, in the
same order and with the same keys. It sends an upload, counts of samples, and the sums of scores.

| order | what the client does | what it answers |
|---|---|---|
| facts | reads its data | how many samples of what shape it has, and the names of its classes |
| hello | builds the method from the settings | the same |
| start | keeps the state that the server gives a newcomer | nothing |
| work | message, phases, upload; keeps its new state | upload, costs, scores if asked |
| score | the model it would use, on its own held-out data | sums of correct answers and losses |
| centre | the same for a model that it is sent | the same |
| keep | the model it would use now, kept | nothing |
| deploy | writes the model that it will use to its own disk | nothing |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sartor.core.errors import MessageError, PFLError
from sartor.core.method import Method
from sartor.core.task import Task
from sartor.core.tree import Tree
from sartor.data.federation import Federation
from sartor.data.split import SPLITS
from sartor.network.client_state import ClientState
from sartor.network.client_work import SingleClient
from sartor.network.messages import pack, unpack
from sartor.runs.storage import write_state
from sartor.training.onboarding import as_newcomer

Build = Callable[[Mapping[str, Any], Federation], tuple[Method, Task]]
"""``(settings of the server, own data) -> method and task``."""

Load = Callable[[Mapping[str, Any]], Federation]
"""``(how to hold samples out) -> own data``, a federation of one client."""


@dataclass
class Client:
    """A client that answers messages.

    Attributes:
        folder: where private states are kept, in a folder per federation; None keeps them in
            memory.
        seen: what the method shows of the kept state at evaluations; it stays here.
        work: what it does, from the first hello on.
        data: its own samples, once they are read.
    """

    load: Load
    build: Build
    folder: Path | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    say: Callable[[str], None] = lambda text: None
    seen: list[dict[str, Any]] = field(default_factory=list)
    work: SingleClient | None = None
    data: Federation | None = None

    def answer(self, message: bytes) -> bytes:
        """Do what a message asks, and return the answer; a fault here is an answer too."""
        name: dict[str, Any] = {}
        try:
            messages, head = unpack(message)
            name = {k: head.get(k) for k in ("server", "serial")}
            body, meta = self._do(messages, head)
            return pack(body, {**name, **meta})
        except PFLError as error:
            self.say(f"could not do it: {error}")
            return pack({}, {**name, "fault": str(error), "stranger": self.work is None})

    def _do(self, messages: Tree, head: dict[str, Any]) -> tuple[Tree, dict[str, Any]]:
        kind = head.get("kind")
        if kind in ("facts", "hello"):
            self.data = self.load(head.get("split", {}))
            facts = _facts(self.data)
            if kind == "hello":
                self.data = _relabelled(self.data, head)
                method, task = self.build(head["settings"], self.data)
                if task.given_weights() != head.get("weights", {}):
                    raise MessageError(
                        "its network brings other weights than the server's: frozen parts and the "
                        "start must be the same for all"
                    )
                if "newcomer" in head:
                    num, past = (int(number) for number in head["newcomer"])
                    method = as_newcomer(method, num, past)
                states = ClientState(self.folder and self.folder / str(head["federation"]))
                self.work = SingleClient(method, task, self.data, head, states, self.device)
                self.say(f"registered with the server: {method.name}")
            return {}, facts
        if self.work is None:
            raise MessageError("the client was restarted and has had no hello yet")
        if kind == "start":
            return {}, self.work.start(messages, head)
        if kind == "work":
            found = self.work.work(messages, head)
            self.say(f"round {head['round'] + 1}: trained")
            return found
        if kind == "score":
            scores, look = self.work.score(messages, head)
            self.seen += [{"round": head["round"], **look}] if look else []
            return {}, scores
        if kind == "centre":
            return {}, self.work.centre(messages, head)
        if kind == "keep":
            return {}, self.work.keep(messages, head)
        if kind == "deploy":
            model = self.work.model(messages, head)
            if self.folder is not None:
                path = self.folder / str(head["federation"]) / "model.safetensors"
                write_state(path, model, {"method": self.work.method.name, "seen": self.seen[-1:]})
                self.say(f"the model is in {path}")
            return {}, {}
        raise MessageError(f"the order {kind!r} is not known; the server is of another release")


def _facts(data: Federation) -> dict[str, Any]:
    """Return what the server must know of a client's data."""
    # Real numbers take the precision of the run, whatever a client holds them in.
    kind = torch.float32 if data.y.is_floating_point() else data.y.dtype
    return {
        "sizes": {split: int(data.split(split).sizes[0]) for split in SPLITS},
        "shape": list(data.input_shape),
        "labels": [str(kind).removeprefix("torch."), list(data.y.shape[1:])],
        "tokens": not data.x.dtype.is_floating_point,
        "classes": data.num_classes,
        "task": data.task,
        "class_names": list(data.info.get("class_names", [])),
    }


def _relabelled(data: Federation, head: Mapping[str, Any]) -> Federation:
    """Number the classes as all clients do."""
    classes, names = head.get("classes"), list(head.get("class_names", []))
    own = data.info.get("class_names", [])
    if strange := sorted(set(own) - set(names)):
        raise MessageError(f"its classes {strange[:5]} are not known to the federation")
    if own:
        data = replace(data, y=torch.tensor([names.index(name) for name in own])[data.y])
    if classes is None:
        return data
    if data.num_classes > classes:
        raise MessageError(f"it has {data.num_classes} classes, the federation has {classes}")
    return replace(data, num_classes=int(classes))
