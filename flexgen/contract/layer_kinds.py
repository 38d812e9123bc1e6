"""Which layer has which kind: the selectors of a spec's schedule. Later rules win; a rule about an absent field does nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from flexgen.contract.json_files import shown
from flexgen.errors import ConfigError

_MOST_LAYERS = 10_000

Target = str | Mapping[str, str]
"""A kind, or what earlier rules chose to what it becomes."""


@dataclass(frozen=True)
class Rule:
    """The kind of layer i of n, given what earlier rules chose: None leaves it as it is."""

    choose: Callable[[int, int, str | None], str | None]


NOTHING = Rule(lambda index, layers, before: before)


def everywhere(target: Target, when: object = True) -> Rule:
    """Every layer."""
    return _where(lambda index, layers: True, target, when)


def pattern(kinds: Sequence[str], when: object = True) -> Rule:
    """Kinds repeated over the depth."""
    return Rule(lambda index, layers, before: kinds[index % len(kinds)]) if when else NOTHING


def every(n: int | None, target: Target, when: object = True) -> Rule:
    """Layers n, 2n, 3n, ... counted from 1."""
    if n is None:
        return NOTHING
    step = _count(n, "a schedule repeats every", least=1)
    return _where(lambda index, layers: (index + 1) % step == 0, target, when)


def first(n: int | None, target: Target, when: object = True) -> Rule:
    """The first n layers."""
    count = 0 if n is None else _count(n, "the first layers of a schedule are")
    return _where(lambda index, layers: index < count, target, when)


def last(n: int | None, target: Target, when: object = True) -> Rule:
    """The last n layers."""
    count = 0 if n is None else _count(n, "the last layers of a schedule are")
    return _where(lambda index, layers: index >= layers - count, target, when)


def since(n: int | None, target: Target, when: object = True) -> Rule:
    """Layers from index n on, counted from 0."""
    if n is None:
        return NOTHING
    start = _count(n, "a rule of the schedule starts at layer")
    return _where(lambda index, layers: index >= start, target, when)


def at(indices: Sequence[int] | None, target: Target, when: object = True) -> Rule:
    """The listed layer indices, counted from 0."""
    if indices is None:
        return NOTHING
    if not isinstance(indices, list | tuple):
        raise ConfigError(f"a schedule's layer indices are {shown(indices)}, and must be a list")
    listed = {_count(index, "a schedule lists layer") for index in indices}
    return _where(lambda index, layers: index in listed, target, when)


def by(values: Sequence[str | int] | None, kinds: Mapping[str, str], when: object = True) -> Rule:
    """One value a layer, and the kind that each means: by its text, as `written` has it for numbers and flags."""
    if values is None or not when:
        return NOTHING
    if not isinstance(values, list | tuple):
        raise ConfigError(f"the layer types are {shown(values)}, and must be a list with one value a layer")
    listed = values

    def choose(index: int, layers: int, before: str | None) -> str | None:
        if len(listed) != layers:
            raise ConfigError(f"config.json lists {len(listed)} layer types for {layers} layers")
        value = listed[index]
        if not isinstance(value, str | int) or written(value) not in kinds:
            known = ", ".join(kinds)
            raise ConfigError(f"layer {index} has type {shown(value)}, which this spec does not describe; it knows {known}")
        return kinds[written(value)]

    return Rule(choose)


def written(value: str | int) -> str:
    """A value as a key of a spec has it: true, false, digits, or the text itself."""
    return str(value).lower() if isinstance(value, bool) else str(value)


SELECTORS: Mapping[str, Callable[..., Rule]] = MappingProxyType(
    {"all": everywhere, "pattern": pattern, "every": every, "first": first, "last": last, "from": since, "at": at, "by": by}
)
"""What a spec calls each selector."""


def crossed(layers: int, slots: Mapping[str, Sequence[Rule]]) -> tuple[str, ...]:
    """The kind of each layer where every slot has rules of its own: their kinds' names joined. Raises as `resolve`."""
    return tuple(map("_".join, zip(*(resolve(layers, rules, f"kind of {slot}") for slot, rules in slots.items()))))


def resolve(layers: int, rules: Sequence[Rule], what: str = "kind") -> tuple[str, ...]:
    """The kind of each layer. Raises ConfigError naming a layer that no rule reached."""
    if layers > _MOST_LAYERS:
        raise ConfigError(f"config.json gives the model {layers} layers, and {_MOST_LAYERS} is the most")
    kinds: list[str] = []
    for index in range(layers):
        kind: str | None = None
        for rule in rules:
            kind = rule.choose(index, layers, kind)
        if kind is None:
            raise ConfigError(f"layer {index} of {layers} gets no {what} from the schedule")
        kinds.append(kind)
    return tuple(kinds)


def _count(value: object, what: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} {shown(value)} by config.json, which must be a whole number of at least {least}")
    return value


def _where(selects: Callable[[int, int], bool], target: Target, when: object) -> Rule:
    if not when:
        return NOTHING

    def choose(index: int, layers: int, before: str | None) -> str | None:
        if not selects(index, layers):
            return before
        return target if isinstance(target, str) else target.get(before or "", before)

    return Rule(choose)
