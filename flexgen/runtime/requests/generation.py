"""What a model's generation_config.json says of how its answers are drawn, as fields of `SamplingParams`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexgen.contract.json_files import read_object, shown
from flexgen.errors import ConfigError
from flexgen.runtime.requests.params import SamplingParams

_GENERATION = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
"""transformers' names."""


def generation_defaults(
    directory: Path | None, source: str | os.PathLike[str], overrides: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Fields of SamplingParams that a model's generation_config.json sets.

    source     "auto": the model's own; "vllm": none; else a directory that has one
    overrides  fields of the same names, over those of the file
    """
    folder = directory if source == "auto" else None if source == "vllm" else Path(source)
    file = folder / "generation_config.json" if folder else None
    if file is not None and source != "auto" and not file.exists():
        raise ConfigError(f"generation_config is {shown(os.fspath(source))}, and must be 'auto', 'vllm' or a directory with {file.name}")
    given = read_object(file) if file is not None and file.exists() else {}
    if unknown := [name for name in overrides or () if name not in _GENERATION]:
        raise ValueError(f"override_generation_config has {', '.join(unknown)}, and takes {', '.join(_GENERATION)}")
    found = {name: value for name, value in ({**given, **(overrides or {})}).items() if name in _GENERATION and value is not None}
    defaults = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in found.items()}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ConfigError(f"generation_config.json sets {defaults}, which cannot be served: {error}") from None
    return defaults
