"""A config.json as text in, the text model's fields out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen.contract.configs import normalise
from flexgen.errors import FlexgenError

NESTED = ("text_config", "llm_config", "language_config")
"""Where multimodal configs keep the text model's part."""


class ConfigFileError(FlexgenError):
    """A config.json that cannot be read as one."""


@dataclass(frozen=True)
class Given:
    """A config.json: where it is, its raw fields, the text model's fields, and where these are nested."""

    path: Path
    raw: Mapping[str, Any]
    text: Mapping[str, Any]
    nested: str | None

    @property
    def model_types(self) -> list[str]:
        """The text model's type, and the type of the whole where it is another."""
        types = [self.text.get("model_type"), self.raw.get("model_type")]
        return [name for name in dict.fromkeys(types) if isinstance(name, str)]


def read(path: Path) -> Given:
    """Read a config.json, or that of a checkpoint's directory. Raises ConfigFileError with the place of what is wrong."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigFileError(f"{path} does not exist: give a config.json, or a directory that holds one")
    try:
        raw = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigFileError(f"{path}:{error.lineno}:{error.colno}: this is not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{path}: byte {error.start} is not UTF-8, so this is not JSON") from None
    except RecursionError:
        raise ConfigFileError(f"{path}: nested too deep to be a config") from None
    if not isinstance(raw, dict):
        raise ConfigFileError(f"{path} holds {_article(raw)}, and a config.json is an object")
    nested = next((key for key in NESTED if isinstance(raw.get(key), dict)), None)
    text = normalise(raw, nested)
    if not isinstance(text.get("model_type"), str):
        raise ConfigFileError(f"{path} has no `model_type`, so it is no config of a model")
    return Given(path, raw, text, nested)


def _article(value: object) -> str:
    names = {list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
