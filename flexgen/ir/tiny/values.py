"""What a field of a config may hold, and how a message names a value of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from flexgen.contract.configs import look


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number, not negative", lambda value: _is_int(value) and value >= 0),
    "float": ("a number", lambda value: _is_int(value) or isinstance(value, float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "number": ("a number or a flag", lambda value: isinstance(value, int | float)),
    "indices": ("a list of layer indices", lambda value: isinstance(value, list) and all(map(_is_int, value))),
    "values": ("a list of texts, numbers or flags", lambda value: isinstance(value, list) and all(isinstance(v, str | int) for v in value)),
}


TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType({
    "int": ("a whole number, not negative", lambda value: _is_int(value) and value >= 0),
    "float": ("a number", lambda value: _is_int(value) or isinstance(value, float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "number": ("a number or a flag", lambda value: isinstance(value, int | float)),
    "indices": ("a list of layer indices", lambda value: isinstance(value, list) and all(map(_is_int, value))),
    "values": ("a list of texts, numbers or flags", lambda value: isinstance(value, list) and all(isinstance(v, str | int) for v in value)),
})
"""What a field is read as: what it must be, in words and as a test."""


def same_type(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return TYPES["float"][1](value)
    return any(_type(value) == _type(item) for item in (wanted if isinstance(wanted, list) else [wanted]))


def _type(value: Any) -> str | None:
    kinds = (("flag", bool), ("number", int | float), ("text", str), ("list", list), ("mapping", dict))
    return next((name for name, kind in kinds if isinstance(value, kind)), None)


def has(config: Any, field: str) -> bool:
    *parents, last = field.split(".")
    node = look(config, ".".join(parents)) if parents else config
    return isinstance(node, dict) and last in node


def names(config: Any) -> Iterator[str]:
    """The names of a config's fields, at any depth."""
    for key, value in config.items() if isinstance(config, dict) else ():
        yield key
        yield from names(value)


def words(name: str) -> set[str]:
    return set(re.split(r"[._]", name))


def shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    text = str(value)
    text = text if len(text) <= 40 else text[:39] + "…"
    reads_as_other = isinstance(value, str) and (value in ("true", "false", "null") or value[:1] in "+-.0123456789")
    return f'`"{text}"`' if reads_as_other else f"`{text}`"
