"""Undoes mistakes of shape so that the other mistakes of a spec show: misspelt fields renamed, wrong values made holes.

A hole is filled with everything that may have been meant. What is wrong whichever it was is a mistake of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, nearest
from flexgen.spec.shapes import (
    annotation_at,
    bare_annotation,
    data_path,
    field_names,
    literals_at,
    model_at,
    model_class,
    value_at,
)
from flexgen.spec.source import Document

if TYPE_CHECKING:
    from flexgen.spec.load import Spec

_ROUNDS = 6
_NAMED = (*models.SECTIONS_WITH_LIKE, "layer_inputs", "kinds")
_FREE: tuple[SpecPath, ...] = (("tiny",), ("checkpoint", "defaults"), ("checkpoint", "require"))
_GONE = object()


@dataclass
class Hole:
    """A wrong or missing value: the places it is inherited at, itself first, and what may have been meant."""

    paths: list[SpecPath]
    fillings: list[Any]


@dataclass
class Mended:
    """A spec whose holes can be filled.

    is_open    a hole may use any definition, so that nothing is known to be unused
    has_tiny   what the spec says of config.json, and of which layer has which kind, is whole
    """

    spec: Spec
    data: dict[str, Any]
    holes: dict[SpecPath, Hole] = field(default_factory=dict)
    is_open: bool = False

    @property
    def has_tiny(self) -> bool:
        return not any(hole[0] == "schedule" or hole == free[: len(hole)] for hole in self.holes for free in _FREE)

    def filled(self, chosen: dict[SpecPath, int]) -> Spec | None:
        """The spec with a filling in each hole, the first where none is chosen; None where they do not fit."""
        data = copy.deepcopy(self.data)
        try:
            for key, hole in self.holes.items():
                for path in hole.paths:
                    _put(data, path, hole.fillings[chosen.get(key, 0)])
            return replace(self.spec, data=data, model=models.SpecModel.model_validate(data))
        except (ValidationError, LookupError, TypeError):
            return None


def misspelt(error: ValidationError, spec: Spec) -> list[tuple[SpecPath, str]]:
    """The unknown fields that stand for a known one that is not given, each with that one."""
    found = []
    for item in error.errors(include_url=False):
        path, _ = data_path(item["loc"], spec.data)
        if item["type"] == "extra_forbidden" and spec.origin(path) == path:
            model = model_at(path[:-1], spec.data)
            near = nearest(str(path[-1]), field_names(model) if model else [])
            if near and near not in value_at(spec.document.data, path[:-1]) and near not in [name for _, name in found]:
                found.append((path, near))
    return found


def renamed(document: Document, path: SpecPath, name: str) -> Document:
    """The document with another name for a field, which keeps its places."""
    new, depth = (*path[:-1], name), len(path)

    def moved(spans: dict[SpecPath, Any]) -> dict[SpecPath, Any]:
        return {(*new, *at[depth:]) if at[:depth] == path else at: span for at, span in spans.items()}

    data = copy.deepcopy(document.data)
    holder = value_at(data, path[:-1])
    items = [(name if key == path[-1] else key, value) for key, value in holder.items()]
    holder.clear()
    holder.update(items)
    return replace(document, data=data, _keys=moved(document._keys), _values=moved(document._values))


def mended(spec: Spec) -> Mended | None:
    """The spec with a hole for each mistake of shape; None where too much is wrong to tell what was meant."""
    found = Mended(spec, copy.deepcopy(spec.data))
    data = copy.deepcopy(spec.data)
    for _ in range(_ROUNDS):
        try:
            models.SpecModel.model_validate(data)
            return found
        except ValidationError as error:
            items = [(*data_path(item["loc"], data), item["type"]) for item in error.errors(include_url=False)]
            known = [path for hole in found.holes.values() for path in hole.paths]
            opened: list[SpecPath] = []
            for path, missing, kind in sorted(items, key=lambda item: len(item[0])):
                if not path and not missing:
                    return None
                place = (*path, missing or "") if kind == "missing" else path
                place = place[:3] if place[0] == "moe" and place[2:3] in (("gate_up",), ("down",)) else place
                if any(place[: len(other)] == other for other in opened):
                    continue
                if place in known or not _open(place, missing, kind, data, found):
                    return None
                opened.append(place)
    return None


def _open(path: SpecPath, missing: str | None, kind: str, data: Any, found: Mended) -> bool:
    """Make a hole of what an error is about, filled first in `data`; False where nothing is known to fill it."""
    if missing == "[key]" or not path:
        return False
    if kind == "extra_forbidden":
        fillings = [_GONE]
    else:
        if kind == "missing":
            _put(data, path, None)
        fillings = list(_fillings(path, data, value_at(data, path)))
    if not fillings:
        return False
    key = found.spec.origin(path)
    found.holes.setdefault(key, Hole([], fillings)).paths.append(path)
    found.is_open |= kind != "literal_error" or isinstance(fillings[0], list)
    _put(data, path, fillings[0])
    return True


def _put(data: Any, path: SpecPath, value: Any) -> None:
    holder = value_at(data, path[:-1])
    if value is _GONE:
        holder.pop(path[-1], None)
    else:
        holder[path[-1]] = copy.deepcopy(value)


# ---------------------------------------------------------------- what may have been meant


def _fillings(path: SpecPath, data: Any, value: Any) -> Iterator[Any]:
    """Values for the place, the likeliest first."""
    annotation = annotation_at(path, data)
    owner = model_at(path[:-1], data)
    info = next((i for n, i in owner.model_fields.items() if (i.alias or n) == path[-1]), None) if owner else None
    if info is not None and not info.is_required():
        yield _GONE
    choices = literals_at(path, data)
    if path[0] == "kinds" and len(path) == 2:
        yield from _kinds(data)
    elif path[0] == "moe" and path[2:] in (("gate_up",), ("down",)):
        order = {"order": ["gate", "up"]} if path[2] == "gate_up" else {}
        for axes in (["expert", "out", "in"], ["expert", "in", "out"]):
            yield [{"stacked": f"hole_{path[2]}", "axes": axes, **order}]
    elif path in _FREE:
        yield {}
    elif len(path) == 1 and model_class(annotation) is None and not choices:
        yield from ({"name": ["hole"], "summary": ["hole"]}.get(str(path[0]), []))
    elif path[0] == "dims":
        yield from _config_fields(data)
        yield "1"
    elif path[0] == "block" and len(path) == 2:
        yield from ({"scale": 1}, {"add": [{"scale": 1}, *sorted(_slots(data))]})
    elif _is_step(path, annotation):
        yield {"scale": 1}
        yield from (*sorted(_slots(data)), *_defined(data))
        yield from ({"times": name} for name in data.get("layer_inputs") or ())
    else:
        yield from _values(path, data, value, annotation, choices)


def _values(path: SpecPath, data: Any, value: Any, annotation: Any, choices: list[Any]) -> Iterator[Any]:
    written = repr(annotation)
    if choices and "max_length" not in written:
        near = nearest(str(value), map(str, choices))
        yield from sorted(choices, key=lambda choice: str(choice) != near)
    same = [v for p, v in _everything(data) if p[-1] == path[-1] and p != path and isinstance(v, str | int | float)]
    if (model := model_class(annotation)) is not None:
        siblings = value_at(data, path[:-1]) if model_class(annotation_at(path[:-1], data)) is None else {}
        values = siblings.values() if isinstance(siblings, dict) else siblings
        whole = [entry for entry in values if entry is not value and _fits(model, entry)]
        yield from whole or [{}]
    elif "BeforeValidator" in written:
        yield from (*dict.fromkeys(map(models._source_text, same)), *_dims(data), "1", "true")
    elif "max_length=40" in written:
        sections = [data.get(section) for section in _NAMED]
        yield from (*dict.fromkeys(same), *(name for entries in sections if isinstance(entries, dict) for name in entries))
    elif "max_length=120" in written:
        yield from _config_fields(data)
    elif "max_length=200" in written and get_origin(bare_annotation(annotation)) is not list:
        yield "hole" + "".join(f"_{step}" for step in path)
    elif isinstance(value, str) and path[-1] == "model_types":
        yield [value]


def _fits(model: type[BaseModel], entry: Any) -> bool:
    try:
        return bool(model.model_validate(entry))
    except ValidationError:
        return False


def _takes(annotation: Any, wanted: Any) -> bool:
    return annotation == wanted or any(_takes(inner, wanted) for inner in get_args(annotation) if inner is not annotation)


def _is_step(path: SpecPath, annotation: Any) -> bool:
    return isinstance(path[-1], int) and _takes(bare_annotation(annotation), models.NormStep) and len(path) > 2


def _everything(node: Any, path: SpecPath = ()) -> Iterator[tuple[SpecPath, Any]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key), value
        yield from _everything(value, (*path, key))


def _dims(data: Any) -> list[str]:
    return list(data["dims"]) if isinstance(data.get("dims"), dict) else []


def _defined(data: Any) -> list[str]:
    """The parts that a slot can hold."""
    sections = [data.get(section) for section in ("attention", "gdn", "mlp", "moe", "layer_inputs")]
    return [name for entries in sections if isinstance(entries, dict) for name in entries]


def _slots(data: Any) -> set[str]:
    kinds = data.get("kinds")
    return {slot for kind in kinds.values() if isinstance(kind, dict) for slot in kind} if isinstance(kinds, dict) else set()


def _kinds(data: Any) -> Iterator[Any]:
    named = {v for p, v in _everything(data.get("block")) if isinstance(v, str) and isinstance(p[-1], int)}
    for part in _defined(data):
        yield dict.fromkeys(sorted(named - set(_defined(data))), part)


def _config_fields(data: Any) -> list[str]:
    checkpoint = data.get("checkpoint")
    places = (data.get("tiny"), checkpoint.get("defaults") if isinstance(checkpoint, dict) else None)
    return list(dict.fromkeys(".".join(map(str, path)) for place in places for path, _ in _everything(place)))
