"""The page "How do I say ...": each field it names is in the models, and each example is a value that the field takes."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import yaml
from project import ROOT
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from flexgen.spec.models import SpecModel

ROW = re.compile(r"^\| (?P<said>.+) \| `(?P<field>[a-z0-9_.]+)` \| `(?P<example>[^`]+)` \|$")
TEXT = (ROOT / "docs" / "say.md").read_text(encoding="utf-8")


def rows() -> list[tuple[str, str]]:
    """-> (field, example) of each line of each table; a line of a table that is no row fails."""
    lines = [line for line in TEXT.splitlines() if line.startswith("|") and not line.startswith(("|---", "| the paper"))]
    found = [ROW.match(line) for line in lines]
    assert all(found), [line for line, row in zip(lines, found, strict=True) if row is None]
    return [(row["field"], row["example"]) for row in found if row]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's value may be, or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def fields_at(path: str) -> list[FieldInfo]:
    """The fields that a path of names leads to: several where forms of a value share a name."""
    models: list[type[BaseModel]] = [SpecModel]
    found: list[FieldInfo] = []
    for name in path.split("."):
        found = [field for model in models for key, field in model.model_fields.items() if name in (key, field.alias)]
        models = [model for field in found for model in models_in(field.annotation)]
    return found


def takes(field: FieldInfo, value: object) -> bool:
    try:
        TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(("path", "example"), rows())
def test_the_field_is_there_and_takes_the_example(path, example):
    fields = fields_at(path)
    assert fields, f"docs/say.md: no field `{path}`"
    ((key, value),) = yaml.safe_load(example).items()
    assert key == path.split(".")[-1]
    assert any(takes(field, value) for field in fields), f"docs/say.md: `{path}` does not take `{example}`"


def test_the_check_refuses_what_is_not_in_the_language():
    assert not fields_at("attention.windw")
    (kind,) = fields_at("norms.kind")
    assert not takes(kind, "batch")
