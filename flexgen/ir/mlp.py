"""Resolves an MLP: its projections, and the rows of its weights."""

from __future__ import annotations

from flexgen.ir import architecture as ir
from flexgen.ir.code import number
from flexgen.ir.shared import Shared, bias
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


def build(shared: Shared, name: str, entry: models.Mlp, at: SpecPath) -> ir.Mlp:
    """The MLP of an entry."""
    make = shared.rows
    size = shared.scope.code(entry.size, (*at, "size"))
    has_bias = shared.scope.flag(entry.bias, (*at, "bias"))
    gate, up, down = (f"{entry.at}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
    rows = [
        make.linear(f"{name}_gate_up", [(gate, size), (up, size)], shared.hidden, out="inner", bias=has_bias),
        make.linear(f"{name}_down", [(down, shared.hidden)], size, into="inner", bias=has_bias),
    ]
    if entry.out_gate != "none":
        rows.append(make.linear(f"{name}_out_gate", [(entry.out_gate, number(1))], shared.hidden))
    return ir.Mlp(
        name=name,
        function=name,
        act=entry.act,
        gate_up=f"w.{name}_gate_up",
        gate_up_bias=bias(has_bias, f"{name}_gate_up"),
        down=f"w.{name}_down",
        down_bias=bias(has_bias, f"{name}_down"),
        out_gate=None if entry.out_gate == "none" else f"w.{name}_out_gate",
        table=shared.table(name, rows, at),
        path=show_path(at),
        why=entry.why,
    )
