"""Resolves an attention: its fused projection, its norms, rope and cache, and the rows of its weights."""

from __future__ import annotations

from flexgen.ir import architecture as ir
from flexgen.ir.code import Size, number
from flexgen.ir.idle import check_attention
from flexgen.ir.problems import defined
from flexgen.ir.rows import Flag
from flexgen.ir.shared import Shared, bias
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


def build(shared: Shared, name: str, entry: models.Attention, at: SpecPath) -> ir.Attention:
    """The attention of an entry."""
    scope = shared.scope
    _check(shared, name, entry, at)
    heads, kv_heads, width = (scope.code(getattr(entry, f), (*at, f)) for f in ("heads", "kv_heads", "head_dim"))
    has_bias = scope.flag(entry.bias, (*at, "bias"))
    splits = _splits(entry, heads, kv_heads)
    role = "".join(split.name for split in splits)
    scale = entry.scale and scope.code(entry.scale, (*at, "scale"), "float")
    return ir.Attention(
        name=name,
        function=f"{name}_attention",
        projection=f"w.{role}",
        bias=bias(has_bias, role),
        splits=splits,
        packed_gate=entry.gate != "none",
        value_from_key=entry.value == "from_key",
        q_norm=shared.norm(entry.q_norm, (*at, "q_norm"), "w.q_norm"),
        k_norm=shared.norm(entry.k_norm, (*at, "k_norm"), "w.k_norm"),
        v_norm=shared.norm(entry.v_norm, (*at, "v_norm"), "w.v_norm"),
        rope=_rope(shared, entry.rope, (*at, "rope")),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        scale=scale or f"{width} ** -0.5",
        window=scope.optional(entry.window, (*at, "window"), "int"),
        sinks=None if entry.sinks == "none" else "w.sinks",
        softcap=scope.optional(entry.softcap, (*at, "softcap")),
        softmax_fp32=None if entry.softmax == "fp32" else "False",
        kv_of=None if entry.kv_of == "none" else entry.kv_of,
        o_bias=bias(has_bias, "o"),
        table=shared.table(name, _rows(shared, entry, role, splits, heads, width, has_bias), at),
        path=show_path(at),
        why=entry.why,
    )


def _splits(entry: models.Attention, heads: Size, kv_heads: Size) -> tuple[ir.Split, ...]:
    """What the fused projection yields, in heads; a gate is as many heads again, each beside its own."""
    splits = [ir.Split("q", number(2) * heads if entry.gate != "none" else heads)]
    if entry.kv_of == "none":
        splits.append(ir.Split("k", kv_heads))
        if entry.value == "projected":
            splits.append(ir.Split("v", kv_heads))
    return tuple(splits)


def _rows(
    shared: Shared,
    entry: models.Attention,
    role: str,
    splits: tuple[ir.Split, ...],
    heads: Size,
    width: Size,
    has_bias: Flag,
) -> list[ir.Row]:
    """The fused projection, the output projection, gains of norms, sinks."""
    make = shared.rows
    modules = [(getattr(entry, split.name), split.heads * width) for split in splits]
    rows = [
        make.linear(role, modules, shared.hidden, out="heads", bias=has_bias),
        make.linear("o", [(entry.o, shared.hidden)], heads * width, into="heads", bias=has_bias),
    ]
    for letter in "qkv":
        if shared.has_gain(getattr(entry, f"{letter}_norm")):
            rows.append(make.norm(f"{letter}_norm", width, getattr(entry, f"{letter}_norm_weight")))
    if entry.sinks != "none":
        rows.append(make.vector("sinks", heads, entry.sinks, of="heads"))
    return rows


def _rope(shared: Shared, name: str, path: SpecPath) -> str | None:
    if name == "none":
        return None
    if name not in shared.model.ropes:
        shared.problems.unknown("rope", name, defined("ropes", shared.model.ropes), path)
        return None
    shared.used.add(("ropes", name))
    return rope_field(name)


def rope_field(name: str) -> str:
    """What `Dims` calls a rope."""
    return name if name == "rope" else f"{name}_rope"


def _check(shared: Shared, name: str, entry: models.Attention, at: SpecPath) -> None:
    check_attention(entry, at, shared.has_gain, shared.problems)
    if entry.kv_of == "none":
        return
    owner = shared.model.attention.get(entry.kv_of)
    if owner is None:
        known = defined("attention", shared.model.attention)
        shared.problems.unknown("attention", entry.kv_of, known, (*at, "kv_of"))
        return
    if owner.kv_of != "none" or entry.kv_of == name:
        message = f"`{entry.kv_of}` keeps no keys and values of its own"
        shared.problems.add("SPEC008", message, (*at, "kv_of"), help="name an attention that has none of `kv_of`")
    for field in ("kv_heads", "head_dim", "window"):
        if getattr(owner, field) != getattr(entry, field):
            message = f"`{name}` reads the keys and values of `{entry.kv_of}`, whose `{field}` differs"
            note = ("the owner is here", ("attention", entry.kv_of))
            shared.problems.add("SPEC017", message, (*at, field), note=note)
