"""What a spec reads of a config.json, and what it lacks or leaves unread in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flexgen.contract.configs import broken_fence, leaves, look, merged, normalise
from flexgen.contract.ignored import NO_EFFECT
from flexgen.contract.layer_kinds import written
from flexgen.contract.synonyms import SYNONYMS
from flexgen.new.config import Given
from flexgen.spec.diagnostics import SpecPath
from flexgen.spec.expressions import Name, Number, Or, parse
from flexgen.spec.load import Spec
from flexgen.spec.models import SpecModel


@dataclass(frozen=True)
class Fit:
    """How a spec fits a config.

    serves   whether one of its model types is the config's
    unread   fields that the config states and the spec does not read, with their values
    missing  fields that a dim needs and the config lacks, by dim
    silent   fields that the spec could read and the config does not state
    lacks    parts that the config states and the spec lacks: experts, recurrent layers, per-layer inputs, windows
    extras   the same the other way round
    fences   why `require` does not hold, by field
    foreign  values that the spec does not know: rope types and kinds of layers, by the spec path that would have to
    """

    serves: bool
    unread: Mapping[str, Any]
    missing: Mapping[str, tuple[str, ...]]
    silent: tuple[str, ...]
    lacks: frozenset[str]
    extras: frozenset[str]
    fences: Mapping[str, str]
    foreign: Mapping[SpecPath, str]

    @property
    def is_exact(self) -> bool:
        """Whether the engine would take this spec for the config."""
        return self.serves and not self.fences

    @property
    def distance(self) -> int:
        """How much of the config and of the spec the other does not have; for choosing the nearest spec."""
        stated = sum(value not in (None, False, 0, [], {}) for value in self.unread.values())
        settings = stated + len(self.silent) + 2 * len(self.missing) + 3 * len(self.fences) + 3 * len(self.foreign)
        return settings + 20 * len(self.lacks) + 3 * len(self.extras)


def fit(spec: Spec, given: Given) -> Fit:
    """Compare a spec with a config. A spec's defaults stand for the config class of its own model types only."""
    model, require = spec.model, spec.document.data["checkpoint"].get("require", {})
    text = normalise(given.raw, model.checkpoint.text_config or given.nested)
    serves = text.get("model_type") in model.checkpoint.model_types
    config = merged(text, model.checkpoint.defaults if serves else {})
    dims = {name: list(_paths(name, model)) for name in model.dims}
    paths = {path for listed in dims.values() for path, _ in listed}
    scheduled = {rule_path for _, rule in model.rules for rule_path in (rule.at, rule.by, rule.when) if rule_path}
    scheduled |= {path for _, rule in model.rules for path in _rule_paths(rule, model)}
    known = paths | scheduled | {entry.parameters for entry in model.ropes.values()}
    known |= {*model.checkpoint.require, *model.checkpoint.ignore, *NO_EFFECT, "rope_parameters"}
    known |= {"original_max_position_embeddings"} if model.ropes else set()  # read beside the ropes' own parameters
    known |= {"per_layer_config"} if any(path.startswith("layers.") for path in paths) else set()
    return Fit(
        serves=serves,
        unread={path: value for path, value in leaves(text) if value is not None and not _covered(path, known)},
        missing={
            name: tuple(path for path, _ in listed)
            for name, listed in dims.items()
            if listed and all(must and look(config, path) is None for path, must in listed)
        },
        silent=tuple(sorted(path for path in paths | scheduled if look(config, path) is None and not serves)),
        lacks=_parts_of_config(text) - _parts_of_spec(model),
        extras=_parts_of_spec(model) - _parts_of_config(text),
        fences={
            field: reason
            for field, wanted in require.items()
            if (reason := broken_fence(config, {field: wanted})) is not None
        },
        foreign=dict(_foreign(model, config)),
    )


def _foreign(model: SpecModel, config: Mapping[str, Any]) -> Iterator[tuple[SpecPath, str]]:
    for name, entry in model.ropes.items():
        table = look(config, entry.parameters)
        if isinstance(table, Mapping) and (kind := table.get("rope_type", "default")) not in entry.types:
            yield ("ropes", name), f"config.json has rope type {kind}, which is not among `types`"
    for at, rule in model.rules:
        values = look(config, rule.by) if rule.by else None
        unknown = [value for value in values if written(value) not in (rule.kinds or ())] if isinstance(values, list) else []
        if unknown:
            listed = ", ".join(dict.fromkeys(map(str, unknown)))
            yield at, f"`{rule.by}` of config.json has {listed}, which is no key of `kinds`"


def _parts_of_spec(model: SpecModel) -> frozenset[str]:
    windows = any(entry.window != "none" for entry in model.attention.values())
    has = {"moe": model.moe, "gdn": model.gdn, "layer_inputs": model.layer_inputs, "window": windows}
    return frozenset(name for name, part in has.items() if part)


def _parts_of_config(config: Mapping[str, Any]) -> frozenset[str]:
    signs = {
        "moe": ("num_experts", *SYNONYMS["num_experts"]),
        "gdn": ("linear_num_key_heads",),
        "layer_inputs": ("hidden_size_per_layer_input",),
        "window": ("sliding_window", "sliding_window_size", "use_sliding_window"),
    }
    return frozenset(name for name, fields in signs.items() if any(look(config, field) for field in fields))


def _covered(path: str, known: set[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:n]) in known for n in range(1, len(parts) + 1))


def _paths(dim: str, model: SpecModel) -> Iterator[tuple[str, bool]]:
    """The config fields that a dim reads, and whether it has no value without one of them."""
    earlier = set(list(model.dims)[: list(model.dims).index(dim)])
    expr = parse(model.dims[dim])
    last = expr.alternatives[-1] if isinstance(expr, Or) else None
    falls_back = isinstance(last, Number) or (last is not None and {n.dotted for n in last.names()} <= earlier)
    for name in expr.names():
        if name.dotted not in earlier:
            yield name.dotted, not falls_back


def _rule_paths(rule: Any, model: SpecModel) -> Iterator[str]:
    """The config fields that a rule of the schedule counts with."""
    for text in (rule.every, rule.first, rule.last, rule.from_):
        if text is not None:
            yield from (n.dotted for n in parse(text).walk() if isinstance(n, Name) and n.dotted not in model.dims)
