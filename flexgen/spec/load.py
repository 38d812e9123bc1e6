"""From a YAML file to a `Spec`: `like` expanded, shapes checked, every value with the place it was written at."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexgen.spec.diagnostics import Diagnostic, Note, Span, SpecError, SpecPath, merge_cascades, nearest
from flexgen.spec.models import SECTIONS_WITH_LIKE, SpecModel
from flexgen.spec.shapes import explain, field_names, model_at
from flexgen.spec.source import Document
from flexgen.spec.source import load as load_document
from flexgen.spec.spelling import misspelt, respelt


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
    try:
        model = SpecModel.model_validate(data)
    except ValidationError as error:
        where = Spec(model=None, document=document, data=data, origins=origins)  # type: ignore[arg-type]
        found += explain(error, data, where)
        if fields := misspelt(error, where):
            raise _as_if_spelt(respelt(document, fields), found) from None
        raise SpecError(found) from None
    if found:
        raise SpecError(found)
    return Spec(model, document, data, origins)


def _as_if_spelt(document: Document, found: list[Diagnostic]) -> SpecError:
    """What was found in a document with misspelt fields, and what else is wrong of its shape once they are right."""
    known = [replace(item, settles=()) for item in merge_cascades(found)]
    try:
        shape(document)
    except SpecError as error:
        known += error.diagnostics
    return SpecError(known)


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
            chains = {name: _follow(entries, name) for name in entries}
            found += _broken_chains(document, section, chains)
            data[section] = {name: _merge(section, entries, chains[name][0], origins) for name in entries}
    return data, origins, found


def _follow(entries: dict[str, Any], name: str) -> tuple[list[str], Any]:
    """The entries that `like` leads to from one, itself first, and what it names last: unknown, or passed before."""
    chain = [name]
    while isinstance(entry := entries[chain[-1]], dict) and "like" in entry:
        base = entry["like"]
        if not isinstance(base, str) or base not in entries or base in chain:
            return chain, base
        chain.append(base)
    return chain, None


def _merge(section: str, entries: dict[str, Any], chain: list[str], origins: dict[SpecPath, SpecPath]) -> Any:
    """The first entry of the chain with the fields of the others, the nearest one's first; `why` is not copied."""
    name = chain[0]
    if not all(isinstance(entries[other], dict) for other in chain):
        return {key: value for key, value in entries[name].items() if key != "like"} if len(chain) > 1 else entries[name]
    merged: dict[str, Any] = {}
    for other in reversed(chain):
        merged.pop("why", None)
        for key, value in entries[other].items():
            if key != "like":
                merged[key] = value
                origins[(section, name, key)] = (section, other, key)
    for key in entries[name]:
        origins.pop((section, name, key), None)
    return merged


def _broken_chains(document: Document, section: str, chains: dict[str, tuple[list[str], Any]]) -> list[Diagnostic]:
    """One diagnostic a `like` that leads nowhere, and one a circle; what entries lack because of it is settled."""
    found = []
    for name, (chain, base) in chains.items():
        if base is None:
            continue
        is_circle = isinstance(base, str) and base in chain
        message, help, note = None, "give one of them all its fields", None
        if is_circle and name == base == min(chain):
            message = f"`like` goes in a circle: {' -> '.join((*chain, base))}"
            note = Note("the cycle passes here", document.path, document.key_span((section, chain[-1])))
        elif not is_circle and len(chain) == 1:
            near = nearest(str(base), chains)
            message = f"`like` names {_named(base)}, which `{section}` does not define"
            help = f"did you mean `{near}`?" if near else "`like` names another entry of the same section"
            note = Note(f"`{near}` is defined here", document.path, document.key_span((section, near))) if near else None
        if message:
            at = document.value_span((section, name, "like"))
            lacking = _lacking(document, section, [other for other, (_, end) in chains.items() if end is not None])
            notes = [note] if note else []
            found.append(Diagnostic("SPEC009", message, document.path, at, help=help, notes=notes, settles=lacking))
    return found


def _named(base: Any) -> str:
    return f"`{base}`" if isinstance(base, str | int | float) else "no entry"


def _lacking(document: Document, section: str, names: list[str]) -> list[SpecPath]:
    """The fields that entries do not give themselves."""
    entries = document.data[section]
    model = model_at((section, names[0]), document.data)
    fields = field_names(model) if model else []
    return [(section, name, field) for name in names for field in fields if field not in entries[name]]
