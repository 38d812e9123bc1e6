"""Resolves the experts of a spec: the rows of their weights, and how they are called."""

from __future__ import annotations

from flexgen.ir import architecture as ir
from flexgen.ir.code import number
from flexgen.ir.expert_layouts import layout_code, memory_layout
from flexgen.ir.router import router_input
from flexgen.ir.rows import Flag
from flexgen.ir.shared import Shared, bias
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


def build(shared: Shared, name: str, entry: models.Moe, at: SpecPath) -> ir.Moe:
    """The experts of an entry, and the router that chooses among them."""
    scope, router, here = shared.scope, entry.router, (*at, "router")
    layout, interleaved = memory_layout(shared, entry, at)
    has_bias = scope.flag(router.bias, (*here, "bias"))
    normalise = scope.flag(router.normalise, (*here, "normalise"))
    statements, input_rows = router_input(shared, name, router, here)
    rows = [*input_rows, *_rows(shared, name, entry, at, layout, has_bias)]
    if router.score == "none" and router.after_top_k == "none":
        message = "the router turns its logits into weights nowhere"
        shared.problems.add("SPEC005", message, here, key=True, help="set `score` or `after_top_k`")
    return ir.Moe(
        name=name,
        route=f"{name}_route",
        experts=f"{name}_experts",
        routed=f"{name}_routed",
        top_k=scope.code(entry.top_k, (*at, "top_k")),
        router_input=statements,
        router=f"w.{name}_router",
        router_bias=bias(has_bias, f"{name}_router"),
        reads_stream=router.reads == "stream",
        score=router.score,
        after_top_k=router.after_top_k,
        normalise=None if normalise is False else str(normalise),
        gain=None if router.gain == "none" else f"w.{name}_expert_gain",
        weights_fp32=router.dtype == "fp32",
        act=f'"{entry.act}"',
        layout=f'"{layout}"',
        interleaved="True" if interleaved else None,
        gate_up=f"w.{name}_gate_up",
        gate_up_bias=None if entry.gate_up_bias == "none" else f"w.{name}_gate_up_bias",
        down=f"w.{name}_down",
        down_bias=None if entry.down_bias == "none" else f"w.{name}_down_bias",
        alpha=scope.optional(entry.alpha, (*at, "alpha")),
        limit=scope.optional(entry.limit, (*at, "limit")),
        up_offset=None if entry.up_offset == "0" else scope.code(entry.up_offset, (*at, "up_offset"), "float"),
        table=shared.table(name, rows, at),
        path=show_path(at),
        why=entry.why,
        router_why=router.why,
    )


def _rows(shared: Shared, name: str, entry: models.Moe, at: SpecPath, layout: str, has_bias: Flag) -> list[ir.Row]:
    """The weights of the router and of all experts, in the order that `layout` has in memory."""
    make, hidden, router = shared.rows, shared.hidden, entry.router
    count = shared.scope.code(entry.experts, (*at, "experts"))
    size = shared.scope.code(entry.size, (*at, "size"))
    wide = number(2) * size
    swap = layout == "in_out"
    scores = [(router.weight, count)]
    top_k = shared.scope.code(entry.top_k, (*at, "top_k"))
    rows = [make.router(f"{name}_router", scores, hidden, f"{name}_routed", top_k, bias=has_bias)]
    if router.gain != "none":
        rows.append(make.vector(f"{name}_expert_gain", count, router.gain, of="experts"))
    gate_up, down = (layout_code(layouts, layout) for layouts in (entry.gate_up, entry.down))
    rows.append(make.experts(f"{name}_gate_up", count, ("inner", wide), ("", hidden), gate_up, swap))
    if entry.gate_up_bias != "none":
        rows.append(make.bias(f"{name}_gate_up_bias", [count, wide], entry.gate_up_bias, ["experts", "inner"]))
    rows.append(make.experts(f"{name}_down", count, ("", hidden), ("inner", size), down, swap))
    if entry.down_bias != "none":
        rows.append(make.bias(f"{name}_down_bias", [count, hidden], entry.down_bias, ["experts", ""]))
    return rows
