"""From a YAML file to a `Spec`: `like` expanded, shapes checked, every value with the place it was written at."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexgen.spec.diagnostics import Diagnostic, Span, SpecError, SpecPath, merge_cascades
from flexgen.spec.likes import expand_likes
from flexgen.spec.models import SpecModel
from flexgen.spec.shapes import explain
from flexgen.spec.source import Document
from flexgen.spec.source import load as load_document
from flexgen.spec.spelling import misspelt, respelt


@dataclass(frozen=True)
class Spec:
    """A spec whose sections have the right shape.

    data     what the file says, with `like` written out
    origins  maps a field inherited through `like` to where it stands, and what the block alone implies to the block
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
    origins |= {(section,): ("block",) for section in ("kinds", "schedule") if section not in data}
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
