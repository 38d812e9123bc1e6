"""Edits of a spec's text and data, one field at a time: what a person does wrong, and what a person may change."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from flexgen.spec import fields, models
from flexgen.spec.annotations import _full, annotation_at, field_names, model_at
from flexgen.spec.diagnostics import Span, SpecPath
from flexgen.spec.source import Document, load

FREE = (("tiny",), ("checkpoint", "defaults"), ("checkpoint", "require"))
"""Parts that hold a checkpoint's own fields: what their names and types may be is the checkpoint's matter."""


ORDERLESS = (("checkpoint", "fp32"), ("checkpoint", "transposed"))
"""Lists that name weights, in any order."""


def paths(node: Any, path: SpecPath = ()) -> Iterator[SpecPath]:
    """Every place of the data, parents first."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


class Text:
    """A spec's text, cut at the places that its document knows."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.document = load(text, "spec.yaml")
        self.starts = [0]
        for line in text.split("\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)

    def offsets(self, span: Span) -> tuple[int, int]:
        return self.starts[span.line - 1] + span.column - 1, self.starts[span.end_line - 1] + span.end_column - 1

    def is_flow(self, path: SpecPath) -> bool:
        """Whether the mapping or list that holds `path` is written between brackets."""
        parent = path[:-1]
        start, _ = self.offsets(self.document.value_span(parent)) if parent else (0, 0)
        return self.text[start] in "{["

    def entry(self, path: SpecPath) -> tuple[int, int]:
        """Where the key and value of a mapping's entry, or a list's item, stand."""
        return self.offsets(self.document.key_span(path))[0], self.offsets(self.document.value_span(path))[1]

    def misspelt(self, path: SpecPath) -> str:
        _, end = self.offsets(self.document.key_span(path))
        return self.text[: end - 1] + self.text[end - 1] + self.text[end - 1 :]

    def duplicated(self, path: SpecPath) -> str:
        start, end = self.entry(path)
        between = ", " if self.is_flow(path) else "\n" + " " * (self.document.key_span(path).column - 1)
        return self.text[:end] + between + self.text[start:]

    def deleted(self, path: SpecPath) -> str:
        start, end = self.entry(path)
        before, after = self.text[:start], self.text[end:]
        if self.is_flow(path):
            if after.startswith(","):
                return before + after[1:].lstrip()
            return before.rstrip().removesuffix(",") + after
        return before.rstrip(" ") + after.removeprefix("\n") if before.endswith("\n") or not before.strip() else before + after.lstrip()

    def retyped(self, path: SpecPath, value: str) -> str:
        start, end = self.offsets(self.document.value_span(path))
        return self.text[:start] + value + self.text[end:]

    def lines(self, path: SpecPath) -> range:
        """The lines that a key and its value take."""
        return range(self.document.key_span(path).line, self.document.value_span(path).end_line + 1)


def other_type(value: Any) -> str:
    """A value of a type that the field cannot have, as YAML."""
    return "7" if isinstance(value, dict | list) else "[[7]]"


# ---------------------------------------------------------------- legal changes


class Places(dict):
    """Positions of an edited document: those of the nearest place that the file has."""

    def __missing__(self, path: SpecPath) -> Span:
        return self[path[:-1]]


def edited(document: Document, path: SpecPath, value: Any) -> Document:
    """The document with one value set."""
    data = _set(document.data, path, value)
    return dataclasses.replace(document, data=data, _keys=Places(document._keys), _values=Places(document._values))


def _set(node: Any, path: SpecPath, value: Any) -> Any:
    if not path:
        return value
    copy: Any = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = _set(node[path[0]], path[1:], value) if len(path) > 1 else value
    return copy


def others(document: Document, path: SpecPath) -> list[Any]:
    """Other values that the field at a path may take, as far as its type says."""
    value = document.data_at(path)
    if any(path[: len(free)] == free and len(path) > len(free) for free in FREE):
        return _other_plain(value)
    if isinstance(value, dict):
        return []
    if path in ORDERLESS and value:
        return [value[:-1]]
    if path[-1] == "like":
        return [name for name in document.data[path[0]] if name != value and name != path[1]]
    return [other for other in candidates(annotation_at(path, document.data), document, value) if not same(other, value)]


def same(one: Any, other: Any) -> bool:
    """Whether two values say the same: `true` reads as the flag that it is."""
    return fields.source_text(one) == fields.source_text(other)


def _other_plain(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [float(value) * 2]
    if isinstance(value, str):
        return [value + "x"]
    if isinstance(value, list):
        return [value[:-1], [*value, *value]] if value else []
    return []


def candidates(annotation: Any, document: Document, value: Any = None) -> list[Any]:
    """Values of a type, most of them likely to have a meaning where they stand."""
    data = document.data
    if annotation is fields.Text or any(isinstance(item, fields.BeforeValidator) for item in getattr(annotation, "__metadata__", ())):
        grown = [f"{value} + 1"] if value not in (None, "none", True, False) else []
        return [*grown, "3", "true", "false", "none", "1.5", *(name for name in ("heads", "tied") if name in data["dims"])]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if annotation is fields.TensorName or annotation is fields.ConfigPath:
        return [f"{value}x" if value not in (None, "none") else "some.tensor"]
    if annotation is fields.Identifier:
        named = [name for section in (*models.SECTIONS_WITH_LIKE, "layer_inputs", "kinds") for name in data.get(section, {})]
        return [f"{value}x" if value else "spare", *dict.fromkeys(named)]
    if get_origin(annotation) in (Union, types.UnionType):
        return [item for argument in get_args(annotation) for item in candidates(argument, document, value)]
    if get_origin(annotation) is list:
        if value:
            return [value[:-1], [*value, *value], list(reversed(value))]
        inner = get_args(annotation)[0]
        return [[item] for item in candidates(inner, document)]
    if hasattr(annotation, "__metadata__"):
        inner = get_args(annotation)[0]
        if inner is str:
            return candidates(fields.TensorName, document, value)
        return candidates(inner, document, value)
    if annotation is str:
        return [f"{value or 'some'} text"]
    if annotation is bool:
        return [not value]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation is not models.SumStep:
        filled = {name: candidates(_full(info), document) for name, info in annotation.model_fields.items() if info.is_required()}
        return [{name: values[0] for name, values in filled.items()}] if all(filled.values()) else []
    return []


def absent(document: Document, inherited: dict[str, Any]) -> Iterator[tuple[SpecPath, list[Any]]]:
    """Every optional field that an entry leaves out, with values that it may take other than the one it has.

    `inherited` is the document's data with `like` written out.
    """
    for path in [(), *paths(document.data)]:
        if any(path[: len(free)] == free for free in FREE) or not isinstance(node := document.data_at(path), dict):
            continue
        model = model_at(path, document.data)
        if model is None:
            continue
        for name, info in model.model_fields.items():
            key = info.alias or name
            if key not in node and not info.is_required():
                now = _at(inherited, (*path, key), info.default)
                yield (*path, key), [value for value in candidates(_full(info), document) if not same(value, now)]


def _at(node: Any, path: SpecPath, default: Any) -> Any:
    for step in path[:-1]:
        node = node[step]
    return node.get(path[-1], default)


def required(document: Document, path: SpecPath) -> bool:
    """Whether the language says that the field must be there."""
    model = model_at(path[:-1], document.data)
    if model is None or "like" in document.data_at(path[:-1]) or path[-1] not in field_names(model):
        return False
    return next(info for name, info in model.model_fields.items() if (info.alias or name) == path[-1]).is_required()
