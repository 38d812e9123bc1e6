"""Resolves the experts of a spec: their router, their weights, and the layouts that a checkpoint may have them in."""

from __future__ import annotations

from typing import Any

from flexgen.ir import architecture as ir
from flexgen.ir.shared import Shared, double, norm_why
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


class Experts:
    """Builds the IR of experts."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.scope = shared.scope
        self.problems = shared.problems

    def build(self, name: str, entry: models.Moe, at: SpecPath) -> ir.Moe:
        """The experts of an entry, and the router that chooses among them."""
        code, optional = self.scope.code, self.scope.optional
        router, here = entry.router, (*at, "router")
        layout, interleaved = self._memory_layout(entry, at)
        bias = self.scope.flag(router.bias, (*here, "bias"), prefix="d")
        normalise = self.scope.flag(router.normalise, (*here, "normalise"))
        statements, input_rows = self._router_input(name, router, here)
        rows = [*input_rows, *self._rows(name, entry, at, layout, bias)]
        if router.score == "none" and router.after_top_k == "none":
            message = "the router turns its logits into weights nowhere"
            self.problems.add("SPEC005", message, here, key=True, help="set `score` or `after_top_k`")
        return ir.Moe(
            name=name,
            route=f"{name}_route",
            experts=f"{name}_experts",
            routed=f"{name}_routed",
            top_k=code(entry.top_k, (*at, "top_k")),
            router_input=statements,
            router=f"w.{name}_router",
            router_bias=self.shared.bias(bias, f"w.{name}_router_bias"),
            reads_stream=router.reads == "stream",
            score=router.score,
            after_top_k=router.after_top_k,
            normalise=None if normalise is False else str(normalise),
            gain=None if router.gain == "none" else f"w.{name}_expert_gain",
            weights_fp32=router.dtype == "fp32",
            act=entry.act,
            layout=layout,
            interleaved=interleaved,
            gate_up=f"w.{name}_gate_up",
            gate_up_bias="None" if entry.gate_up_bias == "none" else f"w.{name}_gate_up_bias",
            down=f"w.{name}_down",
            down_bias="None" if entry.down_bias == "none" else f"w.{name}_down_bias",
            alpha=optional(entry.alpha, (*at, "alpha")),
            limit=optional(entry.limit, (*at, "limit")),
            up_offset=None if entry.up_offset == "0" else code(entry.up_offset, (*at, "up_offset"), "float"),
            table=self.shared.table(name, rows, at),
            path=show_path(at),
            why=entry.why,
            router_why=router.why,
        )

    def _router_input(
        self, name: str, router: models.Router, here: SpecPath
    ) -> tuple[tuple[ir.Statement, ...], list[ir.Row]]:
        """The lines between what the router reads and its scores, and the weights that they use."""
        statements: list[ir.Statement] = []
        rows: list[ir.Row] = []
        for index, step in enumerate(router.input):
            path = (*here, "input", index)
            fields: dict[str, Any] = {"comment": getattr(step, "why", None)}
            if isinstance(step, models.NormStep):
                op, norm = "norm", self._input_norm(step, path)
                fields = {"norm": norm, "comment": norm_why(step, norm)}
            elif isinstance(step, models.GainStep):
                op, role = "gain", f"{name}_input_gain"
                size = "d.hidden" if step.size is None else self.scope.code(step.size, (*path, "size"), prefix="d")
                rows.append(ir.Row(role, (size,), ((self.shared.layers + step.gain, size),)))
                fields["weight"] = f"w.{role}"
            elif isinstance(step, models.ScaleStep):
                op = "scale"
                fields["value"] = self.scope.code(step.scale, (*path, "scale"), "float")
            else:
                help = "a router's input takes norm, gain and scale"
                self.problems.add("SPEC025", "this step is not implemented in a router's input", path, help=help)
                continue
            source = "h_TD" if index else "x_TD"
            statements.append(ir.Statement(op, "h_TD", source, show_path(path), **fields))
        return tuple(statements), rows

    def _input_norm(self, step: models.NormStep, path: SpecPath) -> ir.NormCall | None:
        if self.shared.has_gain(step.norm):
            message = "a norm with a gain is not implemented as a router's input"
            help = "name a norm with `gain: none` and add a `gain` step"
            self.problems.add("SPEC025", message, path, help=help)
        elif step.weight is not None:
            message = f"the norm `{step.norm}` has no gain to use this weight"
            help = "remove it, or name a norm with a gain"
            self.problems.add("SPEC018", message, (*path, "weight"), help=help)
        return self.shared.norm(step.norm, (*path, "norm"), "None")

    def _rows(
        self, name: str, entry: models.Moe, at: SpecPath, layout: str, router_bias: bool | str
    ) -> list[ir.Row]:
        """The weights of the router and of all experts, in the order that `layout` has in memory."""
        module, layers = self.shared.module, self.shared.layers
        experts = self.scope.code(entry.experts, (*at, "experts"), prefix="d")
        size = self.scope.code(entry.size, (*at, "size"), prefix="d")
        router = entry.router
        wide = double(size)
        gate_up, down = ((wide, "d.hidden"), ("d.hidden", size))
        if layout == "in_out":
            gate_up, down = gate_up[::-1], down[::-1]

        def row(role: str, shape: tuple[str, ...], tensor: str) -> ir.Row:
            return ir.Row(f"{name}_{role}", (experts, *shape), ((tensor, experts),))

        rows = [row("router", ("d.hidden",), module(router.weight))]
        rows += self.shared.bias_row(router_bias, f"{name}_router_bias", [(module(router.weight, "bias"), experts)])
        if router.gain != "none":
            rows.append(row("expert_gain", (), layers + router.gain))
        rows.append(ir.Row(f"{name}_gate_up", (experts, *gate_up), layouts=self._layouts(entry.gate_up, layout)))
        if entry.gate_up_bias != "none":
            rows.append(row("gate_up_bias", (wide,), layers + entry.gate_up_bias))
        rows.append(ir.Row(f"{name}_down", (experts, *down), layouts=self._layouts(entry.down, layout)))
        if entry.down_bias != "none":
            rows.append(row("down_bias", ("d.hidden",), layers + entry.down_bias))
        return rows

    def _layouts(self, layouts: list, memory: str) -> tuple[str, ...]:
        """Code for each layout that a file may have; one whose axes lie otherwise than in `memory` is transposed."""
        found = []
        for layout in layouts:
            if isinstance(layout, models.StackedLayout):
                transpose = ", transpose=True" if _orientation(layout) != memory else ""
                found.append(f'Stacked("{self.shared.layers}{layout.stacked}"{transpose})')
            elif isinstance(layout, models.PerExpertLayout):
                names = [f'"{self.shared.layers}{name}"' for name in layout.per_expert]
                found.append(f"PerExpert(({', '.join(names)}{',' if len(names) == 1 else ''}))")
            else:
                found.append(f'Mxfp4("{self.shared.layers}{layout.mxfp4}")')
        return tuple(found)

    def _memory_layout(self, entry: models.Moe, at: SpecPath) -> tuple[str, bool]:
        """-> ("out_in" or "in_out", whether gate and up are interleaved): the first stacked layout is memory's."""
        stacked = {}
        for field, layouts in (("gate_up", entry.gate_up), ("down", entry.down)):
            for index, layout in enumerate(layouts):
                self._check_layout(layout, field, (*at, field, index))
            first = next((layout for layout in layouts if isinstance(layout, models.StackedLayout)), None)
            if first is None:
                message = f"`{field}` lists no stacked layout, which is the one that memory uses"
                self.problems.add("SPEC022", message, (*at, field), key=True, help="add `{stacked: NAME, axes: […]}`")
                return "out_in", False
            stacked[field] = first
        if _orientation(stacked["gate_up"]) != _orientation(stacked["down"]):
            self.problems.add("SPEC022", "gate_up and down lie in memory in different orders of axes", (*at, "down", 0))
        return _orientation(stacked["gate_up"]), stacked["gate_up"].order == "interleaved"

    def _check_layout(self, layout: object, field: str, path: SpecPath) -> None:
        if isinstance(layout, models.StackedLayout):
            self._check_stacked(layout, field, path)
        if isinstance(layout, models.PerExpertLayout):
            self._check_per_expert(layout, field, path)

    def _check_stacked(self, layout: models.StackedLayout, field: str, path: SpecPath) -> None:
        if sorted(layout.axes) != ["expert", "in", "out"] or layout.axes[0] != "expert":
            help = "write [expert, out, in] or [expert, in, out]"
            self.problems.add("SPEC022", f"axes {layout.axes} cannot be stacked experts", (*path, "axes"), help=help)
        if field == "gate_up" and layout.order not in ("interleaved", ["gate", "up"]):
            help = "write `order: [gate, up]` or `order: interleaved`"
            self.problems.add("SPEC022", "gate_up does not say how gate and up share the out axis", path, help=help)
        if field == "down" and layout.order is not None:
            self.problems.add("SPEC010", "`order` has no effect on down", (*path, "order"), key=True, help="remove it")

    def _check_per_expert(self, layout: models.PerExpertLayout, field: str, path: SpecPath) -> None:
        wanted = 2 if field == "gate_up" else 1
        if len(layout.per_expert) != wanted:
            message = f"{field} takes {wanted} tensor{'s' if wanted > 1 else ''} an expert, found {len(layout.per_expert)}"
            self.problems.add("SPEC022", message, (*path, "per_expert"))
        for index, name in enumerate(layout.per_expert):
            if name.count("*") != 1:
                help = "write the expert's index as `*`"
                self.problems.add("SPEC021", f"`{name}` needs one `*`", (*path, "per_expert", index), help=help)


def _orientation(layout: models.StackedLayout) -> str:
    return "out_in" if layout.axes[1:] == ["out", "in"] else "in_out"
