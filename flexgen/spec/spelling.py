"""Misspelt fields, taken as what they probably mean: what else is wrong of shape shows in the same run, and what the right
field's absence would say does not. `flexgen.spec.load` calls it; nothing of what it changes leaves there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flexgen.spec.annotations import field_names, model_at, value_at
from flexgen.spec.diagnostics import SpecPath, nearest
from flexgen.spec.shapes import data_path
from flexgen.spec.source import Document

if TYPE_CHECKING:
    from flexgen.spec.load import Spec


def misspelt(error: ValidationError, spec: Spec) -> list[tuple[SpecPath, str]]:
    """The unknown fields that stand for a known one that is not given, each with that one."""
    found: list[Any] = []
    for item in error.errors(include_url=False):
        path, _ = data_path(item["loc"], spec.data)
        if item["type"] == "extra_forbidden" and spec.origin(path) == path:
            model = model_at(path[:-1], spec.data)
            near = nearest(str(path[-1]), field_names(model) if model else [])
            if near and near not in value_at(spec.document.data, path[:-1]) and near not in [name for _, name in found]:
                found.append((path, near))
    return found


def respelt(document: Document, fields: list[tuple[SpecPath, str]]) -> Document:
    """The document with the right names of fields, which keep their places."""
    for path, name in sorted(fields, key=lambda item: -len(item[0])):  # inner ones first: a path names outer ones as written
        document = _renamed(document, path, name)
    return document


def _renamed(document: Document, path: SpecPath, name: str) -> Document:
    new, depth = (*path[:-1], name), len(path)

    def moved(spans: dict[SpecPath, Any]) -> dict[SpecPath, Any]:
        return {(*new, *at[depth:]) if at[:depth] == path else at: span for at, span in spans.items()}

    data = copy.deepcopy(document.data)
    holder = value_at(data, path[:-1])
    items = [(name if key == path[-1] else key, value) for key, value in holder.items()]
    holder.clear()
    holder.update(items)
    return replace(document, data=data, _keys=moved(document._keys), _values=moved(document._values))
