"""Resolves an attention: its fused projection, its norms, rope and cache, and the rows of its weights."""

from __future__ import annotations

from collections.abc import Iterator

from flexgen.ir import architecture as ir
from flexgen.ir.code import Size, number
from flexgen.ir.idle import check_attention
from flexgen.ir.problems import defined
from flexgen.ir.rows import Flag, packed
from flexgen.ir.scope import Want
from flexgen.ir.shared import Shared, bias
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


def build(shared: Shared, name: str, entry: models.Attention, at: SpecPath) -> ir.Attention:
    """The attention of an entry."""
    scope = shared.scope
    _check(shared, name, entry, at)
    heads, kv_heads, width = (scope.code(getattr(entry, f), (*at, f)) for f in ("heads", "kv_heads", "head_dim"))
    has_bias = scope.flag(entry.bias, (*at, "bias"))
    o_bias = has_bias if entry.o_bias is None else scope.flag(entry.o_bias, (*at, "o_bias"))
    splits = _splits(entry, heads, kv_heads)
    role = "".join(split.name for split in splits)
    scale = entry.scale and scope.code(entry.scale, (*at, "scale"), "float")
    projection, out, *rest = _projections(shared, entry, role, splits, heads, width, (has_bias, o_bias))
    rows = [projection, out, *rest, *_norm_rows(shared, entry, heads, kv_heads, width)]
    if entry.sinks != "none":
        rows.append(shared.rows.vector("sinks", heads, entry.sinks, of="heads"))
    whole = entry.qk_norm_over == "projection"
    return ir.Attention(
        name=name,
        function=f"{name}_attention",
        projection=projection.code,
        bias=bias(has_bias, role),
        splits=splits,
        groups=entry.packed == "groups",
        clip=scope.optional(entry.clip, (*at, "clip")),
        packed_gate=isinstance(entry.gate, models.PackedGate),
        gate="w.gate" if isinstance(entry.gate, models.ProjectedGate) else None,
        value_from_key=entry.value == "from_key",
        q_norm=shared.norm(entry.q_norm, (*at, "q_norm"), "w.q_norm", whole),
        k_norm=shared.norm(entry.k_norm, (*at, "k_norm"), "w.k_norm", whole),
        v_norm=shared.norm(entry.v_norm, (*at, "v_norm"), "w.v_norm"),
        norms_first=entry.qk_norm_when == "before_rope",
        rope=_rope(shared, entry.rope, (*at, "rope")),
        rotate=_rotate(shared, entry.rope),
        query_scale=_query_scale(shared, entry, at),
        query_scale_fp32=entry.query_scale is not None and entry.query_scale.compute == "fp32",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        scale=scale or f"{width} ** -0.5",
        window=scope.optional(entry.window, (*at, "window"), "int"),
        chunk=scope.optional(entry.chunk, (*at, "chunk"), "int"),
        alibi=scope.optional(entry.alibi, (*at, "alibi")),
        sinks=None if entry.sinks == "none" else "w.sinks",
        softcap=scope.optional(entry.softcap, (*at, "softcap")),
        softmax_fp32=None if entry.softmax == "fp32" else "False",
        kv_of=None if entry.kv_of == "none" else entry.kv_of,
        o=out.code,
        o_bias=bias(o_bias, "o"),
        table=shared.table(name, rows, at),
        path=show_path(at),
        why=entry.why,
    )


def _splits(entry: models.Attention, heads: Size, kv_heads: Size) -> tuple[ir.Split, ...]:
    """What the fused projection yields, in heads; a gate is as many heads again, each beside its own."""
    splits = [ir.Split("q", number(2) * heads if isinstance(entry.gate, models.PackedGate) else heads)]
    if entry.kv_of == "none":
        splits.append(ir.Split("k", kv_heads))
        if entry.value == "projected":
            splits.append(ir.Split("v", kv_heads))
    return tuple(splits)


def _projections(
    shared: Shared,
    entry: models.Attention,
    role: str,
    splits: tuple[ir.Split, ...],
    heads: Size,
    width: Size,
    biases: tuple[Flag, Flag],
) -> list[ir.Row]:
    """The fused projection, the output projection, and the gate's own."""
    make, (has_bias, o_bias) = shared.rows, biases
    blocks = [split.heads * width for split in splits]
    modules: list[tuple[str, Size | str]] = [(getattr(entry, split.name), rows) for split, rows in zip(splits, blocks, strict=True)]
    if entry.packed != "none":
        groups = splits[-1].heads if entry.packed == "groups" else None
        modules = [(entry.qkv, packed(*blocks, groups=groups))]
    rows = [
        make.linear(role, modules, shared.hidden, out="heads", bias=has_bias),
        make.linear("o", [(entry.o, shared.hidden)], heads * width, into="heads", bias=o_bias),
    ]
    if isinstance(entry.gate, models.ProjectedGate):
        outputs = heads if entry.gate.over == "head" else heads * width
        rows.append(make.linear("gate", [(entry.gate.weight, outputs)], shared.hidden, out="heads"))
    return rows


def _norm_rows(shared: Shared, entry: models.Attention, heads: Size, kv_heads: Size, width: Size) -> Iterator[ir.Row]:
    """The weights of the norms of q, k and v."""
    for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        name, module = getattr(entry, f"{letter}_norm"), getattr(entry, f"{letter}_norm_weight")
        over = "head" if letter == "v" else entry.qk_norm_over
        role = f"{letter}_norm"
        if over == "head_weights" and shared.has_gain(name):
            yield shared.rows.head_norm(role, count, width, module)
        elif over == "projection":
            yield from shared.norm_rows(shared.rows, name, role, count * width, module, of="heads")
        else:
            yield from shared.norm_rows(shared.rows, name, role, width, module)


def _query_scale(shared: Shared, entry: models.Attention, at: SpecPath) -> tuple[Size, ...]:
    if entry.query_scale is None:
        return ()
    wants: dict[str, Want] = {"beta": "float", "length": "int", "offset": "int"}
    return tuple(
        shared.scope.code(getattr(entry.query_scale, field), (*at, "query_scale", field), want) for field, want in wants.items()
    )


def _rotate(shared: Shared, name: str) -> str:
    """The runtime's function for the layout of a rope."""
    rope = shared.model.ropes.get(name)
    return "rotate_pairs" if rope is not None and rope.layout == "pairs" else "rotate"


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


def _unmade(shared: Shared, entry: models.Attention) -> Iterator[tuple[str, str]]:
    """Fields that do not go together, and why."""
    if entry.window != "none" and entry.chunk != "none":
        yield "chunk", "a window inside of chunks"
    parted = entry.kv_of != "none" or entry.value == "from_key" or isinstance(entry.gate, models.PackedGate)
    if parted and entry.packed != "none":
        yield "packed", "q, k and v in one module where one of them is not there, or holds a gate"
    if parted and entry.clip != "none":
        yield "clip", "a clamp of q, k and v where one of them is not there, or holds a gate"
    if entry.qk_norm_over == "head_weights":
        for field in ("q_norm", "k_norm"):
            norm = shared.model.norms.get(getattr(entry, field))
            if norm is not None and (norm.gain == "none" or norm.bias != "false"):
                yield field, "weights of each head for a norm without a gain, or with a bias"


def _check(shared: Shared, name: str, entry: models.Attention, at: SpecPath) -> None:
    check_attention(entry, at, shared.has_gain, shared.problems)
    for field, reason in _unmade(shared, entry):
        shared.problems.add("SPEC025", f"{reason}: that is not implemented", (*at, field), key=True)
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
