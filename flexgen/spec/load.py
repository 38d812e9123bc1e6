"""From a YAML file to a `Spec`: `like` expanded, shapes checked, every value with the place it was written at."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexgen.spec.diagnostics import Diagnostic, Note, Span, SpecError, SpecPath, nearest
from flexgen.spec.models import SECTIONS_WITH_LIKE, SpecModel
from flexgen.spec.shapes import explain, field_names, model_at
from flexgen.spec.source import Document
from flexgen.spec.source import load as load_document


@dataclass(frozen=True)
class Spec:
    """A spec whose sections have the right shape.

    data     what the file says, with `like` written out
    origins  maps a field inherited through `like` to where it stands
    """

    model: SpecModel
    document: Document
    data: dict[str, Any]
    origins: dict[SpecPath, SpecPath]

    @property
    def path(self) -> str:
        return self.document.path

    @property
    def digest(self) -> str:
        """A hash of what the spec says, the same for any order of keys and any comments."""
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()

    def origin(self, path: SpecPath) -> SpecPath:
        """Where the value at a path was written: itself, or the entry it was inherited from."""
        return next(
            (self.origins[path[:n]] + path[n:] for n in range(len(path), 0, -1) if path[:n] in self.origins), path
        )

    def span(self, path: SpecPath, *, key: bool = False, within: tuple[int, int] | None = None) -> Span:
        """The place of a value, of its key, or of characters within its text; of the nearest parent where it is implied."""
        return locate(self.document, self.origin(path), key=key, within=within)


def load_spec(path: Path, shown: str | None = None) -> Spec:
    """Read one spec. `shown` is the path that messages name. Raises SpecError with every problem of shape."""
    return parse_spec(path.read_bytes(), shown or str(path))


def parse_spec(text: bytes | str, path: str) -> Spec:
    """As `load_spec`, from text. Raises SpecError."""
    return shape(load_document(text, path))


def shape(document: Document) -> Spec:
    """The spec that a document holds. Raises SpecError with every problem of shape."""
    data, origins, found = expand_likes(document)
    spec = None
    try:
        spec = SpecModel.model_validate(data)
    except ValidationError as error:
        where = Spec(model=None, document=document, data=data, origins=origins)  # type: ignore[arg-type]
        found += explain(error, data, where)
    if found or spec is None:
        raise SpecError(found)
    return Spec(spec, document, data, origins)


def locate(document: Document, path: SpecPath, *, key: bool = False, within: tuple[int, int] | None = None) -> Span:
    """The span of a path, or of the nearest parent that was written."""
    for length in range(len(path), 0, -1):
        try:
            document.data_at(path[:length])
        except (KeyError, IndexError, TypeError):
            continue
        if length < len(path):
            return _key_or_value(document, path[:length])
        if within is not None:
            return document.part_span(path, *within)
        return _key_or_value(document, path) if key else document.value_span(path)
    return Span(1, 1, 1, 2)


def _key_or_value(document: Document, path: SpecPath) -> Span:
    return document.value_span(path) if isinstance(path[-1], int) else document.key_span(path)


# ---------------------------------------------------------------- like


def expand_likes(document: Document) -> tuple[dict[str, Any], dict[SpecPath, SpecPath], list[Diagnostic]]:
    """Copy the fields of the entries that `like` names. -> (data, origins of copied fields, problems)"""
    data = dict(document.data)
    origins: dict[SpecPath, SpecPath] = {}
    found: list[Diagnostic] = []
    for section in SECTIONS_WITH_LIKE:
        entries = data.get(section)
        if isinstance(entries, dict):
            data[section] = {name: _expand(document, section, entries, name, origins, found, ()) for name in entries}
    return data, origins, found


def _expand(
    document: Document,
    section: str,
    entries: dict[str, Any],
    name: str,
    origins: dict[SpecPath, SpecPath],
    found: list[Diagnostic],
    chain: tuple[str, ...],
) -> Any:
    entry = entries[name]
    if not isinstance(entry, dict) or "like" not in entry:
        return entry
    own = {key: value for key, value in entry.items() if key != "like"}
    base_name = entry["like"]
    here = (section, name, "like")
    problem = _like_problem(entries, base_name, (*chain, name), section)
    if problem is not None:
        if not chain:
            message, help, note = problem
            notes = [Note(note[0], document.path, document.key_span(note[1]))] if note else []
            model = model_at((section, name), document.data)
            lacking = [(section, name, field) for field in field_names(model) if field not in own] if model else []
            at = document.value_span(here)
            found.append(
                Diagnostic("SPEC009", message, document.path, at, help=help, notes=notes, settles=lacking)
            )
        return own
    base = _expand(document, section, entries, base_name, origins, found, (*chain, name))
    if not isinstance(base, dict):
        return own
    merged = {key: value for key, value in base.items() if key not in ("why", *own)}
    for key in merged:
        there = (section, base_name, key)
        origins[(section, name, key)] = origins.get(there, there)
    return {**merged, **own}


def _like_problem(
    entries: dict[str, Any], base: object, chain: Iterable[str], section: str
) -> tuple[str, str, tuple[str, SpecPath] | None] | None:
    """What is wrong with `like: base`: message, help and note; None where nothing is."""
    if not isinstance(base, str) or base not in entries:
        near = nearest(str(base), entries)
        help = f"did you mean `{near}`?" if near else "`like` names another entry of the same section"
        note = (f"`{near}` is defined here", (section, near)) if near else None
        return f"`like` names `{base}`, which `{section}` does not define", help, note
    if base in chain:
        return (
            f"`like` goes in a circle: {' -> '.join((*chain, base))}",
            "give one of them all its fields",
            ("the cycle passes here", (section, base)),
        )
    return None
