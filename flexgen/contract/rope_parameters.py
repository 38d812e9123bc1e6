"""What the parameters of a rope may hold in config.json, by type. The runtime has the formulas; a test holds both together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON = frozenset({"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"})
REQUIRED: Mapping[str, frozenset[str]] = {
    "default": frozenset({"rope_theta"}),
    "linear": frozenset({"rope_theta", "factor"}),
    "llama3": frozenset({"rope_theta", "factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"rope_theta", "factor"}),
    "proportional": frozenset({"rope_theta"}),
}
_YARN = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
OPTIONAL: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(),
    "llama3": frozenset({"original_max_position_embeddings"}),
    "yarn": frozenset({"original_max_position_embeddings"}) | _YARN,
    "proportional": frozenset({"factor"}),
}
FLAGS = frozenset({"truncate", "mrope_interleaved"})


def fault(key: str, value: object) -> str | None:
    """What is wrong with the value of a parameter, None where nothing is."""
    if key == "rope_type":
        return None if isinstance(value, str) else "must be text"
    if key in FLAGS:
        return None if isinstance(value, bool) else "must be true or false"
    if key == "mrope_section":
        return None if isinstance(value, list) and all(type(item) is int for item in value) else "must be a list of numbers"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a number"
    above_zero = key not in ("attention_factor", "mscale", "mscale_all_dim")
    return "must be above 0" if above_zero and value <= 0 else None


def misfit(parameters: Mapping[str, Any], head_dim: int, max_position: int) -> str | None:
    """What is wrong with a whole table of parameters for heads of a width, None where nothing is."""
    kind, partial = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor", 1.0)
    if partial > 1:
        return f"`partial_rotary_factor` is `{partial}`, and must be at most 1"
    turned = head_dim if kind == "proportional" else int(head_dim * partial)
    if turned < 2 or turned % 2:
        return f"{turned} dims of a head of {head_dim} turn, and the number must be even and at least 2"
    if kind == "llama3" and parameters["low_freq_factor"] == parameters["high_freq_factor"]:
        return "`low_freq_factor` and `high_freq_factor` must differ"
    if kind in ("llama3", "yarn") and parameters.get("original_max_position_embeddings", max_position) < 1:
        return "`original_max_position_embeddings`, or `max_position_embeddings` in its place, must be at least 1"
    return None
