"""config.json as the engine reads it: typed values, every field accounted for, never through AutoConfig."""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flexgen.contract import layer_kinds as schedules
from flexgen.contract import rope_parameters
from flexgen.contract.configs import broken_fence, is_stated, leaves, look, merged
from flexgen.contract.ignored import NO_EFFECT
from flexgen.contract.json_files import listed, read_object, shown
from flexgen.contract.quantised import QUANTISED, WAYS_OUT, quantised
from flexgen.contract.rope_parameters import is_finite
from flexgen.contract.synonyms import SYNONYMS
from flexgen.errors import ConfigError
from flexgen.runtime.loading.rope import Rope

_MISSING = object()
_LARGEST = 2**63 - 1
_OUTSIDE = re.compile(r"outside\.")


def read_config(directory: Path) -> dict[str, Any]:
    """The raw config.json of a checkpoint directory. Raises ConfigError where there is none or it is no JSON object."""
    path = directory / "config.json"
    if not path.exists():
        if path.parent.is_file():
            raise ConfigError(f"{path.parent} is a file: give its directory")
        if (adapter := directory / "adapter_config.json").exists():
            base = read_object(adapter).get("base_model_name_or_path")
            raise ConfigError(f"{directory} is an adapter, of {shown(base)}: load that model, and the adapter onto it")
        raise ConfigError(
            f"{path} is missing: a checkpoint is a directory with config.json and safetensors files, or a name on the Hub such "
            "as Qwen/Qwen3-0.6B"
        )
    return read_object(path)


def overridden(config: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """A raw config with other values in place; objects are merged field by field. Raises ConfigError."""
    if overrides is None:
        return config
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"hf_overrides is {shown(overrides)}, and must be a dict of fields")
    return merged(dict(overrides), config)


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
        self.defaults = defaults
        self.values = merged(raw, defaults)
        self.ignore = set(ignore)
        self.layers_by = layers_by
        self.read: set[str] = {"model_type", *require}
        if raw.get("model_type") not in model_types:
            raise ConfigError(f"model_type is {shown(raw.get('model_type'))}, and this spec serves {', '.join(model_types)}")
        reason = broken_fence(self.values, require)
        if reason is not None:
            raise ConfigError(f"{reason}: another spec describes that, or none does")


    # `nonzero` is for what the spec divides by

    def int(self, *paths: str, default: Any = _MISSING, nonzero: bool = False) -> int:
        """A whole number, not negative: of the first path that is present, else the default."""
        path, value = self._first(paths, default, nonzero)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise ConfigError(f"{path} is {shown(value)}, and must be a whole number, not negative, of at most 64 bits")
        return value

    def float(self, *paths: str, default: Any = _MISSING, nonzero: bool = False) -> float:
        """A number."""
        path, value = self._first(paths, default, nonzero)
        if isinstance(value, bool) or not is_finite(value):
            raise ConfigError(f"{path} is {shown(value)}, and must be a finite number")
        return float(value)

    def int_or_none(self, *paths: str) -> builtins.int | None:
        """As `int`, None where every path is absent or null."""
        return None if self._present(paths, None)[1] is None else self.int(*paths)

    def float_or_none(self, *paths: str) -> builtins.float | None:
        """As `float`, None where every path is absent or null."""
        return None if self._present(paths, None)[1] is None else self.float(*paths)

    def flag(self, *paths: str, default: Any = _MISSING) -> bool:
        """True or false."""
        path, value = self._first(paths, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{path} is {shown(value)}, and must be true or false")
        return value

    def number(self, *paths: str, default: Any = _MISSING, nonzero: bool = False) -> Any:
        """An operand of arithmetic: a number, or a flag that counts as 0 or 1."""
        path, value = self._first(paths, default, nonzero)
        if not is_finite(value):
            raise ConfigError(f"{path} is {shown(value)}, and must be a finite number, true or false")
        return int(value) if isinstance(value, bool) else value

    def optional(self, path: str) -> Any:
        """A value that a schedule reads, None where absent."""
        self.read.add(path)
        return look(self.values, path)

    def rope(self, path: str, *, types: tuple[str, ...], head_dim: builtins.int, turned: builtins.int | None = None) -> Rope:
        """The rotary table of one `rope_parameters` object; `turned` dims of a head, where the spec says how many."""
        parameters = self.optional(path)
        if not isinstance(parameters, dict) or not parameters:
            raise ConfigError(f"{path} is {shown(parameters)}, and must be an object with at least rope_theta")
        if turned is None:
            parameters = self._turning(path, parameters)
        max_position = self.int("max_position_embeddings", default=0)
        if turned is not None:
            parameters = {**parameters, "partial_rotary_factor": turned / head_dim}
        parameters = self._with_original_length(path, parameters)
        return Rope.bind(parameters, types=types, head_dim=head_dim, max_position=max_position)

    def _turning(self, path: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """A rope's parameters, whose partial_rotary_factor must be one that the family reads.

        It does where its config class has a default for it; other families turn whole heads (transformers ignores the key
        there, or fails), except for the type whose formula is about it.
        """
        name = f"{path}.partial_rotary_factor"
        partial = parameters.get("partial_rotary_factor")
        read = parameters.get("rope_type") == "proportional" or look(self.defaults, name, _MISSING) is not _MISSING
        if partial is None or read or (not isinstance(partial, bool) and partial == 1):
            return parameters
        if name in self.ignore:
            return {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
        raise ConfigError(
            f"{name} is {shown(partial)}, and this family turns whole heads. To load it so, pass LLM(ignore_config=[{shown(name)}]); if "
            "the family does turn a part, state its default in the spec's `checkpoint.defaults`"
        )

    def _with_original_length(self, path: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """A rope's parameters with the length that stands beside them, and without what the spec reads for another purpose."""
        name, kind = "original_max_position_embeddings", parameters.get("rope_type", "default")
        known = rope_parameters.known(kind) if kind in rope_parameters.REQUIRED else parameters.keys()
        if self.values.get(name) is not None:
            length = self.int(name)
            parameters = {name: length, **parameters} if name in known else parameters
        elsewhere = self.read | self.ignore
        return {key: value for key, value in parameters.items() if key in known or f"{path}.{key}" not in elsewhere}

    def schedule(self, layers: builtins.int, rules: Sequence[schedules.Rule]) -> tuple[str, ...]:
        """The kind of each layer."""
        return schedules.resolve(layers, rules)

    def crossed(self, layers: builtins.int, slots: Mapping[str, Sequence[schedules.Rule]]) -> tuple[str, ...]:
        """The kind of each layer, made of one for each slot."""
        return schedules.crossed(layers, slots)

    def _first(self, paths: Sequence[str], default: Any, nonzero: bool = False) -> tuple[str, Any]:
        path, value = self._present(paths, default)
        if nonzero and value == 0:
            raise ConfigError(f"{path} is {shown(value)}, and the spec divides by it: it must not be 0")
        return path, value

    def _present(self, paths: Sequence[str], default: Any) -> tuple[str, Any]:
        found: tuple[str, Any] | None = None
        for path in paths:
            self.read.add(path)
            value = self._layers(path) if path.startswith("layers.") else look(self.values, path, _MISSING)
            if found is None and value is not _MISSING and value is not None:
                found = path, value
        if found is not None:
            return found
        if default is not _MISSING:
            return paths[0], default
        raise ConfigError(f"config.json lacks {' and '.join(paths)}, and the spec gives no default{self._other_name(paths)}")

    def _other_name(self, paths: Sequence[str]) -> str:
        """A hint at a field that other families, or transformers when it writes the file, give what the spec looks for."""
        other = next((name for path in paths for name in SYNONYMS.get(path, ()) if look(self.values, name) is not None), None)
        return f". It has {other}, which is often the same number: if so, let the spec read `{paths[0]} or {other}`" if other else ""

    def _layers(self, path: str) -> Any:
        """`layers.VALUE.field`: the field in every layer whose scheduled value is VALUE, which must agree.

        A layer without an override has the top-level value. Absent where there is no `per_layer_config`.
        """
        overrides = self.values.get("per_layer_config")
        _, wanted, field = path.split(".", 2)
        types = self.values.get(self.layers_by or "")
        if overrides is None or not isinstance(types, list):
            return _MISSING
        if not isinstance(overrides, dict):
            raise ConfigError(f"per_layer_config is {shown(overrides)}, and must be an object of layer indices")
        found: dict[Any, Any] = {}
        for index in (index for index, value in enumerate(types) if value == wanted):
            self.read.add(f"per_layer_config.{index}.{field}")
            found[index] = look(overrides, f"{index}.{field}", _MISSING)
            if found[index] is _MISSING:
                self.read.add(field)
                found[index] = look(self.values, field, _MISSING)
        distinct = {repr(value): value for value in found.values()}
        if len(distinct) > 1:
            listed = ", ".join(f"{shown(value)} in layer {index}" for index, value in found.items())
            raise ConfigError(f"per_layer_config must give all {wanted} layers one {field}, and gives {listed}")
        return next(iter(distinct.values()), _MISSING)

    def finish(self) -> None:
        """Raises ConfigError for each field of config.json that nothing read and nothing lets us ignore, or both."""
        both = sorted(name for name in self.ignore if any(f"{path}.".startswith(f"{name}.") for path in self.read))
        if both:
            raise ConfigError(f"ignore_config names {', '.join(both)}, which this spec reads: leave it out, it cannot be ignored")
        unread = [path for path, value in leaves(self.given) if value is not None and not self._accounted(path, value)]
        if any(path.split(".")[0] in QUANTISED for path in unread):
            raise ConfigError(quantised(self.given))
        if unread:
            outside = " (`outside.` is what lies beside the text part)" if any(map(_OUTSIDE.match, unread)) else ""
            raise ConfigError(
                f"config.json has fields that this spec does not read: {listed(unread)}{outside}. If they do not change the "
                f"forward pass, list them in the spec's `checkpoint.ignore` or pass LLM(ignore_config={shown(unread, 1000)})"
            )

    def _accounted(self, path: str, value: object) -> bool:
        parts = path.split(".")
        prefixes = {".".join(parts[: n + 1]) for n in range(len(parts))}
        return bool(prefixes & (self.read | self.ignore | NO_EFFECT.keys())) or is_stated(path, value)


def check_packed(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for weights packed by another method than MXFP4, where the spec ignores quantization_config since it
    reads experts in that."""
    given = config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, dict) else given
    if isinstance(method, str) and method in WAYS_OUT and method != "mxfp4":
        raise ConfigError(quantised(config))


def check_ignored(config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ConfigError for a name that stands for no field of the (normalised) config: it would let nothing pass."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"ignore_config is {shown(names)}, and must be a list of names: [{shown(names)}]")
    paths = [path for path, _ in leaves(config)]
    for name in names:
        if not any(path == name or path.startswith(f"{name}.") for path in paths):
            near = get_close_matches(name, paths, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "leave it out"
            raise ConfigError(f"ignore_config names {shown(name)}, and config.json has no such field; {hint}")
