"""What the arguments of `LLM` mean, before there is an engine: which are taken, where a model lies, how long it reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flexgen.contract.json_files import shown
from flexgen.errors import ConfigError
from flexgen.runtime.loading.hub import fetched
from flexgen.runtime.loading.rope import checked_length, stretched_length
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.served import ServedModel
from flexgen.runtime.surface import NEUTRAL_ARGUMENTS, check_arguments


class EngineArgs:
    """The arguments of an engine that is made later: `LLM.from_engine_args`, `AsyncEngine.from_engine_args`."""

    def __init__(self, model: str | os.PathLike[str] | ServedModel, **arguments: Any) -> None:
        self.model, self.arguments = model, arguments


class AsyncEngineArgs(EngineArgs):
    """The same, by vLLM's other name."""


@dataclass(frozen=True)
class Hub:
    """Which version of a model on the Hub is meant, and how it is fetched."""

    revision: str | None
    tokenizer_revision: str | None
    download_dir: str | os.PathLike[str] | None
    hf_token: str | bool | None

    def model(self, name: str | os.PathLike[str]) -> Path:
        return fetched(name, revision=self.revision, download_dir=self.download_dir, token=self.hf_token)

    def tokenizer(self, name: str | os.PathLike[str]) -> Path:
        return fetched(name, revision=self.tokenizer_revision, download_dir=self.download_dir, token=self.hf_token)

    def given(self) -> Iterator[str]:
        return (each.name for each in fields(self) if getattr(self, each.name) is not None)


def engine_options(options: Mapping[str, Any], compilation: int | Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of `EngineOptions` among an LLM's arguments. Raises for one that is not supported, by name.

    Of vLLM's compilation_config, the sizes to capture are taken; all else in it is about how vLLM compiles.
    """
    check_arguments(options, EngineOptions.names())
    sizes = {name: value for name, value in options.items() if name not in NEUTRAL_ARGUMENTS and value is not None}
    if compilation is not None and not isinstance(compilation, int | Mapping):
        raise TypeError(f"compilation_config is {shown(compilation)}, and must be a dict or vLLM's number of a mode")
    if isinstance(compilation, Mapping) and (capture := compilation.get("cudagraph_capture_sizes")) is not None:
        sizes.setdefault("cudagraph_capture_sizes", capture)
    return sizes


def check_paths(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and (not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value)):
            raise TypeError(f"{name} is {shown(value)}, and must be a name or path")


def check_reachable(**arguments: Any) -> None:
    """Raises ValueError for a folder that the system does not even look for: too long a name, or in one that is closed."""
    for name, value in arguments.items():
        try:
            if isinstance(value, str | os.PathLike):
                Path(value, "config.json").exists()
        except OSError as error:
            raise ValueError(f"{name} is {shown(value)}, and cannot be looked for: {error.strerror}") from None


def check_names(**arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, str | None):
            raise TypeError(f"{name} is {shown(value)}, and must be a name")


def check_flags(**arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {shown(value)}, and must be True or False")


def load(model: str | os.PathLike[str] | ServedModel, hub: Hub, loading: Mapping[str, Any]) -> ServedModel:
    if not isinstance(model, str | os.PathLike):
        if not hasattr(model, "dims"):
            raise TypeError(f"model is the directory of a checkpoint, or a loaded Model; got {model!r}")
        if given := [*loading, *hub.given()]:
            raise ValueError(f"{', '.join(given)} say how to load a model, and this one is loaded already")
        return model
    from flexgen.runtime.loading.model import Model

    return Model.load(hub.model(model), **loading)


def longest(model: ServedModel, wanted: int | None) -> int:
    longest = checked_length(model.config)
    if longest is None:
        if wanted is None:
            raise ConfigError("config.json has no max_position_embeddings; give LLM(max_model_len=...)")
        return wanted
    stretched = stretched_length(model.config, longest)
    if isinstance(wanted, int) and wanted > stretched:
        scaled = f", which its rope stretches to {stretched}" if stretched > longest else ""
        raise ValueError(f"max_model_len={wanted} is more than the model's max_position_embeddings={longest}{scaled}")
    return longest if wanted is None else wanted
