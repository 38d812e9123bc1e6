"""The lines between what a router reads and its scores. `flexgen.ir.experts` calls it."""

from __future__ import annotations

from typing import Any

from flexgen.ir import architecture as ir
from flexgen.ir.shared import Shared, norm_why
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


def router_input(
    shared: Shared, name: str, router: models.Router, here: SpecPath
) -> tuple[tuple[ir.Statement, ...], list[ir.Row]]:
    """The lines between what the router reads and its scores, and the weights that they use."""
    statements: list[ir.Statement] = []
    rows: list[ir.Row] = []
    for index, step in enumerate(router.input):
        path = (*here, "input", index)
        fields: dict[str, Any] = {"comment": getattr(step, "why", None)}
        if isinstance(step, models.NormStep):
            op, norm = "norm", _input_norm(shared, step, path)
            fields = {"norm": norm, "comment": norm_why(step, norm)}
        elif isinstance(step, models.GainStep):
            op, role = "gain", f"{name}_input_gain"
            size = shared.hidden if step.size is None else shared.scope.code(step.size, (*path, "size"))
            rows.append(shared.rows.vector(role, size, step.gain))
            fields["weight"] = f"w.{role}"
        elif isinstance(step, models.ScaleStep):
            op = "scale"
            fields["value"] = shared.scope.code(step.scale, (*path, "scale"), "float")
        else:
            help = "a router's input takes norm, gain and scale"
            shared.problems.add("SPEC025", "this step is not implemented in a router's input", path, help=help)
            continue
        source = "h_TD" if index else "x_TD"
        statements.append(ir.Statement(op, "h_TD", source, show_path(path), **fields))
    return tuple(statements), rows

def _input_norm(shared: Shared, step: models.NormStep, path: SpecPath) -> ir.NormCall | None:
    if shared.has_gain(step.norm):
        message = "a norm with a gain is not implemented as a router's input"
        help = "name a norm with `gain: none` and add a `gain` step"
        shared.problems.add("SPEC025", message, path, help=help)
    elif step.weight is not None:
        message = f"the norm `{step.norm}` has no gain to use this weight"
        help = "remove it, or name a norm with a gain"
        shared.problems.add("SPEC018", message, (*path, "weight"), help=help)
    return shared.norm(step.norm, (*path, "norm"), "None")
