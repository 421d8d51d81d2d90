"""Write the pages that come from the code: one per method, their index, and the API reference.

``python -m docs.generate [FOLDER]`` writes ``methods/*.md`` and ``api.md`` into this folder, where
``make docs`` finds them; they are not kept in the repository, so they are never out of date.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

from docs.notes import read_notes
from docs.reference import api_page, to_markdown
from sartor.analysis.traffic import known
from sartor.methods import METHODS, PAPERS, MethodEntry
from sartor.methods.options import COMMON, say

HERE = Path(__file__).parent
ROOT = HERE.parent

FAMILIES = {
    "baseline": "Baselines",
    "regularised": "Regularised: own models, pulled towards something shared",
    "collaborative": "Collaborative: models, heads or prototypes of others are combined",
}


@dataclass(frozen=True)
class Law:
    """A test and the sentence that it states."""

    name: str
    sentence: str


def main(folder: Path = HERE) -> list[Path]:
    """Write all generated pages into a folder; return their paths."""
    pages = {f"methods/{name}.md": method_page(name, entry) for name, entry in METHODS.items()}
    pages["methods/index.md"] = index_page()
    pages["api.md"] = api_page()
    written = []
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


# ---------------------------------------------------------------------- methods


def index_page() -> str:
    """Return the list of all methods, with what travels and the work of a round."""
    parts = [
        "# Methods, one by one",
        "",
        "Each page is made from the method's file, its tests and a measurement. Sizes are those of "
        "a participant in a round, in models; work is in gradients of one local pass (FedAvg has "
        "1). Both are read off the ledger of the second round of a toy federation: 3 clients, 64 "
        "inputs, 100 hidden units, 10 classes, one pass of 4 samples. FedALA's figure is that of "
        "its long first learning of weights. [The overview](../methods.md) has a measured "
        "comparison.",
        "",
    ]
    for family, title in FAMILIES.items():
        parts += [f"## {title}", "", "| method | what it does | down | up | once | work |"]
        parts += ["|---|---|---|---|---|---|"]
        for name, entry in METHODS.items():
            if entry.family == family:
                cost = known(name)
                sizes = f"{cost.down:.2f} | {cost.up:.2f} | {cost.once:.2f} | {cost.gradients:.3g}"
                parts.append(f"| [{name}]({name}.md) | {entry.summary} | {sizes} |")
        parts.append("")
    parts += [
        "## The laws of all methods",
        "",
        "Every method above honours these; a method of your own can be held to them with "
        "`tests.laws.check_method` ([contributing](../contributing.md)).",
        "",
        *(f"- {law.sentence}" for law in laws_in(ROOT / "tests" / "laws.py", "")),
        "",
    ]
    return "\n".join(parts) + toctree(list(METHODS))


def toctree(names: list[str]) -> str:
    """Return the list of pages that the site's navigation needs."""
    return "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def method_page(name: str, entry: MethodEntry) -> str:
    """Return the page of one method."""
    module = inspect.getmodule(entry.factory)
    text = inspect.getdoc(module) or ""
    file = Path(inspect.getsourcefile(entry.factory) or "")
    cost = known(name)
    own = {key: value for key, value in entry.options.items() if key not in COMMON}
    parts = [
        f"# {name}",
        "",
        f"{_sentence(entry.summary)} `sartor run {name} --data digits`, or "
        f'`sartor.fit("{name}", federation)`.',
        "",
        "| | |",
        "|---|---|",
        f"| paper | {entry.citation} |",
        f"| family | {entry.family} |",
        f"| studied in | {'; '.join(PAPERS[p] for p in entry.papers) or '–'} |",
        f"| what travels | {entry.travels} |",
        f"| sent to a participant | {cost.down:.4g} × the model, a round |",
        f"| sent by a participant | {cost.up:.4g} × the model, a round |",
        f"| outside of rounds | {cost.once:.4g} × the model, both ways |",
        f"| work | {cost.gradients:.4g} × the gradients of one local pass |",
        f"| file | `sartor/methods/{file.name}` |",
        "",
        "## The method",
        "",
        to_markdown(text),
        "",
        "## Hyper-parameters",
        "",
        "Numbers that can be swept, `sweep={...}` or `--sweep`.",
        "",
        "| name | default | from | to | meaning |",
        "|---|---|---|---|---|",
        *(
            f"| `{k}` | {h.default} | {h.low} | {h.high} | {_cell(h.note)} |"
            for k, h in entry.hyper.items()
        ),
        "",
    ]
    if own:
        parts += ["## Options", "", "| name | default | allowed |", "|---|---|---|"]
        parts += [
            f"| `{k}` | `{default}` | {_cell(say(hint))} |" for k, (default, hint) in own.items()
        ]
        parts.append("")
    parts += ["Besides, the [options of every method](../methods.md).", ""]
    parts += _proven(name, file)
    if notes := read_notes().get(name):
        parts += ["## In other libraries", "", *(f"- {note}" for note in notes), ""]
    return "\n".join(parts)


def _proven(name: str, file: Path) -> list[str]:
    """Return the section of laws: those of the method's own test file."""
    tests = [f"test_{name.replace('-', '_')}.py", f"test_{file.stem}.py", "test_heads.py"]
    found = next((t for t in tests if (ROOT / "tests" / "methods" / t).is_file()), None)
    if found is None:
        return []
    laws = laws_in(ROOT / "tests" / "methods" / found, "test_")
    lines = [f"- {law.sentence}" for law in laws]
    told = f"Laws of `tests/methods/{found}`, beside [those of all methods](index.md)."
    return ["## What is proven", "", told, "", *lines, ""]


def laws_in(path: Path, prefix: str) -> list[Law]:
    """Return the laws of a file: what every test says of itself, else its name.

    Without a prefix the laws are those of ``tests/laws.py``, public functions of a case.
    """
    laws = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith(prefix):
            continue
        first = node.args.args[0].arg if node.args.args else ""
        if prefix or (first == "case" and node.name[0] != "_" and node.name != "check_method"):
            text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            words = node.name.removeprefix(prefix).replace("_", " ").capitalize() + "."
            laws.append(Law(node.name, to_markdown(text) or words))
    return laws


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _cell(text: str) -> str:
    """Return a text that may stand in a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
