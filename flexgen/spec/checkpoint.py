"""The `checkpoint` section as a typed, frozen model: which files a spec reads, and the fences around them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from flexgen.spec.fields import ConfigPath, Section, TensorName, TensorPattern


class AtLeast(Section):
    min: int | float = Field(description="The smallest value accepted.")


Scalar = str | int | float | bool | None


def _fence_tag(value: object) -> str:
    return f"form:{'min' if isinstance(value, dict) else 'list' if isinstance(value, list) else 'value'}"


Fence = Annotated[
    Annotated[AtLeast, Tag("form:min")]
    | Annotated[list[Scalar], Tag("form:list")]
    | Annotated[Scalar, Tag("form:value")],
    Discriminator(_fence_tag),
]


class Checkpoint(Section):
    model_types: list[str] = Field(
        min_length=1, description="Values of `model_type` in config.json that this spec serves."
    )
    text_config: ConfigPath | None = Field(
        None, description="Where a multimodal config.json nests the text model's config. Absent: the whole file is it."
    )
    prefix: list[TensorName | Literal[""]] = Field(
        ["model"],
        min_length=1,
        description='Prefixes of the text model\'s tensors; a file uses exactly one of them. `""`: there is none.',
    )
    layers: TensorPattern = Field("layers.*", description="The module of one layer, below the prefix; `*` is its index.")
    skip: list[TensorPattern] = Field(
        [],
        description="Tensors that are present but unused, by full name or below the prefix; `*` matches anything. Counted.",
    )
    fp32: list[TensorPattern] = Field(
        [], description="Tensors that stay fp32 whatever the model's dtype, below the prefix; `*` is the layer."
    )
    transposed: list[TensorPattern] = Field(
        [], description="Linear modules that lie as (in, out) in the file and in memory, below the prefix: GPT-2's Conv1D."
    )
    defaults: dict[str, Any] = Field(
        {},
        description="What the family's config class fills in where config.json is silent; merged below the file's values.",
    )
    require: dict[ConfigPath, Fence] = Field(
        {},
        description=(
            "Fences: field to the value, list of values or `{min: n}` without which this spec does not apply; an empty list is a value."
        ),
    )
    ignore: list[ConfigPath] = Field([], description="Config fields that do not change this family's forward pass.")
