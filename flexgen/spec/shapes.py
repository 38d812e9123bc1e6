"""Turns pydantic's verdict on a spec's shape into diagnostics with positions; none of its wording reaches a user."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, Tag, ValidationError

from flexgen.spec.diagnostics import Diagnostic, SpecPath, nearest
from flexgen.spec.models import SECTIONS_WITH_LIKE, Attention, SpecModel

if TYPE_CHECKING:
    from flexgen.spec.load import Spec

_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
    "model_attributes_type": "a mapping",
}


def explain(error: ValidationError, data: Any, spec: Spec) -> list[Diagnostic]:
    """One diagnostic for each place that pydantic refused, the first reason of each."""
    seen: dict[tuple[SpecPath, bool], Diagnostic] = {}
    items = error.errors(include_url=False, include_context=True, include_input=True)
    for item in sorted(items, key=lambda item: (item["type"] == "literal_error", -len(item["loc"]))):
        path, missing = data_path(item["loc"], data)
        is_missing = item["type"] == "missing"
        if is_missing and _inherits(path, spec):  # its base lacks it too
            continue
        place = ((*path, missing), True) if is_missing or missing == "[key]" else (path, False)
        is_tried = any(other[: len(path)] == path for other, _ in seen) and item["type"] == "literal_error"
        if place not in seen and not is_tried and spec.origin(path) == path:
            seen[place] = _explain(item, path, missing, data, spec)
    return list(seen.values())


def _inherits(path: SpecPath, spec: Spec) -> bool:
    """Whether a path is an entry that takes its fields from another one."""
    entries = spec.document.data.get(path[0]) if len(path) == 2 and path[0] in SECTIONS_WITH_LIKE else None
    entry = entries.get(path[1]) if isinstance(entries, dict) else None
    base = entry.get("like") if isinstance(entry, dict) else None
    return isinstance(base, str) and base != path[1] and base in entries


def data_path(loc: tuple[str | int, ...], data: Any) -> tuple[SpecPath, str | None]:
    """The part of `loc` that exists in the data, union tags dropped, and the name of a missing field."""
    path: list[str | int] = []
    node = data
    rest = None
    for element in loc:
        if (isinstance(node, dict) and element in node) or (
            isinstance(node, list) and isinstance(element, int) and element < len(node)
        ):
            node = node[element]
            path.append(element)
            rest = None
        else:
            rest = str(element)
    return tuple(path), rest


def _explain(item: Any, path: SpecPath, missing: str | None, data: Any, spec: Spec) -> Diagnostic:
    kind = item["type"]
    value = value_at(data, path)
    name = str(path[-1]) if path else "spec"
    if kind == "missing":
        owner = f"`{name}`" if path else "the spec"
        if path and isinstance(path[-1], int):
            owner = "this entry"
        help = _field_help(path, data, missing or "")
        is_rope = missing == "rope" and model_at(path, data) is Attention
        return Diagnostic(
            "SPEC015" if is_rope else "SPEC005",
            f"{owner} lacks the field `{missing}`",
            spec.path,
            spec.span(path, key=True),
            help=help,
            subject=(*path, missing or ""),
        )
    if kind == "extra_forbidden":
        model = model_at(path[:-1], data)
        fields = field_names(model) if model else []
        near = nearest(name, fields)
        help = f"did you mean `{near}`?" if near else f"fields here: {', '.join(f'`{f}`' for f in fields)}"
        settles = [(*path[:-1], near)] if near else []
        return Diagnostic(
            "SPEC004",
            f"unknown field `{name}`",
            spec.path,
            spec.span(path, key=True),
            help=help,
            settles=settles,
            subject=path,
        )
    if missing == "[key]" or (kind == "string_pattern_mismatch" and missing):
        help = "names are lower case letters, digits and `_`, and start with a letter"
        return Diagnostic("SPEC020", f"`{name}` cannot be a name", spec.path, spec.span(path, key=True), help=help)
    return _explain_value(item, path, name, value, data, spec)


def _explain_value(item: Any, path: SpecPath, name: str, value: Any, data: Any, spec: Spec) -> Diagnostic:
    kind, context = item["type"], item.get("ctx") or {}
    span = spec.span(path)
    shown = _shown(value)
    where = f"item {path[-1]}" if path and isinstance(path[-1], int) else f"`{name}`"
    if kind in ("literal_error", "enum"):
        written = {_written(choice): choice for choice in literals_at(path, data)}
        near = nearest(str(value), list(written))
        help = f"did you mean `{near}`?" if near else f"one of {', '.join(f'`{choice}`' for choice in written)}"
        if isinstance(value, str) and not isinstance(written.get(value, ""), str):
            help = f"write {value} without quotes: in quotes it is text"
        return Diagnostic("SPEC007", f"{where} cannot be {shown}", spec.path, span, help=help, subject=path)
    if kind.startswith("union_tag"):
        forms = ", ".join(f"`{form}`" for form in _tags_at(path, data))
        return Diagnostic(
            "SPEC006", f"{where} has none of the forms that it can take", spec.path, span, help=f"forms: {forms}"
        )
    if kind == "string_pattern_mismatch":
        return _explain_pattern(path, where, value, span, spec)
    if kind in ("string_too_long", "too_long", "string_too_short", "too_short"):
        least = context.get("min_length")
        limit = f"at least {least}" if least is not None else f"at most {context.get('max_length')}"
        unit = "characters" if kind.startswith("string") else "items"
        return Diagnostic("SPEC007", f"{where} needs {limit} {unit}", spec.path, span, subject=path)
    wanted, help = _TYPES.get(kind, "another type of value"), None
    if wanted == "text":
        annotation = repr(annotation_at(path, spec))
        if "_source_text" in annotation:
            wanted = "a number or an expression"
        elif "max_length=40" in annotation:
            wanted = "the name of an entry"
        elif not isinstance(value, dict | list | type(None)):
            help = "quote it to make it text"
    return Diagnostic("SPEC006", f"{where} needs {wanted}, found {shown}", spec.path, span, help=help, subject=path)


def _explain_pattern(path: SpecPath, where: str, value: Any, span: Any, spec: Spec) -> Diagnostic:
    annotation = repr(annotation_at(path, spec))
    if "max_length=40" in annotation:
        help = "names are lower case letters, digits and `_`, and start with a letter"
        return Diagnostic("SPEC020", f"{where} cannot be {_shown(value)}", spec.path, span, help=help, subject=path)
    help = "tensor names are words joined by `.`; `*` stands for an index"
    return Diagnostic("SPEC021", f"{where} cannot be {_shown(value)}", spec.path, span, help=help, subject=path)


def _written(choice: Any) -> str:
    """As YAML has it."""
    return {True: "true", False: "false", None: "null"}[choice] if choice is None or isinstance(choice, bool) else str(choice)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return f"`{text if len(text) <= 40 else text[:39] + '…'}`"


def _field_help(path: SpecPath, data: Any, field: str) -> str | None:
    model = model_at(path, data)
    info = model.model_fields.get(field) if model else None
    return info.description if info else None


def value_at(data: Any, path: SpecPath) -> Any:
    """The value at a path that exists."""
    for element in path:
        data = data[element]
    return data


# ---------------------------------------------------------------- which model stands at a path


def field_names(model: type[BaseModel]) -> list[str]:
    """The fields as a file writes them."""
    return [info.alias or name for name, info in model.model_fields.items()]


def annotation_at(path: SpecPath, data: Any) -> Any:
    """The type annotation of the value at a path; unions are settled by the data."""
    annotation: Any = SpecModel
    node = data.document.data if hasattr(data, "document") else data
    for element in path:
        annotation = _settle(annotation, node)
        model = model_class(annotation)
        if model is not None:
            names = {info.alias or name: info for name, info in model.model_fields.items()}
            info = names.get(str(element))
            if info is None:
                return Any
            annotation = _full(info)
        else:
            arguments = get_args(bare_annotation(annotation))
            annotation = arguments[-1] if arguments else Any
        node = node[element] if isinstance(node, dict | list) else None
    return _settle(annotation, node)


def _full(info: Any) -> Any:
    """A field's annotation with its metadata, as it was written in the class."""
    metadata = [*info.metadata, *([info.discriminator] if info.discriminator else [])]
    return Annotated[info.annotation, *metadata] if metadata else info.annotation


def model_at(path: SpecPath, data: Any) -> type[BaseModel] | None:
    """The model that describes the mapping at a path."""
    return model_class(annotation_at(path, data))


def literals_at(path: SpecPath, data: Any) -> list[Any]:
    """The values that a field with a closed set of them takes."""
    return list(_literals(annotation_at(path, data)))


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from (value for value in get_args(annotation) if value is not None)
    else:
        for argument in get_args(annotation):
            yield from _literals(argument)


def bare_annotation(annotation: Any) -> Any:
    """An annotation without the constraints around it."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def model_class(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation takes, optional or not; None if it takes none."""
    annotation = bare_annotation(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((model for model in map(model_class, get_args(annotation)) if model is not None), None)
    return None


def _settle(annotation: Any, node: Any) -> Any:
    """The member of a tagged union that the data chose; any other annotation as it is."""
    found = annotation
    while get_origin(found) is Annotated:
        inner, *metadata = get_args(found)
        chooser = next((item for item in metadata if isinstance(item, Discriminator)), None)
        if chooser is not None:
            tag = chooser.discriminator(node)  # type: ignore[operator]
            return next((member for member in get_args(inner) if _tag(member) == tag), annotation)
        found = inner
    return annotation


def _tag(member: Any) -> str | None:
    return next((item.tag for item in getattr(member, "__metadata__", ()) if isinstance(item, Tag)), None)


def _tags_at(path: SpecPath, data: Any) -> list[str]:
    annotation = annotation_at(path, data)
    while get_origin(annotation) is Annotated and not any(_tag(member) for member in get_args(get_args(annotation)[0])):
        annotation = get_args(annotation)[0]
    members = typing.get_args(get_args(annotation)[0]) if get_origin(annotation) is Annotated else ()
    return [tag.removeprefix("form:") for tag in map(_tag, members) if tag]
