"""Turns pydantic's verdict on a spec's shape into diagnostics with positions; none of its wording reaches a user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flexgen.spec.annotations import annotation_at, field_names, literals_at, model_at, tags_at, value_at
from flexgen.spec.diagnostics import Diagnostic, SpecPath, nearest
from flexgen.spec.models import SECTIONS_WITH_LIKE, Attention

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
        place: tuple[SpecPath, bool] = ((*path, missing or ""), True) if is_missing or missing == "[key]" else (path, False)
        is_tried = any(other[: len(path)] == path for other, _ in seen) and item["type"] == "literal_error"
        if place not in seen and not is_tried and spec.origin(path) == path:
            seen[place] = _explain(item, path, missing, data, spec)
    return list(seen.values())


def _inherits(path: SpecPath, spec: Spec) -> bool:
    """Whether a path is an entry that takes its fields from another one."""
    entries: Any = spec.document.data.get(path[0]) if len(path) == 2 and path[0] in SECTIONS_WITH_LIKE else None
    entry = entries.get(path[1]) if isinstance(entries, dict) else None
    base = entry.get("like") if isinstance(entry, dict) else None
    return isinstance(base, str) and base != path[1] and base in entries


def data_path(loc: tuple[str | int, ...], data: Any) -> tuple[SpecPath, str | None]:
    """The part of `loc` that exists in the data, union tags dropped, and the name of a missing field."""
    path: list[str | int] = []
    node: Any = data
    rest = None
    for element in loc:
        if (isinstance(node, dict) and element in node) or (
            isinstance(node, list) and isinstance(element, int) and element < len(node)
        ):
            node = node[element]  # type: ignore[index]
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
        tags = list(tags_at(path, data))
        for key in value if isinstance(value, dict) else ():
            if (near := nearest(str(key), tags)) is not None:
                at = spec.span((*path, key), key=True)
                return Diagnostic("SPEC004", f"unknown field `{key}`", spec.path, at, help=f"did you mean `{near}`?", subject=(*path, key))
        forms = ", ".join(f"`{form}`" for form in tags)
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
    wanted, help = str(_TYPES.get(kind, "another type of value")), ""
    if wanted == "text":
        annotation = repr(annotation_at(path, spec))
        if "source_text" in annotation:
            wanted = "a number or an expression"
        elif "max_length=40" in annotation:
            wanted = "the name of an entry"
        elif not isinstance(value, dict | list | type(None)):
            help = "quote it to make it text"
    if wanted == "a list" and not isinstance(value, dict | type(None)) and path and isinstance(path[-1], str):
        help = f"as in `{name}: [{value}]`"
    return Diagnostic("SPEC006", f"{where} needs {wanted}, found {shown}", spec.path, span, help=help or None, subject=path)


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
