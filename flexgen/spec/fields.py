"""What the fields of a spec are made of: names, tensors, paths of config.json, numbers kept as text. The models use them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Identifier = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
TensorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=200)]
TensorPattern = Annotated[str, Field(pattern=r"^([A-Za-z0-9_]+|\*)(\.([A-Za-z0-9_]+|\*))*$", max_length=200)]
ConfigPath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*$", max_length=120)]


def form(value: object, *keys: str) -> str | None:
    """The tag of the form that a mapping has, after the first of these keys in it; never equal to the key itself."""
    return next((f"form:{key}" for key in keys if isinstance(value, dict) and key in value), None)


def source_text(value: object) -> object:
    """A number or flag as it was written; anything that is no scalar is left for pydantic to refuse."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return getattr(value, "text", None) or str(value)
    return value


Text = Annotated[
    str,
    BeforeValidator(source_text, json_schema_input_type=str | int | float | bool),
    Field(max_length=200),
]
MAX_ENTRIES = 100
"""Of a section: far more than any architecture has, and little enough that every check stays quick."""

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_new", "quick_gelu", "relu", "relu2", "sigmoid"]


class Section(BaseModel):
    """What every entry has in common."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)


class Entry(Section):
    why: str | None = Field(None, max_length=160, description="Becomes the comment beside the generated line.")
