"""The block of a spec as functions: one for all kinds that differ in nothing but what fills a slot. `resolve` calls it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flexgen.ir import architecture as ir
from flexgen.ir.code import dim
from flexgen.ir.kinds import Filled, kinds
from flexgen.ir.names import MODULE
from flexgen.ir.parts import Parts
from flexgen.ir.rows import Rows
from flexgen.ir.steps import STREAM, Lowering, shown
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path

Fills = dict[str, str]
"""By slot, the function that is called there."""


@dataclass(frozen=True)
class Lowered:
    """One kind: its parts with slots called by their names, what fills them, and the weights of its own steps."""

    kind: ir.Kind
    parts: tuple[ir.Part, ...]
    fills: Fills
    markers: dict[str, str | None]
    roles: set[str]


def layers(parts: Parts) -> tuple[tuple[ir.Block, ...], tuple[ir.Kind, ...], tuple[ir.WeightTable, ...]]:
    """-> the functions of the block, the layer kinds, and the tables of the weights that the block's own steps have."""
    owned: dict[str, ir.Row] = {}
    filled = kinds(parts.model)
    lowered = [_lower(parts, kind, owned) for kind in filled]
    if not all(item.parts for item in lowered):
        return (), (), ()
    tables = _tables(lowered, owned)
    groups: dict[tuple[ir.Part, ...], list[Lowered]] = {}
    for item in lowered:
        groups.setdefault(item.parts, []).append(item)
    blocks: dict[str, ir.Block] = {}
    found: dict[str, ir.Kind] = {}
    for group in groups.values():
        block = _block(group, _block_name(group, len(groups) == 1, blocks))
        blocks[block.function] = block
        for item in group:
            fills = tuple(item.fills[slot] for slot in _varying(group))
            own = tuple(table.function for table in tables if {row.role for row in table.rows} <= item.roles)
            found[item.kind.name] = replace(item.kind, block=block.function, fills=fills, tables=(*own, *item.kind.tables))
    return tuple(blocks.values()), tuple(found[kind.name] for kind in filled), tables


def _tables(lowered: list[Lowered], owned: dict[str, ir.Row]) -> tuple[ir.WeightTable, ...]:
    """The weights that every kind has, then those that the same few kinds have: a table each, named after the first of them."""
    groups: dict[tuple[str, ...], list[ir.Row]] = {tuple(item.kind.name for item in lowered): []}
    for role, row in owned.items():
        users = tuple(item.kind.name for item in lowered if role in item.roles)
        groups.setdefault(users, []).append(row)
    (_, common), *others = groups.items()
    rest = [ir.WeightTable(f"{_free(users, groups)}_block_weights", tuple(rows), "block") for users, rows in others]
    return (ir.WeightTable("block_weights", tuple(common), "block"), *rest)


def _free(users: tuple[str, ...], groups: dict[tuple[str, ...], list[ir.Row]]) -> str:
    """A name for a set of kinds: its first, unless an earlier set begins with that, else all of them."""
    earlier = list(groups)[1 : list(groups).index(users)]
    return users[0] if all(other[0] != users[0] for other in earlier) else "_".join(users)


def layer_input(parts: Parts, name: str, entry: models.LayerInput) -> tuple[ir.LayerInput, list[ir.Row]]:
    """A value made once from the embedded tokens, whose steps see one layer's slice in the last dimension; its weights."""
    at = ("layer_inputs", name)
    size = parts.scope.code(entry.size, (*at, "size"))
    rows = Rows(fp32=parts.model.checkpoint.fp32, transposed=parts.model.checkpoint.transposed)
    steps = Lowering(parts, rows, {}, view=(dim("layers"), size))
    value, statements = steps.steps(entry.steps, (*at, "steps"), steps.stream, name)
    if value.width != size:
        message = f"`{name}` ends with width {shown(value.width)}, and its `size` is {shown(size)}"
        parts.problems.add("SPEC017", message, (*at, "size"))
    return ir.LayerInput(name, value.name, tuple(statements), ".".join(at), entry.why), list(steps.owned.values())


def _lower(parts: Parts, filled: Filled, owned: dict[str, ir.Row]) -> Lowered:
    """One kind: its parts in order, the tables of its weights and the entries that keep state."""
    model, name = parts.model, filled.name
    slots = frozenset(slot for kind in model.kinds.values() for slot in kind)
    steps = Lowering(parts, parts.rows, owned, kind=filled, slots=slots)
    found = []
    for index, part in enumerate(model.block):
        path: SpecPath = ("block", index)
        if isinstance(part, models.AddPart):
            if steps.is_empty(part.add):
                continue
            statements = steps.add(part, path)
        else:
            value, statements = steps.step(part, path, steps.stream, "x")
            assert value.name == STREAM
        found.append(ir.Part(f"block[{index}]", tuple(statements)))
    _check_slots(parts, filled, slots)
    if not found:
        help = "fill a slot, or add a part of the block that every kind has"
        parts.problems.add("SPEC005", f"layers of kind `{name}` compute nothing", filled.path, key=True, help=help)
    calls = [statement for part in found for statement in part.statements if statement.slot]
    kind = ir.Kind(
        name=name,
        function=f"{name}_layer",
        block="",
        fills=(),
        mixers=tuple(steps.mixers),
        routes=tuple(steps.routes),
        tables=tuple(steps.tables),
        inputs=tuple(steps.inputs),
        path=show_path(filled.path),
    )
    return Lowered(
        kind,
        tuple(replace(part, statements=tuple(map(_open, part.statements))) for part in found),
        {str(call.slot): str(call.function) for call in calls},
        {str(call.slot): call.comment for call in calls},
        set(steps.roles),
    )


def _open(statement: ir.Statement) -> ir.Statement:
    """A line without what its slot's filling says."""
    return replace(statement, function=statement.slot, comment=None) if statement.slot else statement


def _varying(group: list[Lowered]) -> tuple[str, ...]:
    """The slots that kinds of a group fill with different functions."""
    return tuple(slot for slot in group[0].fills if len({item.fills[slot] for item in group}) > 1)


def _block(group: list[Lowered], function: str) -> ir.Block:
    varying, first = _varying(group), group[0]
    called = {statement.function for part in first.parts for statement in part.statements if not statement.slot}
    called |= set(first.fills.values())
    parameters = {slot: f"{slot}_part" if slot in MODULE | called else slot for slot in varying}

    def filled(statement: ir.Statement) -> ir.Statement:
        slot = statement.slot
        if slot is None:
            return statement
        markers = dict.fromkeys(item.markers[slot] for item in group)
        comment = ", or ".join(marker for marker in markers if marker) or None
        return replace(statement, function=parameters.get(slot, first.fills[slot]), comment=comment)

    parts = tuple(replace(part, statements=tuple(map(filled, part.statements))) for part in first.parts)
    parts, result = _returned(parts)
    return ir.Block(function, tuple(parameters.values()), parts, result)


def _block_name(group: list[Lowered], is_only: bool, taken: dict[str, ir.Block]) -> str:
    """A kind of its own is its block; else the block is named after what its kinds have in common."""
    if len(group) == 1:
        return group[0].kind.function
    if is_only:
        return "block"
    varying = _varying(group)
    common = [function for slot, function in group[0].fills.items() if slot not in varying] or _common_parts(group)
    name = "_".join([*common, "block"])
    return name if len(common) and name not in taken else f"{group[0].kind.name}_block"


def _common_parts(group: list[Lowered]) -> list[str]:
    """The tables that all kinds of a group have, named after their entries."""
    shared = [name for name in group[0].kind.tables if all(name in item.kind.tables for item in group)]
    return [name.removesuffix("_weights") for name in shared]


def _returned(parts: tuple[ir.Part, ...]) -> tuple[tuple[ir.Part, ...], ir.Statement]:
    """What the function returns: what its last line makes, which is the stream."""
    *before, last = parts
    *statements, result = last.statements
    return (*before, replace(last, statements=tuple(statements))), result


def _check_slots(parts: Parts, kind: Filled, slots: frozenset[str]) -> None:
    """Report slots that a kind fills and the block does not call, and the other way round."""
    steps: dict[str, SpecPath] = {}
    for index, part in enumerate(parts.model.block):
        if isinstance(part, models.AddPart):
            steps |= dict(_named(part.add, ("block", index, "add")))
    for slot, place in kind.places.items():
        if slot not in steps:
            parts.problems.unknown("slot", slot, steps, place, key=True)
    for step in sorted(steps.keys() & slots):
        if step not in kind.fills:
            message = f"kind `{kind.name}` does not fill the slot `{step}`"
            parts.problems.add("SPEC005", message, kind.path, key=True, help=f"add `{step}: ENTRY`, or `{step}: none` to leave it empty")


def _named(steps: list, path: SpecPath) -> Iterator[tuple[str, SpecPath]]:
    """The steps that are names, of slots or entries, and where they stand."""
    for index, step in enumerate(steps):
        if isinstance(step, str):
            yield step, (*path, index)
        elif isinstance(step, models.SumStep):
            for number, branch in enumerate(step.sum):
                yield from _named(branch, (*path, index, "sum", number))
