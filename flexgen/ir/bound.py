"""The part of the architecture that a config.json binds: dims, ropes, the schedule, and which files there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flexgen.ir.code import Size


@dataclass(frozen=True)
class Dim:
    """One line of `Dims`."""

    name: str
    type: Literal["int", "float", "bool"]
    read: str
    source: str
    path: str


@dataclass(frozen=True)
class Rope:
    name: str
    parameters: str
    types: tuple[str, ...]
    head_dim: Size
    turned: Size | None
    fp32: bool
    rounded: bool
    path: str
    why: str | None


@dataclass(frozen=True)
class ScheduleRule:
    """`selector(arguments, target, when=...)` of the runtime's schedule, as code."""

    selector: str
    arguments: str
    target: str
    when: str | None
    path: str
    why: str | None


@dataclass(frozen=True)
class RuleList:
    """The rules of whole kinds, or of the kinds of one slot."""

    slot: str | None
    rules: tuple[ScheduleRule, ...]


@dataclass(frozen=True)
class Division:
    """Two numbers, the first a multiple of the second, which only a config can tell: `what` has `many` and `few`."""

    what: str
    many: str
    many_code: str
    few: str
    few_code: str


@dataclass(frozen=True)
class Grouping:
    """Experts in groups, which only a config can tell to be equal and enough. Codes are those of the constructor of `Dims`."""

    what: str
    experts: str
    groups: str
    keep: str
    best: int
    top_k: str


@dataclass(frozen=True)
class Checkpoint:
    model_types: tuple[str, ...]
    text_config: str | None
    prefixes: tuple[str, ...]
    skip: tuple[str, ...]
    defaults: dict
    require: dict
    ignore: tuple[str, ...]
    layers_by: str | None
