"""Private names of PyTorch: all in one module, and all still there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import sartor
from sartor.core import torch_private

PACKAGE = Path(sartor.__file__).parent
ALLOWED = Path(torch_private.__file__)
ATTRIBUTES = {name for path in torch_private.USED if (name := path.split(".")[-1])[0] == "_"}


@pytest.mark.parametrize("path", torch_private.USED)
def test_pytorch_still_has(path: str) -> None:
    try:
        torch_private.find(path)
    except AttributeError:
        pytest.fail(f"PyTorch {torch.__version__} lost {path}: {torch_private.USED[path]}")


def test_a_missing_name_fails_where_it_is_used_and_says_for_what(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(torch_private.USED, "torch._no_such_name", "a feature of ours")
    with pytest.raises(AttributeError):
        torch_private.find("torch._no_such_name")
    missing = torch_private._or_missing("torch._no_such_name")
    for use in (missing, type("Inherits", (missing,), {})):
        with pytest.raises(RuntimeError, match=r"no torch\._no_such_name.*a feature of ours"):
            use()


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _words(node: ast.expr) -> list[str]:
    """Return a chain of attributes as words; without a name at its root, what is known of it."""
    words = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else [""]), *reversed(words)]


def private_uses(text: str) -> list[str]:
    """List the private names of torch, and what `USED` names as experimental, in a program."""
    program = ast.parse(text)
    found, roots = [], {"torch"}
    for node in ast.walk(program):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            roots |= {alias.asname or alias.name for alias in node.names}
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [a.name for a in node.names if a.name.split(".")[0] == "torch"]
            roots |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.")}
        else:
            continue
        used = torch_private.USED
        found += [path for path in paths if path in used or any(map(_is_private, path.split(".")))]
    for node in program.body:  # such as `_aten = torch.ops.aten`
        if isinstance(node, ast.Assign) and _words(node.value)[0] in roots:
            roots |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(program):
        if isinstance(node, ast.Attribute):
            root, *words = _words(node)
            if node.attr in ATTRIBUTES or (root in roots and any(map(_is_private, words))):
                found.append(ast.unparse(node))
    return found


def test_no_other_module_uses_a_private_name() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file != ALLOWED:
            assert not private_uses(file.read_text()), file.relative_to(PACKAGE)


@pytest.mark.parametrize(
    "line",
    [
        "from torch._guards import tracing",
        "from torch.utils import _pytree as pytree",
        "import torch._dynamo",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "import torch\ntorch._foreach_add_(a, b)",
        "import torch\naten = torch.ops.aten\naten._to_copy.default",
        "from torch.autograd import forward_ad as ad\nad._other",
        "operation._schema",
    ],
)
def test_the_search_finds(line: str) -> None:
    assert private_uses(line)


def test_the_search_leaves_public_names_alone() -> None:
    assert not private_uses("import torch\ntorch.__version__, self._own, torch.ops.aten.add.Tensor")
