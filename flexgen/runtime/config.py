"""config.json as the engine reads it: one normaliser, every field accounted for, never through AutoConfig."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexgen.runtime import schedule as schedules
from flexgen.runtime.errors import ConfigError
from flexgen.runtime.ignored import NO_EFFECT
from flexgen.runtime.rope import Rope

_ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor")
_MISSING = object()


def read_config(directory: Path) -> dict[str, Any]:
    """The raw config.json of a checkpoint directory. Raises ConfigError where there is none or it is no JSON object."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: a checkpoint is a directory with config.json and safetensors files")
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not an object")
    return raw


def normalise(raw: Mapping[str, Any], text_config: str | None) -> dict[str, Any]:
    """The text model's config in one form: nested parts taken out, older rope keys moved into `rope_parameters`."""
    config = copy.deepcopy(dict(raw))
    nested = config.get(text_config) if text_config else None
    if isinstance(nested, dict):
        outer, config = config, copy.deepcopy(nested)
        config.setdefault("model_type", outer.get("model_type"))
        for field in ("tie_word_embeddings",):
            if field in outer and outer[field] != config.setdefault(field, outer[field]):
                raise ConfigError(
                    f"config.json says {field} = {outer[field]} for the whole model and {config[field]} in {text_config}"
                )
    _move_rope(config)
    return config


def _move_rope(config: dict[str, Any]) -> None:
    scaling = config.pop("rope_scaling", None)
    theta = config.pop("rope_theta", None)
    partial = config.pop("partial_rotary_factor", None)
    parameters = config.get("rope_parameters") or scaling or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"rope_parameters is {parameters!r}, not an object")
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for table in nested or [parameters]:
        if "type" in table:
            table.setdefault("rope_type", table.pop("type"))
        table.setdefault("rope_type", "default")
        if theta is not None:
            table.setdefault("rope_theta", theta)
        if partial is not None:
            table.setdefault("partial_rotary_factor", partial)
    config["rope_parameters"] = parameters


def merged(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`config` over `defaults`; a null counts as absent, and objects are merged field by field."""
    out = copy.deepcopy(dict(config))
    for key, value in defaults.items():
        if out.get(key) is None:
            out[key] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(out[key], dict):
            out[key] = merged(out[key], value)
    return out


def broken_fence(config: Mapping[str, Any], require: Mapping[str, Any]) -> str | None:
    """Why `require` does not hold, or None where it does. `config` has its defaults filled in."""
    for field, wanted in require.items():
        value = _look(config, field)
        value = None if value is _MISSING else value
        if isinstance(wanted, Mapping):
            if not isinstance(value, int | float) or value < wanted["min"]:
                return f"{field} is {value!r}, and must be at least {wanted['min']}"
        else:
            allowed = wanted if isinstance(wanted, list | tuple) else [wanted]
            if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
                listed = " or ".join(repr(item) for item in allowed)
                return f"{field} is {value!r}, and must be {listed}"
    return None


def _look(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return _MISSING
        node = node[key]
    return node


class Config:
    """One checkpoint's config while `Dims` binds to it: hands out typed values and remembers which fields were read.

    Raises ConfigError naming the field, its value and what to do, for whatever the spec does not describe.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        *,
        model_types: Sequence[str],
        defaults: Mapping[str, Any],
        require: Mapping[str, Any],
        ignore: Sequence[str],
        layers_by: str | None,
    ) -> None:
        self.given = dict(raw)
        self.values = merged(raw, defaults)
        self.ignore = set(ignore)
        self.layers_by = layers_by
        self.read: set[str] = {"model_type", *require}
        if raw.get("model_type") not in model_types:
            raise ConfigError(f"model_type is {raw.get('model_type')!r}, and this spec serves {', '.join(model_types)}")
        reason = broken_fence(self.values, require)
        if reason is not None:
            raise ConfigError(f"{reason}: another spec describes that, or none does")

    # ------------------------------------------------------------ values

    def int(self, *paths: str, default: Any = _MISSING) -> int:
        """A whole number: of the first path that is present, else the default."""
        path, value = self._first(paths, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{path} is {value!r}, and must be a whole number")
        return value

    def float(self, *paths: str, default: Any = _MISSING) -> float:
        """A number."""
        path, value = self._first(paths, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path} is {value!r}, and must be a number")
        return float(value)

    def flag(self, *paths: str, default: Any = _MISSING) -> bool:
        """True or false."""
        path, value = self._first(paths, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{path} is {value!r}, and must be true or false")
        return value

    def number(self, *paths: str, default: Any = _MISSING) -> int | float:
        """An operand of arithmetic: a number, or a flag that counts as 0 or 1."""
        path, value = self._first(paths, default)
        if not isinstance(value, int | float):
            raise ConfigError(f"{path} is {value!r}, and must be a number")
        return int(value) if isinstance(value, bool) else value

    def optional(self, path: str) -> Any:
        """A value that a schedule reads, None where absent."""
        self.read.add(path)
        value = _look(self.values, path)
        return None if value is _MISSING else value

    def rope(self, path: str, *, types: tuple[str, ...], head_dim: int) -> Rope:
        """The rotary table of one `rope_parameters` object."""
        parameters = self.optional(path)
        if not isinstance(parameters, dict) or not parameters:
            raise ConfigError(f"{path} is missing from config.json")
        self.read |= {f"{path}.{key}" for key in parameters}
        self.read.add("max_position_embeddings")
        return Rope.bind(
            parameters, types=types, head_dim=head_dim, max_position=self.values.get("max_position_embeddings") or 0
        )

    def schedule(self, layers: int, rules: Sequence[schedules.Rule]) -> tuple[str, ...]:
        """The kind of each layer."""
        return schedules.resolve(layers, rules)

    def _first(self, paths: Sequence[str], default: Any) -> tuple[str, Any]:
        found: tuple[str, Any] | None = None
        for path in paths:
            self.read.add(path)
            value = self._layers(path) if path.startswith("layers.") else _look(self.values, path)
            if found is None and value is not _MISSING and value is not None:
                found = path, value
        if found is not None:
            return found
        if default is not _MISSING:
            return paths[0], default
        raise ConfigError(f"config.json lacks {' and '.join(paths)}, and the spec gives no default")

    def _layers(self, path: str) -> Any:
        """`layers.VALUE.field`: the field in every layer whose scheduled value is VALUE, which must agree."""
        overrides = self.values.get("per_layer_config")
        _, wanted, field = path.split(".", 2)
        types = self.values.get(self.layers_by or "")
        if not isinstance(overrides, dict) or not isinstance(types, list):
            return _MISSING
        found = {}
        for index, value in enumerate(types):
            if value == wanted:
                override = overrides.get(str(index), {})
                self.read.add(f"per_layer_config.{index}.{field}")
                found[index] = _look(override, field) if _look(override, field) is not _MISSING else self.values.get(field)
        if len(set(map(repr, found.values()))) > 1:
            raise ConfigError(f"per_layer_config gives {wanted} layers different values of {field}: {found}")
        return next(iter(found.values()), _MISSING)

    # ------------------------------------------------------------ nothing unread

    def finish(self) -> None:
        """Raises ConfigError for each field of config.json that nothing read and nothing lets us ignore."""
        unread = [
            path
            for path, value in _leaves(self.given)
            if value is not None and not self._accounted(path)
        ]
        if unread:
            raise ConfigError(
                f"config.json has fields that this spec does not read: {', '.join(unread)}. If they do not change the forward "
                f"pass, list them in the spec's `checkpoint.ignore` or pass LLM(ignore_config={unread!r})"
            )

    def _accounted(self, path: str) -> bool:
        parts = path.split(".")
        prefixes = {".".join(parts[: n + 1]) for n in range(len(parts))}
        if parts[0] == "per_layer_config":
            return path in self.read
        return bool(prefixes & (self.read | self.ignore | NO_EFFECT.keys()))


def _leaves(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in _leaves(value, f"{prefix}{key}.")]
    return [(prefix[:-1], node)]
