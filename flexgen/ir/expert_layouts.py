"""How the experts of a checkpoint lie in its files, and how in memory. `flexgen.ir.experts` calls it."""

from __future__ import annotations

from flexgen.ir.shared import Shared
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath


def layout_code(layouts: list, memory: str) -> tuple[str, ...]:
    """Code for each layout that a file may have; one whose axes lie otherwise than in `memory` is transposed."""
    found = []
    for layout in layouts:
        if isinstance(layout, models.StackedLayout):
            transpose = ", transpose=True" if _orientation(layout) != memory else ""
            found.append(f'weights.Stacked("{layout.stacked}"{transpose})')
        elif isinstance(layout, models.PerExpertLayout):
            names = [f'"{name}"' for name in layout.per_expert]
            found.append(f"weights.PerExpert(({', '.join(names)}{',' if len(names) == 1 else ''}))")
        else:
            found.append(f'weights.Mxfp4("{layout.mxfp4}")')
    return tuple(found)


def memory_layout(shared: Shared, entry: models.Moe, at: SpecPath) -> tuple[str, bool]:
    """-> ("out_in" or "in_out", whether gate and up are interleaved): the first stacked layout is memory's."""
    stacked = {}
    for field, layouts in ((first(entry), entry.up or entry.gate_up), ("down", entry.down)):
        for index, layout in enumerate(layouts):
            _check_layout(shared, layout, field, (*at, field, index))
        found = next((layout for layout in layouts if isinstance(layout, models.StackedLayout)), None)
        if found is None and not layouts:
            return "out_in", False
        if found is None:
            message = f"`{field}` lists no stacked layout, which is the one that memory uses"
            shared.problems.add("SPEC022", message, (*at, field), key=True, help="add `{stacked: NAME, axes: […]}`")
            return "out_in", False
        stacked[field] = found
    gate_up = stacked[first(entry)]
    if _orientation(gate_up) != _orientation(stacked["down"]):
        shared.problems.add("SPEC022", f"{first(entry)} and down lie in memory in different orders of axes", (*at, "down", 0))
    return _orientation(gate_up), gate_up.order == "interleaved"


def first(entry: models.Moe) -> str:
    """What an expert's first matrix is: gate and up, or up alone."""
    return "up" if entry.up else "gate_up"


def _check_layout(shared: Shared, layout: object, field: str, path: SpecPath) -> None:
    if isinstance(layout, models.StackedLayout):
        _check_stacked(shared, layout, field, path)
    if isinstance(layout, models.PerExpertLayout):
        _check_per_expert(shared, layout, field, path)

def _check_stacked(shared: Shared, layout: models.StackedLayout, field: str, path: SpecPath) -> None:
    if sorted(layout.axes) != ["expert", "in", "out"] or layout.axes[0] != "expert":
        help = "write [expert, out, in] or [expert, in, out]"
        shared.problems.add("SPEC022", f"axes {layout.axes} cannot be stacked experts", (*path, "axes"), help=help)
    if field == "gate_up" and layout.order not in ("interleaved", ["gate", "up"]):
        help = "write `order: [gate, up]` or `order: interleaved`"
        shared.problems.add("SPEC022", "gate_up does not say how gate and up share the out axis", path, help=help)
    if field != "gate_up" and layout.order is not None:
        shared.problems.add("SPEC010", f"`order` has no effect on {field}", (*path, "order"), key=True, help="remove it")

def _check_per_expert(shared: Shared, layout: models.PerExpertLayout, field: str, path: SpecPath) -> None:
    wanted = 2 if field == "gate_up" else 1
    if len(layout.per_expert) != wanted:
        message = f"{field} takes {wanted} tensor{'s' if wanted > 1 else ''} an expert, found {len(layout.per_expert)}"
        shared.problems.add("SPEC022", message, (*path, "per_expert"))
    for index, name in enumerate(layout.per_expert):
        if name.count("*") != 1:
            help = "write the expert's index as `*`"
            shared.problems.add("SPEC021", f"`{name}` needs one `*`", (*path, "per_expert", index), help=help)


def _orientation(layout: models.StackedLayout) -> str:
    return "out_in" if layout.axes[1:] == ["out", "in"] else "in_out"
