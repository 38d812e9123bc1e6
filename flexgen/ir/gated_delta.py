"""Resolves a gated-delta mixer: its sizes, and the rows of its weights."""

from __future__ import annotations

from flexgen.ir import architecture as ir
from flexgen.ir.code import number
from flexgen.ir.shared import Shared
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


def build(shared: Shared, name: str, entry: models.GatedDelta, at: SpecPath) -> ir.GatedDelta:
    """The gated-delta mixer of an entry."""
    make, code = shared.rows, shared.scope.code
    fields = ("key_heads", "key_dim", "value_heads", "value_dim", "kernel")
    key_heads, key_dim, heads, dim, kernel = (code(getattr(entry, field), (*at, field)) for field in fields)
    values = heads * dim
    channels = number(2) * key_heads * key_dim + values
    projections = [(entry.qkv, channels), (entry.z, values), (entry.b, heads), (entry.a, heads)]
    rows = [
        make.linear(f"{name}_in", projections, shared.hidden, out="heads"),
        make.convolution(f"{name}_conv", channels, kernel, entry.conv),
        make.vector(f"{name}_a_log", heads, entry.a_log, of="heads"),
        make.bias(f"{name}_dt_bias", [heads], entry.dt_bias, ["heads"]),
        make.norm(f"{name}_norm", dim, entry.norm),
        make.linear(f"{name}_out", [(entry.out, shared.hidden)], values, into="heads"),
    ]
    return ir.GatedDelta(
        name=name,
        function=f"{name}_mixer",
        key_heads=key_heads,
        key_dim=key_dim,
        value_heads=heads,
        value_dim=dim,
        channels=channels,
        kernel=kernel,
        conv_act=entry.conv_act,
        eps=code(entry.eps, (*at, "eps"), "float"),
        table=shared.table(name, rows, at),
        path=show_path(at),
        why=entry.why,
    )
