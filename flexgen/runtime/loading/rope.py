"""Rotary position tables from a checkpoint's `rope_parameters`.

A `Rope` is bound once at load, where every key must be understood, and makes the (positions, d/2) tables that
`ops.rotate` reads. Values equal transformers' bit for bit, so the formulas keep its order of operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from flexgen.contract import rope_parameters as rules
from flexgen.contract.json_files import shown
from flexgen.errors import ConfigError

MOST_POSITIONS = 2**24
"""Tokens that a model may have positions for; the longest published have 10 million."""


@dataclass(frozen=True)
class Rope:
    """One rotary embedding with its numbers bound. Fields that its type does not use keep their defaults.

    partial is the share of the head that turns; original_position the context length of pretraining, in tokens.
    """

    type: str
    head_dim: int
    theta: float
    partial: float = 1.0
    factor: float = 1.0
    original_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None

    @staticmethod
    def bind(parameters: Mapping[str, Any], *, types: tuple[str, ...], head_dim: int, max_position: int) -> Rope:
        """The rope of one `rope_parameters` mapping; `types` are those that the spec allows.

        `max_position` (tokens) stands in for an absent `original_max_position_embeddings`.
        Raises ConfigError for an unknown type, a type outside `types`, and unknown, missing or malformed keys.
        """
        kind = _rope_type(parameters, types)
        table = {**{key: value for key, value in parameters.items() if key != "type"}, "rope_type": kind}
        _check_keys(kind, table)
        for key, value in table.items():
            if wrong := rules.fault(kind, key, value):
                raise ConfigError(f"rope_parameters.{key} is {shown(value)}, and {wrong}")
        if wrong := rules.misfit(table, head_dim, max_position):
            raise ConfigError(f"rope_parameters of type {shown(kind)}: {wrong}")
        given = {_FIELDS[key]: value for key, value in table.items() if key in _FIELDS and value is not None}
        if kind in ("llama3", "yarn", "longrope"):
            given.setdefault("original_position", max_position)
        if kind == "longrope":
            given |= {key: tuple(table[key]) for key in rules.FACTORS}
            given.setdefault("factor", max_position / given["original_position"])
        if kind == "yarn" and "factor" not in given:
            given["factor"] = max_position / given["original_position"]
        return Rope(type=kind, head_dim=head_dim, **given)

    @property
    def rotary_dim(self) -> int:
        """d: how many dims of a head the tables turn, at most head_dim."""
        return self.head_dim if self.type == "proportional" else int(self.head_dim * self.partial)

    def tables(
        self, length: int, dtype: torch.dtype, device: torch.device | str, rounded: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, each (length, d/2): computed in fp32 on `device`, attention factor included, then cast.

        rounded: a dtype that they pass through before.

        longrope has two tables: of an engine whose requests may be longer than the model was first trained for, `length`,
        every request is turned by the long factors, else by the short ones. So one engine has one table, cached prefixes
        hold in it for any request, and short requests of a long engine differ from what transformers makes of them alone.
        """
        frequencies, attention_factor = _FREQUENCIES[self.type](self)
        if self.type == "longrope":
            is_long = length > self.original_position
            factors, own = (self.long_factor, self.long_mscale) if is_long else (self.short_factor, self.short_mscale)
            attention_factor = attention_factor if own is None else own  # Phi 3.5 MoE states its own
            frequencies = 1.0 / (torch.tensor(factors) * _powers(self.theta, self.rotary_dim, self.rotary_dim))
        positions = torch.arange(length, device=device).float()
        angles = positions[:, None] * frequencies.to(device)
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        return cos.to(rounded or dtype).to(dtype), sin.to(rounded or dtype).to(dtype)


_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "rope_theta": "theta",
        "partial_rotary_factor": "partial",
        "original_max_position_embeddings": "original_position",
        **{key: key for key in ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast")},
        **{key: key for key in ("beta_slow", "mscale", "mscale_all_dim", "truncate", "short_mscale", "long_mscale")},
    }
)
"""Keys of config.json, and the fields of `Rope` that hold them."""


def _rope_type(parameters: Mapping[str, Any], types: tuple[str, ...]) -> str:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "dynamic":
        raise ConfigError(f"rope_parameters.rope_type is 'dynamic', which is not implemented: {rules.DYNAMIC}")
    if not isinstance(kind, str) or kind not in rules.REQUIRED:
        raise ConfigError(f"rope_parameters.rope_type is {shown(kind)}, flexgen knows {_listed(rules.REQUIRED)}")
    if parameters.get("type", kind) != kind:
        raise ConfigError(f"rope_parameters says both rope_type {shown(kind)} and type {shown(parameters['type'])}; remove one")
    if kind not in types:
        raise ConfigError(
            f"rope_parameters.rope_type is {shown(kind)}, this spec allows {_listed(types)}; "
            f"if the architecture does take {kind}, add it to the rope's types in the spec"
        )
    return kind


def _check_keys(kind: str, parameters: Mapping[str, Any]) -> None:
    if missing := rules.REQUIRED[kind] - parameters.keys():
        raise ConfigError(f"rope_parameters of type {shown(kind)} lacks {_listed(missing)}; config.json must give it")
    if unknown := parameters.keys() - rules.known(kind):
        raise ConfigError(
            f"rope_parameters of type {shown(kind)} has {_listed(unknown)}, which nothing reads; "
            f"{shown(kind)} takes {_listed(rules.known(kind))}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _powers(theta: float, stop: int, dim: int) -> Tensor:
    """theta ** (2 j / dim) for 2 j < stop, from which each type makes (d/2,) frequencies in fp32, and the tables' multiplier."""
    return theta ** (torch.arange(0, stop, 2, dtype=torch.int64).float() / dim)


def _default(rope: Rope) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope.theta, rope.rotary_dim, rope.rotary_dim), 1.0


def _longrope(rope: Rope) -> tuple[Tensor, float]:
    """Of no length yet: the tables' multiplier (Ding et al. 2024, arXiv:2402.13753)."""
    factor = rope.attention_factor
    if factor is None:
        factor = 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_position))
    return _default(rope)[0], factor


def _linear(rope: Rope) -> tuple[Tensor, float]:
    return _default(rope)[0] / rope.factor, 1.0


def _proportional(rope: Rope) -> tuple[Tensor, float]:
    """Full-length tables whose last frequencies are 0: dim j still pairs with dim j + head_dim / 2 (gemma4)."""
    turning = int(rope.partial * rope.head_dim // 2)
    frequencies = torch.zeros(rope.head_dim // 2)
    frequencies[:turning] = 1.0 / _powers(rope.theta, 2 * turning, rope.head_dim)
    return frequencies / rope.factor, 1.0


def _llama3(rope: Rope) -> tuple[Tensor, float]:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""
    frequencies, _ = _default(rope)
    longest = rope.original_position / rope.low_freq_factor
    shortest = rope.original_position / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    width = rope.high_freq_factor - rope.low_freq_factor
    ramp = (rope.original_position / wavelengths - rope.low_freq_factor) / width
    blended = (1 - ramp) * frequencies / rope.factor + ramp * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, scaled), 1.0


def _yarn(rope: Rope) -> tuple[Tensor, float]:
    """Interpolated below `low`, kept above `high`, a ramp over dims between (Peng et al. 2023, arXiv:2309.00071)."""
    dim = rope.rotary_dim
    powers = _powers(rope.theta, dim, dim)
    low, high = _yarn_range(rope, dim)
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep, _yarn_attention_factor(rope)


def _yarn_range(rope: Rope, dim: int) -> tuple[float, float]:
    """The dims between which the ramp runs: a wave turns beta_fast, beta_slow times in the original context there."""

    def dim_of(turns: float) -> float:
        return (dim * math.log(rope.original_position / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1)


_FREQUENCIES: Mapping[str, Callable[[Rope], tuple[Tensor, float]]] = MappingProxyType(
    {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "proportional": _proportional, "longrope": _longrope}
)


def checked_length(config: Mapping[str, Any]) -> int | None:
    """The tokens that a model was made for by its (normalised) config.json, None where that says nothing."""
    longest = config.get("max_position_embeddings")
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or not 1 < longest <= MOST_POSITIONS):
        raise ConfigError(
            f"max_position_embeddings is {shown(longest)}, and must be a whole number from 2 to {MOST_POSITIONS}"
        )
    return longest


def stretched_length(config: Mapping[str, Any], longest: int) -> int:
    """The most tokens that the model's ropes tell positions of: scaled ones reach further than `longest`, by their factor."""
    parameters = config.get("rope_parameters") or {}
    tables = [table for table in parameters.values() if isinstance(table, dict)] or [parameters]
    return max(longest, min(_reach(table, longest) for table in tables))


def _reach(table: Mapping[str, Any], longest: int) -> int:
    factor, kind = table.get("factor"), table.get("rope_type")
    if kind not in ("linear", "yarn") or factor is None:
        return longest
    original = table.get("original_max_position_embeddings") if kind == "yarn" else None
    return int(min(factor * (longest if original is None else original), MOST_POSITIONS))
