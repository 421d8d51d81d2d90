"""Arithmetic in plans: numbers, names and a few functions, and nothing else of Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from sartor.core.errors import ConfigError

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_CALLS: dict[str, Callable[..., float]] = {"abs": abs, "max": max, "min": min, "sqrt": math.sqrt}


def parse(text: str) -> ast.expr:
    """Read an expression; refuse what is none."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ConfigError(
            f"{text!r} is not an expression: {error.msg}; write arithmetic, such as 1 / (2 + 3)."
        ) from None


def evaluate(
    node: ast.expr,
    *,
    name: Callable[[str], float] | None = None,
    words: Callable[[str, list[str]], float | None] | None = None,
) -> float:
    """Return the value of an expression of + - * /, abs, min, max and sqrt; refuse anything else.

    ``name`` returns the number behind a name; ``words`` the value of a function of words, such as
    ``v("row", "column")``, or None if it knows no such function.

    >>> evaluate(parse("max(1, x) / 2 - 3"), name=lambda word: 8.0)
    1.0
    """

    def value(part: ast.expr) -> float:
        if isinstance(part, ast.Constant) and isinstance(part.value, int | float):
            return float(part.value)
        if isinstance(part, ast.Name) and name is not None:
            return name(part.id)
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub):
            return -value(part.operand)
        if isinstance(part, ast.BinOp) and type(part.op) in _BINARY:
            return _BINARY[type(part.op)](value(part.left), value(part.right))
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and not part.keywords:
            if part.func.id in _CALLS:
                return float(_CALLS[part.func.id](*(value(one) for one in part.args)))
            given = [one.value for one in part.args if isinstance(one, ast.Constant)]
            if words is not None and len(given) == len(part.args):
                found = words(part.func.id, [str(word) for word in given])
                if found is not None:
                    return found
        raise ConfigError(
            f"{ast.unparse(part)!r} is not arithmetic on numbers; use + - * /, abs, min, max, sqrt "
            "and the names that are known here."
        )

    return value(node)
