"""What the parameters of a rope may hold in config.json, by type. The compiler checks `tiny` and `defaults` by it, and the
loader a checkpoint, which alone has the formulas."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

COMMON = frozenset({"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})
"""Keys of every type. Multimodal position streams are equal for text, so that recomposing them (`mrope_`) changes nothing."""

REQUIRED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset({"rope_theta"}),
        "linear": frozenset({"rope_theta", "factor"}),
        "llama3": frozenset({"rope_theta", "factor", "low_freq_factor", "high_freq_factor"}),
        "yarn": frozenset({"rope_theta", "factor"}),
        "proportional": frozenset({"rope_theta"}),
        "longrope": frozenset({"rope_theta", "short_factor", "long_factor"}),
    }
)
DYNAMIC = (
    "`dynamic` changes the tables with the length of each request, so that keys in pages would be turned by other angles than "
    "later queries"
)
"""Why one type of transformers is refused whatever a spec says."""
_YARN = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
OPTIONAL: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset(),
        "llama3": frozenset({"original_max_position_embeddings"}),
        "yarn": frozenset({"original_max_position_embeddings"}) | _YARN,
        "proportional": frozenset({"factor"}),
        "longrope": frozenset({"original_max_position_embeddings", "factor", "attention_factor", "short_mscale", "long_mscale"}),
    }
)
FACTORS = frozenset({"short_factor", "long_factor"})
"""Lists of one divisor a frequency."""
FLAGS = frozenset({"truncate", "mrope_interleaved"})
NULLABLE: Mapping[str, frozenset[str]] = MappingProxyType(
    {"yarn": (_YARN | {"factor"}) - FLAGS, "longrope": frozenset({"attention_factor", "factor", "short_mscale", "long_mscale"})}
)
"""Keys whose null means that they are absent: configs of the family that brought the type write them so."""

_ANY_SIGN = frozenset({"attention_factor", "mscale", "mscale_all_dim", "short_mscale", "long_mscale"})


def is_finite(value: object) -> bool:
    """Whether a value is a number that a double can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def known(kind: str) -> frozenset[str]:
    """Every key that a type takes."""
    return COMMON | REQUIRED[kind] | OPTIONAL[kind]


def fault(kind: str, key: str, value: object) -> str | None:
    """What is wrong with the value of one parameter of a type, None where nothing is."""
    if value is None and key in NULLABLE.get(kind, ()):
        return None
    if key == "rope_type":
        return None if isinstance(value, str) else "must be text"
    if key in FLAGS:
        return None if isinstance(value, bool) else "must be true or false"
    if key in FACTORS:
        listed = isinstance(value, list) and all(is_finite(item) and item > 0 and not isinstance(item, bool) for item in value)
        return None if listed else "must be a list of numbers above 0"
    if key == "mrope_section":
        return None if isinstance(value, list) and all(type(item) is int for item in value) else "must be a list of numbers"
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        return "must be a number"
    return "must be above 0" if key not in _ANY_SIGN and value <= 0 else None


def misfit(parameters: Mapping[str, Any], head_dim: int, max_position: int) -> str | None:
    """What is wrong with a whole table of parameters for heads of a width, None where nothing is.

    Expects values without a `fault`. `max_position` stands for an absent `original_max_position_embeddings`.
    """
    kind, partial = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor", 1.0)
    if partial > 1:
        return f"`partial_rotary_factor` is `{partial}`, and must be at most 1"
    turned = head_dim if kind == "proportional" else int(head_dim * partial)
    if turned < 2 or turned % 2:
        return f"{turned} dims of a head of {head_dim} turn, and the number must be even and at least 2"
    if kind == "llama3" and (low := parameters["low_freq_factor"]) == parameters["high_freq_factor"]:
        return f"`low_freq_factor` and `high_freq_factor` are both `{low}`, and must differ"
    if kind == "longrope":
        for key in sorted(FACTORS):
            if len(parameters[key]) != turned // 2:
                return f"`{key}` has {len(parameters[key])} numbers, and {turned} turning dims have {turned // 2} frequencies"
        if parameters.get("original_max_position_embeddings", max_position) < 2:
            return "`original_max_position_embeddings`, or `max_position_embeddings` in its place, must be at least 2"
    if kind == "yarn" and parameters["rope_theta"] == 1:
        return "`rope_theta` is `1`, and yarn divides by its logarithm"
    if kind in ("llama3", "yarn") and parameters.get("original_max_position_embeddings", max_position) < 1:
        return "`original_max_position_embeddings`, or `max_position_embeddings` in its place, must be at least 1"
    if kind == "yarn" and parameters["factor"] is None and max_position < 1:
        return "`factor` is null, and follows from `max_position_embeddings`, which must be at least 1"
    return None
