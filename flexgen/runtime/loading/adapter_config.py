"""What an adapter_config.json says, and which of the model's modules it therefore promises to change."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexgen.runtime.loading.lora import AdapterError

_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters",
    "exclude_modules", "layers_to_transform",
}  # fmt: skip

_WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",  # where it comes from
    "lora_dropout", "loftq_config", "eva_config", "lora_ga_config", "corda_config", "runtime_config",  # how it was trained
    "megatron_config", "megatron_core", "qalora_group_size", "layers_pattern", "save_embedding_layers",
}  # fmt: skip

_REFUSED = {
    "use_dora": "DoRA rescales the columns of the base weight, which is no sum of low-rank updates",
    "modules_to_save": "whole modules trained beside the adapter are weights: give them to load_weights",
    "trainable_token_indices": "rows of the embedding trained beside the adapter are weights: give them to load_weights",
    "lora_bias": "an update of a bias is no low-rank update",
    "fan_in_fan_out": "the modules of this model are stored as (out, in)",
}

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract the adapter from the base weights, so that it belongs to another base than the checkpoint."""


@dataclass(frozen=True)
class LoraSettings:
    """The fields of a LoraConfig that act. Names of modules are matched as PEFT matches them."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    modules: Sequence[str] | str
    parameters: Sequence[str]
    excluded: Sequence[str] | str
    layers: Sequence[int] | None

    @classmethod
    def read(cls, config: Mapping[str, Any], name: str) -> LoraSettings:
        """Raises AdapterError, which names the field, for whatever is not computed exactly."""
        _check(config, name)
        layers = config.get("layers_to_transform")
        return cls(
            rank=config.get("r", 8),
            alpha=config.get("lora_alpha", 8),
            rslora=bool(config.get("use_rslora")),
            ranks=config.get("rank_pattern") or {},
            alphas=config.get("alpha_pattern") or {},
            modules=_names(config.get("target_modules")),
            parameters=sorted(config.get("target_parameters") or ()),
            excluded=_names(config.get("exclude_modules")),
            layers=[layers] if isinstance(layers, int) else layers,
        )

    def rank_of(self, full: str) -> int:
        """The rank of the update of a module or parameter by its full name."""
        return self.ranks.get(_pattern(self.ranks, full), self.rank)

    def scale_of(self, full: str) -> float:
        """What multiplies B A."""
        rank = self.rank_of(full)
        return self.alphas.get(_pattern(self.alphas, full), self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def promises(self, layer: int | None, names: Sequence[str], parameter: bool) -> bool:
        """Whether a module or parameter is a target, by any of the full names that it may have."""
        if parameter:
            return any(_ends(name, self.parameters) for name in names)
        if any(_matches(self.excluded, name) for name in names) or not any(_matches(self.modules, name) for name in names):
            return False
        return self.layers is None or isinstance(self.modules, str) or layer in self.layers


def _check(config: Mapping[str, Any], name: str) -> None:
    if config.get("peft_type", "LORA") not in ("LORA", "PeftType.LORA"):
        raise AdapterError(f"adapter {name} is of type {config['peft_type']}, and only LORA adapters are served")
    for field, why in _REFUSED.items():
        if config.get(field):
            raise AdapterError(f"adapter {name} has {field}={config[field]!r}, which is not served: {why}")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"adapter {name} has bias={config['bias']!r}: trained biases are weights, give them to load_weights")
    begun = str(config.get("init_lora_weights", True)).lower()
    if begun.startswith(_CHANGE_THE_BASE):
        raise AdapterError(
            f"adapter {name} has init_lora_weights={begun!r}, which changes the base weights too: save it with PEFT's "
            "path_initial_model_for_weight_conversion, which makes a plain adapter of it"
        )
    known = _READ | _WITHOUT_EFFECT | set(_REFUSED) | {"bias", "init_lora_weights", "ensure_weight_tying"}
    for field, value in config.items():
        if field not in known and value:
            raise AdapterError(f"adapter {name} has {field}={value!r}, a field that is not known here and may change what it computes")
    if config.get("ensure_weight_tying"):
        raise AdapterError(f"adapter {name} has ensure_weight_tying=True, which is not served: target the embedding and the head")


def _names(value: Any) -> Sequence[str] | str:
    return value if isinstance(value, str) else sorted(value or ())


def _matches(patterns: Sequence[str] | str, name: str) -> bool:
    return re.fullmatch(patterns, name) is not None if isinstance(patterns, str) else _ends(name, patterns)


def _ends(name: str, endings: Sequence[str]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _pattern(patterns: Mapping[str, Any], full: str) -> str:
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", full)), full)
