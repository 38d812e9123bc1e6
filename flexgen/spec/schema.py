"""The JSON Schema (draft-07) of specs, for editors: made from the models, so that it cannot say something else."""

from __future__ import annotations

import json
from typing import Any

from flexgen.spec.models import SECTIONS_WITH_LIKE, SpecModel

URI = "http://json-schema.org/draft-07/schema#"


def json_schema() -> str:
    """The schema as text, with a final newline."""
    schema = _draft7(SpecModel.model_json_schema())
    schema["title"] = "flexgen spec"
    for section in SECTIONS_WITH_LIKE:
        reference = schema["properties"][section]["additionalProperties"]["$ref"]
        _allow_like(schema["definitions"][reference.rsplit("/", 1)[1]])
    return json.dumps({"$schema": URI, **schema}, indent=1, sort_keys=True) + "\n"


def _allow_like(entry: dict[str, Any]) -> None:
    """An entry that copies another needs none of the fields itself."""
    entry["properties"]["like"] = {"type": "string", "description": "Copy the fields of another entry of this section."}
    required = entry.pop("required", None)
    if required:
        entry["if"] = {"not": {"required": ["like"]}}
        entry["then"] = {"required": required}


def _draft7(node: Any) -> Any:
    """2020-12 as pydantic writes it -> draft-07."""
    if isinstance(node, list):
        return [_draft7(item) for item in node]
    if not isinstance(node, dict):
        return node
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key == "$defs":
            out["definitions"] = _draft7(value)
        elif key == "$ref":
            out["$ref"] = value.replace("#/$defs/", "#/definitions/")
        elif key == "patternProperties":
            (pattern, schema), *rest = value.items()
            assert not rest
            out["propertyNames"] = {"pattern": pattern}
            out["additionalProperties"] = _draft7(schema)
        elif (
            key not in ("discriminator", "title")
            or not isinstance(value, str | dict)
            or (key == "title" and isinstance(value, dict))
        ):
            out[key] = _draft7(value)
    return out
