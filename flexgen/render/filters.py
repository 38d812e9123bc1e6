"""How templates write values: literals, lists that fill lines, calls. Each is a filter of every template."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

WIDTH = 120
"""Columns that layout fills."""


def _tuple(items: Iterable[object]) -> str:
    listed = [_literal(item) for item in items]
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def _filled(items: Iterable[str], indent: int) -> str:
    """Items separated by commas, as many on a line as fit; the first line is already indented."""
    lines: list[str] = []
    for item in items:
        longer = f"{lines[-1]} {item}," if lines else f"{item},"
        if lines and indent + len(longer) <= WIDTH:
            lines[-1] = longer
        else:
            lines.append(f"{item},")
    return ("\n" + " " * indent).join(lines)


def _filled_tuple(items: Sequence[object]) -> str:
    """A tuple on one line where it fits, else filled."""
    listed = [_literal(item) for item in items]
    one = _tuple(items)
    return one if len(one) <= WIDTH - 12 else f"(\n    {_filled(listed, 4)}\n)"


def _filled_dict(value: dict[str, object], indent: int = 4) -> str:
    """A dict literal on as many lines as it needs; a dict within it that fits on none is broken likewise."""
    if len(one := _literal(value)) <= WIDTH - 8 - indent:
        return one
    shown = {key: _filled_dict(item, indent + 4) if isinstance(item, dict) else _literal(item) for key, item in value.items()}
    listed = [f"{_literal(key)}: {item}" for key, item in shown.items()]
    margin = " " * indent
    return f"{{\n{margin}{_filled(listed, indent)}\n{margin[4:]}}}"


def _literal(value: object) -> str:
    """A value of the spec as a Python literal with double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool | type(None) | int):
        return repr(value)
    if isinstance(value, float):
        return getattr(value, "text", None) or repr(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    raise TypeError(f"no literal for {type(value).__name__}")


def _operand(code: object) -> str:
    """Code as an operand of `*`: a quotient or sum in parentheses."""
    node = ast.parse(str(code), mode="eval").body
    return f"({code})" if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow) else str(code)


def _norm(norm: Any, x: str) -> str:
    """A call of a norm of x; one over all heads at once sees them end to end."""
    if norm.whole:
        return f"{norm.function}({', '.join(_given([f'{x}.flatten(1)', norm.gain, norm.bias, norm.eps]))}).view_as({x})"
    return f"{norm.function}({', '.join(_given([x, norm.gain, norm.bias, norm.eps]))})"


def _given(items: Iterable[object]) -> list[str]:
    """Those of the items that there are, as text."""
    return [str(item) for item in items if item]


def _call(arguments: Iterable[object], function: str, before: int) -> str:
    """A call with the arguments that are given, on one line where it fits behind `before` columns, else filled."""
    listed = [str(item) for item in arguments if item]
    one = f"{function}({', '.join(listed)})"
    return one if before + len(one) <= WIDTH else f"{function}(\n        {_filled(listed, 8)}\n    )"


def _signature(arguments: Sequence[str], function: str) -> str:
    """The head of a function that returns a tensor, on one line where it fits."""
    one = f"def {function}({', '.join(arguments)}) -> Tensor:"
    return one if len(one) <= WIDTH else f"def {function}(\n    {_filled(arguments, 4)}\n) -> Tensor:"


def _weight_row(row: Any) -> str:
    """A row of a weight table as a call of its constructor; linear modules that do not fit one line have one each."""
    call = f'{"*" if row.is_list else ""}weights.{row.make}("{row.role}"'
    rest = [*row.arguments, *(["fp32=True"] if row.fp32 else [])]
    rows = [f'"{module}": {count}' for module, count in row.rows]
    modules = ["{" + ", ".join(rows) + "}"] if rows else []
    one = f"{call}, {', '.join([*modules, *rest])})"
    if 8 + len(one) < WIDTH:
        return one
    two = f"{call}, {', '.join([*modules, rest[0]])},\n            {', '.join(rest[1:])})"
    if rows and rest[1:] and max(map(len, two.split("\n"))) + 8 <= WIDTH:
        return two
    if rows:
        rows = [item if len(item) < WIDTH - 12 else item.replace("packed(", f"packed(\n{' ' * 16}") for item in rows]
        return "\n".join([f"{call}, {{", *(f"            {item}," for item in rows), f"        }}, {', '.join(rest)})"])
    return f"{call},\n            {_filled(rest, 12).removesuffix(',')})"


def _table(entries: Iterable[Any], key: str, value: str) -> str:
    """A dict of two fields of each entry, the second code or a tuple of texts: on one line where it fits, else filled."""
    values = [(getattr(entry, key), getattr(entry, value)) for entry in entries]
    items = [f'"{name}": {_tuple(item) if isinstance(item, tuple) else item}' for name, item in values]
    one = "{" + ", ".join(items) + "}"
    return one if len(one) <= WIDTH - 50 else "{\n    " + _filled(items, 4) + "\n}"


FILTERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "tuple": _tuple,
        "literal": _literal,
        "filled_tuple": _filled_tuple,
        "filled_dict": _filled_dict,
        "comment": lambda text: f"  # {' '.join(str(text).split())}" if text else "",
        "docstring": lambda text: " ".join(text.split()).replace("\\", "\\\\").replace('"', '\\"'),
        "given": _given,
        "norm": _norm,
        "named": lambda code, name: f"{name}={code}" if code else None,
        "code_tuple": lambda items: f"({', '.join(items)}{',' if len(items) == 1 else ''})",
        "times": lambda code: f" * {_operand(code)}" if code else "",
        "operand": _operand,
        "concat": lambda first, second: [*first, *second],
        "suffixed": lambda items, suffix: [f"{item}{suffix}" for item in items],
        "call": _call,
        "signature": _signature,
        "weight_row": _weight_row,
        "table": _table,
    }
)
