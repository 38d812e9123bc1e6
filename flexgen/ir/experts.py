"""Resolves the experts of a spec: the rows of their weights, and how they are called."""

from __future__ import annotations

from flexgen.contract.heads import BEST
from flexgen.ir import architecture as ir
from flexgen.ir.code import number
from flexgen.ir.expert_layouts import first, layout_code, memory_layout
from flexgen.ir.router import route
from flexgen.ir.shared import Shared
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


def build(shared: Shared, name: str, entry: models.Moe, at: SpecPath) -> ir.Moe:
    """The experts of an entry, and the router that chooses among them."""
    scope, router = shared.scope, entry.router
    layout, interleaved = memory_layout(shared, entry, at)
    lines, weights, router_rows = route(shared, name, entry, at)
    rows = [*router_rows, *_rows(shared, name, entry, at, layout)]
    _check_ungated(shared, entry, at)
    return ir.Moe(
        name=name,
        route=f"{name}_route",
        experts=f"{name}_experts",
        routed=f"{name}_routed",
        top_k=scope.code(entry.top_k, (*at, "top_k")),
        route_lines=lines,
        weights=weights,
        reads_stream=router.reads == "stream",
        act=f'"{entry.act}"',
        layout=f'"{layout}"',
        interleaved="True" if interleaved else None,
        gated="False" if entry.up else None,
        weights_on='"input"' if entry.weights_on == "input" else None,
        gate_up=f"w.{name}_{first(entry)}",
        gate_up_bias=None if entry.gate_up_bias == "none" else f"w.{name}_{first(entry)}_bias",
        down=f"w.{name}_down",
        down_bias=None if entry.down_bias == "none" else f"w.{name}_down_bias",
        alpha=scope.optional(entry.alpha, (*at, "alpha")),
        limit=scope.optional(entry.limit, (*at, "limit")),
        up_offset=None if entry.up_offset == "0" else scope.code(entry.up_offset, (*at, "up_offset"), "float"),
        grouping=_grouping(shared, entry, at),
        table=shared.table(name, rows, at),
        path=show_path(at),
        why=entry.why,
        router_why=router.why,
    )


def _grouping(shared: Shared, entry: models.Moe, at: SpecPath) -> ir.Grouping | None:
    """What a config must hold for experts in groups."""
    groups = entry.router.groups
    if not isinstance(groups, models.RouterGroups):
        return None
    here = (*at, "router", "groups")
    own = [shared.scope.code(text, path).own for text, path in (
        (entry.experts, (*at, "experts")), (groups.count, (*here, "count")), (groups.keep, (*here, "keep")), (entry.top_k, (*at, "top_k")),
    )]  # fmt: skip
    return ir.Grouping(show_path(at), own[0], own[1], own[2], BEST[groups.rank], own[3])


def _check_ungated(shared: Shared, entry: models.Moe, at: SpecPath) -> None:
    """Report experts with a gate and without one, and what only a gate has."""
    if entry.up and "gate_up" in entry.model_fields_set:
        help = "give `gate_up`, or `up` where experts have no gate"
        shared.problems.add("SPEC005", "experts have both `gate_up` and `up`", at, key=True, help=help)
    for field, default in (("alpha", "none"), ("limit", "none"), ("up_offset", "0")) if entry.up else ():
        if getattr(entry, field) != default:
            message = f"`{field}` has no effect: experts have no gate"
            shared.problems.add("SPEC010", message, (*at, field), key=True, help="remove it")


def _rows(shared: Shared, name: str, entry: models.Moe, at: SpecPath, layout: str) -> list[ir.Row]:
    """The weights of all experts, in the order that `layout` has in memory."""
    make, hidden = shared.rows, shared.hidden
    count = shared.scope.code(entry.experts, (*at, "experts"))
    size = shared.scope.code(entry.size, (*at, "size"))
    wide = size if entry.up else number(2) * size
    swap = layout == "in_out"
    gate_up, down = (layout_code(layouts, layout) for layouts in (entry.up or entry.gate_up, entry.down))
    rows = [make.experts(f"{name}_{first(entry)}", count, ("inner", wide), ("", hidden), gate_up, swap)]
    if entry.gate_up_bias != "none":
        rows.append(make.bias(f"{name}_{first(entry)}_bias", [count, wide], entry.gate_up_bias, ["experts", "inner"]))
    rows.append(make.experts(f"{name}_down", count, ("", hidden), ("inner", size), down, swap))
    if entry.down_bias != "none":
        rows.append(make.bias(f"{name}_down_bias", [count, hidden], entry.down_bias, ["experts", ""]))
    return rows
