"""Makes `docs/spec.md` and `docs/diagnostics.md` from the models and the catalogue, so that they cannot drift."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from flexgen.spec import models
from flexgen.spec.checkpoint import Checkpoint
from flexgen.spec.codes import CODES
from flexgen.spec.fields import Text, source_text

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("A spec", models.SpecModel),
    ("checkpoint", Checkpoint),
    ("norms.NAME", models.Norm),
    ("ropes.NAME", models.RopeEntry),
    ("attention.NAME", models.Attention),
    ("attention.NAME.gate: packed", models.PackedGate),
    ("attention.NAME.gate: weight", models.ProjectedGate),
    ("attention.NAME.query_scale", models.QueryScale),
    ("gdn.NAME", models.GatedDelta),
    ("mlp.NAME", models.Mlp),
    ("moe.NAME", models.Moe),
    ("moe.NAME.router", models.Router),
    ("moe.NAME.gate_up, down: stacked", models.StackedLayout),
    ("moe.NAME.gate_up, down: per expert", models.PerExpertLayout),
    ("moe.NAME.gate_up, down: MXFP4", models.Mxfp4Layout),
    ("layer_inputs.NAME", models.LayerInput),
    ("schedule[i]", models.Rule),
    ("block[i]: add", models.AddPart),
    ("step: norm", models.NormStep),
    ("step: linear", models.LinearStep),
    ("step: act", models.ActStep),
    ("step: gain", models.GainStep),
    ("step: scale", models.ScaleStep),
    ("step: times", models.TimesStep),
    ("step: sum", models.SumStep),
    ("step: embedding", models.EmbeddingStep),
    ("embedding", models.Embedding),
    ("embedding.positions", models.Positions),
    ("head", models.Head),
)


def spec_reference() -> str:
    """The reference of the language, a table a section."""
    parts = [
        "# The spec language\n",
        "Every field of every section. Names that a section defines are used elsewhere by name; in `norms`, `ropes`,"
        " `attention`, `gdn`, `mlp` and `moe` an entry may say `like: OTHER` and then gives only the fields that differ."
        " *Numbers* are names of `dims`, literals, `+ - * / // ( )`, `min`, `max` and `sqrt`; in `dims` itself names are"
        " earlier dims or fields of config.json, and `a or b` takes b where a is absent or null.\n",
    ]
    for title, model in SECTIONS:
        parts.append(f"## {title}\n\n{(model.__doc__ or '').strip() if title == 'A spec' else ''}".rstrip() + "\n")
        parts.append("| field | value | default | meaning |\n| --- | --- | --- | --- |")
        for name, info in model.model_fields.items():
            default = "required" if info.is_required() else _default(info.default)
            annotation = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
            kind = "number" if _is_text(annotation) else _kind(info.annotation)
            parts.append(f"| `{info.alias or name}` | {kind} | {default} | {info.description} |")
        parts.append("")
    return "\n".join(parts)


def diagnostics_catalogue() -> str:
    """Every code with why it exists, wrong and right."""
    parts = ["# Diagnostics\n", "`flexgen explain CODE` prints one of these.\n"]
    for code in CODES.values():
        parts.append(f"## {code.code}: {code.title}\n\n{code.why}\n")
        parts.append(f"Wrong:\n\n```yaml\n{code.bad}\n```\n\nRight:\n\n```yaml\n{code.good}\n```\n")
    return "\n".join(parts)


def _default(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "absent"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value not in ([], {}) else "empty"


def _is_text(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and any(
        item is source_text or getattr(item, "func", None) is source_text
        for item in annotation.__metadata__
    )


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Text or _is_text(annotation):
        return "number"
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{str(item).lower() if isinstance(item, bool) else item}`" for item in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(item) for item in arguments if item is not type(None)))
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"mapping to {_kind(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {str: "text", int: "whole number", bool: "true or false", float: "number"}.get(annotation, "any value")
