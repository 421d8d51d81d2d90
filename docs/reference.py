"""The API reference in Markdown, from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import sartor

REFERENCE: dict[str, tuple[str, ...]] = {
    "sartor": ("fit", "compare", "advise", "search", "load", "accelerate"),
    "sartor.data.federation": ("Federation",),
    "sartor.results.result": ("Result",),
    "sartor.results.comparison": ("Comparison",),
    "sartor.results.serving": ("Prediction",),
    "sartor.adviser.advice": ("Advice",),
    "sartor.adviser.verification": ("Verification",),
    "sartor.training.search": ("Search",),
    "sartor.core.local": ("Local", "descend", "half_square"),
    "sartor.training.stopping": ("EarlyStopping",),
    "sartor.training.callbacks": (),
    "sartor.core.method": (
        "Method",
        "Use",
        "Schedule",
        "Wire",
        "Newcomer",
        "Show",
        "Phase",
        "ClientContext",
        "ServerContext",
        "changed",
        "weighted_mean",
    ),
    "sartor.core.task": ("Task",),
    "sartor.models": (),
    "sartor.training.onboarding": ("onboard",),
    "sartor.report": ("write_report", "write_figures"),
    "sartor.core.errors": (),
}
"""Module -> the names that the reference describes; none is all public names of the module."""


def to_markdown(text: str) -> str:
    """Return a docstring as Markdown: roles become code, double backticks single ones."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def api_page() -> str:
    """Return the reference of the public names, from their docstrings."""
    listed = "".join(f"`{name}`, " for name in sartor.__all__ if name[0] != "_").rstrip(" ")
    parts = [
        "# API reference",
        "",
        f"`import sartor` has {listed[:-1]}. Everything else is named with its module.",
        "",
    ]
    for module, names in REFERENCE.items():
        parts += [f"## {module}", ""]
        found = importlib.import_module(module)
        if not names:
            parts += [to_markdown(inspect.getdoc(found) or ""), ""]
        for name in names or _public(found):
            parts += list(_described(name, getattr(found, name)))
    return "\n".join(parts)


def _public(module: Any) -> Iterator[str]:
    """Yield the public classes and functions of a module, in the order of its file."""
    listed = getattr(module, "__all__", None)
    for name, value in vars(module).items():
        own = getattr(value, "__module__", "").startswith(module.__name__)
        public = not name.startswith("_") and (listed is None or name in listed)
        if own and public and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name


def _described(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if not (inspect.isclass(value) and issubclass(value, Exception)):
        yield from _signature(name, value)
    yield _sections(inspect.getdoc(value) or "")
    yield ""
    if not inspect.isclass(value) or issubclass(value, (Exception, tuple)):
        return
    for key, member in _members(value).items():
        member = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if key.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        if isinstance(member, property):
            yield f"**`{name}.{key}`** {_first(member)}"
        else:
            yield f"**`{name}.{key}`**"
            yield ""
            yield from _signature(key, member)
            yield _sections(inspect.getdoc(member) or "")
        yield ""


def _members(value: type) -> dict[str, Any]:
    """Return what a class has from bases of this library, and of its own."""
    ours = [base for base in reversed(value.__mro__) if base.__module__.startswith("sartor.")]
    return {key: member for base in ours for key, member in vars(base).items()}


def _first(value: Any) -> str:
    return to_markdown(" ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split()))


def _signature(name: str, value: Any) -> Iterator[str]:
    """Yield the signature as code, a line for each argument where it is long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return
    text = re.sub(r"<(?:function|class) ['\"]?([\w.]+)[^>]*>", r"\1", str(signature))
    text = re.sub(r"\b(?:torch|sartor|collections|pathlib|typing)(?:\.\w+)*\.(\w+)", r"\1", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    line = f"{name}{text}"
    yield "```text"
    yield line if len(line) <= 110 else re.sub(r", (?=[*\w]+[:=,])", ",\n    ", line)
    yield "```"
    yield ""


def _sections(text: str) -> str:
    """Return a Google docstring as Markdown: sections become lists, examples become code."""
    out: list[str] = []
    inside = ""
    for line in to_markdown(text).splitlines():
        head = re.match(
            r"(Args|Other Args|Returns|Raises|Attributes|Example|Examples|Yields):$", line
        )
        if head:
            inside = head[1]
            if inside.startswith("Example"):
                continue
            out += ["", f"*{inside.replace('Args', 'arguments').capitalize()}*", ""]
        elif inside and line.startswith("    ") and not line.lstrip().startswith(">>>"):
            item = re.match(r" {4}(\*{0,2}\w+)(?: \([^)]*\))?: (.*)", line)
            if item and inside != "Returns":
                out.append(f"- `{item[1]}`: {item[2]}")
            else:
                out.append("  " * (inside != "Returns") + line.strip())
        else:
            out.append(line)
            inside = inside if not line or line.startswith(" ") else ""
    return _examples(out)


def _examples(lines: list[str]) -> str:
    """Return the lines with every doctest, and what it prints, as a block of code."""
    out: list[str] = []
    fenced = False
    for line in lines:
        starts = line.lstrip().startswith(">>>")
        if starts and not fenced:
            out += ["", "```pycon"]
            fenced = True
        elif fenced and not line.strip():
            out.append("```")
            fenced = False
        out.append(line.strip() if fenced else line)
    return "\n".join([*out, "```"] if fenced else out)
