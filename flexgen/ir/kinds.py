"""The layer kinds of a spec with what fills their slots: those that it names, or those that lists of one slot each make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from flexgen.ir.problems import Problems
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath


@dataclass(frozen=True)
class Filled:
    """A kind: the entries that each slot sums, none where it is empty, and where the spec says so."""

    name: str
    fills: dict[str, tuple[str, ...]]
    places: dict[str, SpecPath]
    path: SpecPath


def kinds(model: models.SpecModel) -> list[Filled]:
    """Every kind that a layer can be, in the spec's order."""
    named = [_filled(model, name) for name in model.kinds]
    if not isinstance(model.schedule, dict):
        return named
    halves = [[kind for kind in named if list(kind.fills) == [each.slot]] for each in model.schedules]
    return [_crossed(crossing) for crossing in product(*halves)]


def check_halves(model: models.SpecModel, problems: Problems) -> None:
    """Report kinds that fill another number of slots than the one whose list chooses them, and lists of no slot."""
    if not isinstance(model.schedule, dict):
        return
    slots = {slot: ("kinds", name, slot) for name, kind in model.kinds.items() for slot in kind}
    for slot in model.schedule:
        if slot not in slots:
            problems.unknown("slot", slot, slots, ("schedule", slot), key=True)
    for slot, path in slots.items():
        if slot not in model.schedule:
            message = f"no list of the schedule is for the slot `{slot}`"
            problems.add("SPEC014", message, ("schedule",), key=True, help=f"add `{slot}: [RULES]`", note=("filled here", path))
    for name, kind in model.kinds.items():
        if len(kind) != 1:
            message = f"`{name}` fills {len(kind)} slots, and each list of the schedule chooses kinds of one"
            problems.add("SPEC013", message, ("kinds", name), key=True, help="give each slot kinds of its own: they are crossed")


def _filled(model: models.SpecModel, name: str) -> Filled:
    fills = {slot: tuple(entries(filling)) for slot, filling in model.kinds[name].items()}
    return Filled(name, fills, {slot: ("kinds", name, slot) for slot in fills}, ("kinds", name))


def entries(filling: str | list[str]) -> Iterator[str]:
    """The entries that a slot sums."""
    if isinstance(filling, list):
        yield from filling
    elif filling != "none":
        yield filling


def _crossed(halves: tuple[Filled, ...]) -> Filled:
    name = "_".join(half.name for half in halves)
    fills = {slot: filling for half in halves for slot, filling in half.fills.items()}
    return Filled(name, fills, {slot: place for half in halves for slot, place in half.places.items()}, halves[0].path)
