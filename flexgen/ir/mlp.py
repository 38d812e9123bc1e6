"""Resolves an MLP: its projections, and the rows of its weights."""

from __future__ import annotations

from flexgen.ir import architecture as ir
from flexgen.ir.code import number
from flexgen.ir.idle import check_mlp
from flexgen.ir.rows import Modules, packed
from flexgen.ir.shared import Shared, bias
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path

XIELU = (("alpha_p", True), ("alpha_n", True), ("beta", False), ("eps", False))
"""The weights of the activation, and whether each has a dim."""


def build(shared: Shared, name: str, entry: models.Mlp, at: SpecPath) -> ir.Mlp:
    """The MLP of an entry."""
    check_mlp(entry, at, shared.has_gain, shared.problems)
    make, scope = shared.rows, shared.scope
    size = scope.code(entry.size, (*at, "size"))
    has_bias = scope.flag(entry.bias, (*at, "bias"))
    down_bias = has_bias if entry.down_bias is None else scope.flag(entry.down_bias, (*at, "down_bias"))
    role = f"{name}_gate_up" if entry.gated else f"{name}_up"
    into = make.linear(role, _modules(shared, entry, at), shared.hidden, out="inner", bias=has_bias)
    down = make.linear(f"{name}_down", [(module_of(entry, entry.down), shared.hidden)], size, into="inner", bias=down_bias)
    rows = [into, down]
    if entry.out_gate != "none":
        rows.append(make.linear(f"{name}_out_gate", [(entry.out_gate, number(1))], shared.hidden))
    weights: tuple[str, ...] = ()
    if entry.act == "xielu":
        for weight, has_dim in XIELU:
            own, tensor = f"{name}_{weight}", f"{module_of(entry, 'act_fn')}.{weight}"
            rows.append(make.vector(own, number(1), tensor) if has_dim else make.scalar(own, tensor))
        weights = tuple(f"w.{name}_{weight}" for weight, _ in XIELU)
    inner = f"{name}_inner_norm"
    rows += shared.norm_rows(make, entry.inner_norm, inner, size, entry.inner_norm_weight, of="inner")
    return ir.Mlp(
        name=name,
        function=name,
        act=entry.act,
        acted=_acted(shared, entry, at),
        act_weights=weights,
        gated=entry.gated,
        gate_up=into.code,
        gate_up_bias=bias(has_bias, role),
        inner_norm=shared.norm(entry.inner_norm, (*at, "inner_norm"), f"w.{inner}"),
        down=down.code,
        down_bias=bias(down_bias, f"{name}_down"),
        out_gate=None if entry.out_gate == "none" else f"w.{name}_out_gate",
        arguments=("dims",) if entry.inner_norm != "none" or entry.gate_scale != "1" else (),
        table=shared.table(name, rows, at),
        path=show_path(at),
        why=entry.why,
    )


def module_of(entry: models.Mlp, name: str) -> str:
    """The full name of a module of an MLP."""
    return name if entry.at == "none" else f"{entry.at}.{name}"


def _modules(shared: Shared, entry: models.Mlp, at: SpecPath) -> Modules:
    """The modules before the activation, each with its rows."""
    size = shared.scope.code(entry.size, (*at, "size"))
    if entry.gate_up != "none":
        return [(module_of(entry, entry.gate_up), packed(size, size))]
    names = (entry.gate, entry.up) if entry.gated else (entry.up,)
    return [(module_of(entry, name), size) for name in names]


def _acted(shared: Shared, entry: models.Mlp, at: SpecPath) -> str:
    """What the activation takes, as code."""
    gate = "gate_TI" if entry.gated else "up_TI"
    if entry.gate_scale == "1":
        return gate
    return f"{gate} * ({shared.scope.code(entry.gate_scale, (*at, 'gate_scale'), 'float')})"
