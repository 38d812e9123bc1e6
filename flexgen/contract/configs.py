"""config.json in one form: its text part, older keys moved, defaults filled in, and the fences that a spec puts around it.

The compiler applies it to `tiny`, `flexgen new` to a config that it drafts from, the loader to a checkpoint's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from flexgen.contract.ignored import NO_EFFECT, OUTSIDE, OUTSIDE_ENDINGS, STATED
from flexgen.contract.json_files import shown
from flexgen.errors import ConfigError


def normalise(raw: Mapping[str, Any], text_config: str | None) -> dict[str, Any]:
    """The text model's config in one form: nested parts taken out, older rope keys moved into `rope_parameters`.

    Raises ConfigError where two fields that mean the same differ.
    """
    config = copy.deepcopy(dict(raw))
    if text_config and config.get(text_config) is not None:
        config = _text_part(config, text_config)
    _move_rope(config)
    if config.get("max_position_embeddings") is None and config.get("n_positions") is not None:
        config["max_position_embeddings"] = config["n_positions"]  # GPT-2's name, which limits max_model_len as well
    return config


def _text_part(outer: dict[str, Any], text_config: str) -> dict[str, Any]:
    config = outer[text_config]
    if not isinstance(config, dict):
        raise ConfigError(f"{text_config} is {shown(config)}, and must be an object")
    _take_outer(config, outer, text_config)
    whole, text = outer.get("tie_word_embeddings"), config.get("tie_word_embeddings")
    if whole is not None and whole != text:
        raise ConfigError(
            f"tie_word_embeddings is {shown(whole)} in config.json and {shown(text)} in its {text_config}; make them agree"
        )
    return config


def _take_outer(config: dict[str, Any], outer: Mapping[str, Any], text_config: str) -> None:
    """What the fields beside the text part mean for it, as transformers reads them.

    The ids that end a text and the dtype are the outer ones', where there are any; model_type and tie_word_embeddings are
    those of the text part, if it has its own. Fields of other modalities say nothing about text; any other must repeat what
    the text part says, else it is kept as `outside.NAME`, which nothing reads.
    """
    for field in ("model_type", "tie_word_embeddings", "quantization_config"):
        if config.get(field) is None and outer.get(field) is not None:
            config[field] = outer[field]
    if outer.get("eos_token_id") is not None:
        config["eos_token_id"] = outer["eos_token_id"]
    if (dtype := outer.get("dtype") or outer.get("torch_dtype")) is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    decided = {text_config, "model_type", "tie_word_embeddings", "quantization_config", "eos_token_id", "dtype", "torch_dtype"}
    left = {
        field: value
        for field, value in outer.items()
        if value is not None
        and field not in decided | NO_EFFECT.keys() | OUTSIDE.keys()
        and not field.endswith(OUTSIDE_ENDINGS)
        and not (field in config and config[field] == value)
        and not is_stated(field, value)
    }
    if left:
        config["outside"] = left


def is_stated(path: str, value: object) -> bool:
    """Whether a field says what every family does anyway where its spec does not read it."""
    return any(value == given and type(value) is type(given) for given in STATED.get(path, ((), ""))[0])


def _move_rope(config: dict[str, Any]) -> None:
    """`rope_scaling`, `rope_theta` and `partial_rotary_factor` become keys of each table of `rope_parameters`.

    A table's own partial_rotary_factor wins: transformers writes its class's default beside it (5.17), and reads the table.
    """
    parameters, scaling = config.get("rope_parameters"), config.pop("rope_scaling", None)
    if parameters and scaling and parameters != scaling:
        raise ConfigError("config.json has both rope_parameters and rope_scaling, and they differ; remove one")
    parameters = parameters or scaling or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"rope_parameters is {shown(parameters)}, and must be an object")
    older = {key: config.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for table in nested or [parameters]:
        moved = {**older, "rope_type": table.pop("type", None)}
        for key, value in moved.items():
            if value is not None and table.setdefault(key, value) != value and key != "partial_rotary_factor":
                raise ConfigError(f"rope_parameters.{key} is {shown(table[key])}, and elsewhere in config.json {shown(value)}")
    config["rope_parameters"] = parameters or None


def merged(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`config` over `defaults`; a null counts as absent, and objects are merged field by field.

    A rope's parameters are those of its type alone: defaults that name another `rope_type` leave it as it is.
    """
    out = copy.deepcopy(dict(config))
    for key, value in defaults.items():
        if out.get(key) is None:
            out[key] = copy.deepcopy(value)
        elif isinstance(value, Mapping) and isinstance(out[key], dict) and not _of_another_type(out[key], value):
            out[key] = merged(out[key], value)
    return out


def _of_another_type(table: Mapping[str, Any], default: Mapping[str, Any]) -> bool:
    return "rope_type" in default and table.get("rope_type", "default") != default["rope_type"]


def holds(value: Any, wanted: Any) -> bool:
    """Whether a value is what a fence wants: a value, one of a list, an empty list, or `{min: n}`."""
    if isinstance(wanted, Mapping):
        return not isinstance(value, bool) and isinstance(value, int | float) and value >= wanted["min"]
    return any(same(value, item) for item in _allowed(wanted))


def same(value: Any, other: Any) -> bool:
    """Whether two values of a config are equal. True and 1 are two values."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def broken_fence(config: Mapping[str, Any], require: Mapping[str, Any]) -> str | None:
    """Why `require` does not hold, or None where it does. `config` has its defaults filled in."""
    for field, wanted in require.items():
        value = look(config, field)
        if not holds(value, wanted):
            is_least = isinstance(wanted, Mapping)
            listed = f"at least {wanted['min']}" if is_least else " or ".join(repr(item) for item in _allowed(wanted))
            return f"{field} is {shown(value)}, and must be {listed}"
    return None


def _allowed(wanted: Any) -> list[Any] | tuple[Any, ...]:
    """The values of a list, which is a value itself only where it is empty."""
    return wanted if isinstance(wanted, list | tuple) and wanted else [wanted]


def look(config: Any, path: str, absent: Any = None) -> Any:
    """The value at a dotted path, `absent` where nothing is there."""
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return absent
        config = config[key]
    return config


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested objects with its dotted path."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{prefix}{key}.")
    else:
        yield prefix[:-1], node
