"""Resolves an attention: its fused projection, its norms, rope and cache, and the rows of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
    value_dim = None if entry.value_dim is None else scope.code(entry.value_dim, (*at, "value_dim"))
    biases = _biases(shared, entry, at)
    splits = _splits(entry, heads, kv_heads)
    widths = [value_dim if split.name == "v" and value_dim else width for split in splits]
    is_fused = not value_dim and len({biases[split.name] for split in splits}) == 1
    role = "".join(split.name for split in splits)
    scale = entry.scale and scope.code(entry.scale, (*at, "scale"), "float")
    make = _fused if is_fused else _apart
    projections = make(shared, entry, splits, widths, biases)
    out, *rest = _outputs(shared, entry, heads, value_dim or width, biases["o"])
    rows = [*projections, out, *rest, *_norm_rows(shared, entry, heads, kv_heads, width, value_dim or width)]
    if entry.sinks != "none":
        rows.append(shared.rows.vector("sinks", heads, entry.sinks, of="heads"))
    whole = entry.qk_norm_over == "projection"
    return ir.Attention(
        name=name,
        function=f"{name}_attention",
        projection=projections[0].code if is_fused else None,
        bias=bias(biases["q"], role) if is_fused else None,
        splits=splits if is_fused else (),
        apart=() if is_fused else tuple(
            ir.Projection(split.variable, row.code, bias(biases[split.name], split.name), width)
            for split, row, width in zip(splits, projections, widths, strict=True)
        ),
        groups=entry.packed == "groups",
        clip=scope.optional(entry.clip, (*at, "clip")),
        clip_last=entry.clip_when == "after_norms",
        packed_gate=isinstance(entry.gate, models.PackedGate),
        gate="w.gate" if isinstance(entry.gate, models.ProjectedGate) else None,
        gate_act=entry.gate.act if isinstance(entry.gate, models.ProjectedGate) else None,
        value_from_key=entry.value == "from_key",
        value_scale=None if entry.value_scale == "1" else scope.code(entry.value_scale, (*at, "value_scale"), "float"),
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
        value_dim=value_dim,
        scale=scale or f"{width} ** -0.5",
        window=scope.optional(entry.window, (*at, "window"), "int"),
        chunk=scope.optional(entry.chunk, (*at, "chunk"), "int"),
        alibi=scope.optional(entry.alibi, (*at, "alibi")),
        sinks=None if entry.sinks == "none" else "w.sinks",
        softcap=scope.optional(entry.softcap, (*at, "softcap")),
        softmax_fp32=None if entry.softmax == "fp32" else "False",
        kv_of=None if entry.kv_of == "none" else entry.kv_of,
        o=out.code,
        o_bias=bias(biases["o"], "o"),
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


def _biases(shared: Shared, entry: models.Attention, at: SpecPath) -> dict[str, Flag]:
    """Whether q, k, v and o have a bias."""
    own = {letter: getattr(entry, f"{letter}_bias") for letter in "qkvo"}
    both = shared.scope.flag(entry.bias, (*at, "bias"))
    return {letter: both if text is None else shared.scope.flag(text, (*at, f"{letter}_bias")) for letter, text in own.items()}


def _fused(
    shared: Shared, entry: models.Attention, splits: Sequence[ir.Split], widths: Sequence[Size], biases: Mapping[str, Flag]
) -> list[ir.Row]:
    """q, k and v as one projection: of modules end to end, or of one module that packs them."""
    blocks = [split.heads * width for split, width in zip(splits, widths, strict=True)]
    modules: list[tuple[str, Size | str]] = [(getattr(entry, split.name), rows) for split, rows in zip(splits, blocks, strict=True)]
    if entry.packed != "none":
        groups = splits[-1].heads if entry.packed == "groups" else None
        modules = [(entry.qkv, packed(*blocks, groups=groups))]
    role = "".join(split.name for split in splits)
    return [shared.rows.linear(role, modules, shared.hidden, out="heads", bias=biases["q"])]


def _apart(
    shared: Shared, entry: models.Attention, splits: Sequence[ir.Split], widths: Sequence[Size], biases: Mapping[str, Flag]
) -> list[ir.Row]:
    """q, k and v as projections of their own: another width, or a bias that only some have."""
    return [
        shared.rows.linear(
            split.name, [(getattr(entry, split.name), split.heads * width)], shared.hidden, out="heads", bias=biases[split.name]
        )
        for split, width in zip(splits, widths, strict=True)
    ]


def _outputs(shared: Shared, entry: models.Attention, heads: Size, width: Size, o_bias: Flag) -> list[ir.Row]:
    """The output projection, and the gate's own."""
    rows = [shared.rows.linear("o", [(entry.o, shared.hidden)], heads * width, into="heads", bias=o_bias)]
    if isinstance(entry.gate, models.ProjectedGate):
        outputs = heads if entry.gate.over == "head" else heads * width
        rows.append(shared.rows.linear("gate", [(entry.gate.weight, outputs)], shared.hidden, out="heads"))
    return rows


def _norm_rows(
    shared: Shared, entry: models.Attention, heads: Size, kv_heads: Size, key_width: Size, value_width: Size
) -> Iterator[ir.Row]:
    """The weights of the norms of q, k and v."""
    for letter, count, width in (("q", heads, key_width), ("k", kv_heads, key_width), ("v", kv_heads, value_width)):
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
    if entry.packed != "none":
        for letter in "qkv":
            if getattr(entry, f"{letter}_bias") is not None:
                yield f"{letter}_bias", "a bias that part of a packed module has"
        if entry.value_dim is not None:
            yield "value_dim", "values of another width in a packed module"
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
    for field in ("kv_heads", "head_dim", "value_dim", "window"):
        if getattr(owner, field) != getattr(entry, field):
            message = f"`{name}` reads the keys and values of `{entry.kv_of}`, whose `{field}` differs"
            note = ("the owner is here", ("attention", entry.kv_of))
            shared.problems.add("SPEC017", message, (*at, field), note=note)
