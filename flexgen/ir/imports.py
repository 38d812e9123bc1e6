"""The import lines of a package's modules: what their code uses, and nothing else. `resolve` settles them; rendering proves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flexgen.ir import architecture as ir

_WIDTH = 120
_TYPING = ["from typing import TYPE_CHECKING", ""]


def imports(arch: ir.Architecture) -> ir.Imports:
    """The lines of each module, an empty one between groups."""
    return ir.Imports(walker=_walker(arch), attention=_attention(arch), merge=_merge(arch))


def _walker(arch: ir.Architecture) -> tuple[str, ...]:
    statements = list(_statements(arch))
    activations = {*(s.act for s in statements if s.op == "act"), *(mlp.act for mlp in arch.mlps)}
    routing = " ".join(str(line.value) for m in arch.moes for line in m.route_lines)
    uses_torch = "torch." in routing
    own = {name for name in ("gelu_new", "quick_gelu", "relu2", "xielu") if name in activations}
    uses_torch = uses_torch or "sigmoid" in activations or any(mlp.out_gate for mlp in arch.mlps)
    uses_functional = activations & {"silu", "gelu", "gelu_tanh", "relu"} or any(s.op == "positions" for s in statements)
    norms = {s.norm.function for s in statements if s.norm} | {arch.head.norm.function}
    norms |= {mlp.inner_norm.function for mlp in arch.mlps if mlp.inner_norm}
    ops = {"embed", "project"} | own | norms | ({"softcap"} if arch.head.softcap else set())
    ops |= {"rounded"} if any(str(s.value or "").startswith("rounded(") for s in statements) else set()
    ops |= {"softcap"} if "softcap(" in routing else set()
    routed = {"experts"} | {name for name in ("top_k", "renormalise", "keep_groups", "sparsemixer") if f"{name}(" in routing}
    checks = [name for name, of in (("check_groups", arch.groupings), ("check_heads", arch.divisions), ("check_widths", arch.widths)) if of]
    mixers = [name for part in _mixers(arch) for name in (part.function, part.table.function)]
    return (
        *(["import math"] if any("math." in code for code in _codes(arch, statements)) else []),
        "from collections.abc import Callable",
        "",
        *(["import torch"] if uses_torch else []),
        *(["import torch.nn.functional as F"] if uses_functional else []),
        "from torch import Tensor",
        "",
        "from flexgen.contract import layer_kinds as schedule, weights",
        "from flexgen.contract.abi import Layer, Step",
        *([_from("flexgen.contract.heads", checks)] if checks else []),
        "from flexgen.contract.numbers import Numbers",
        "from flexgen.runtime.loading.config import Config",
        _from("flexgen.runtime.ops.elementwise", ops),
        *([_from("flexgen.runtime.ops.experts", routed)] if arch.moes else []),
        *(["", _from(".attention", mixers)] if mixers else []),
    )


def _attention(arch: ir.Architecture) -> tuple[str, ...]:
    norms = {norm.function for a in arch.attentions for norm in (a.q_norm, a.k_norm, a.v_norm) if norm}
    ops = {"project"} | norms | {a.rotate for a in arch.attentions if a.rope}
    ops |= {"widen"} if any(a.value_dim and not a.kv_of for a in arch.attentions) else set()
    functional = arch.gdns or any(a.gate_act == "softplus" for a in arch.attentions)
    ops |= {"clip"} if any(a.clip for a in arch.attentions) else set()
    ops |= {"scale_queries"} if any(a.query_scale for a in arch.attentions) else set()
    ops |= {"gated_rms_norm"} if arch.gdns else set()
    owners = [a for a in arch.attentions if not a.kv_of]
    states = {"State"} | ({"Pages"} if owners else set()) | ({"Slots"} if arch.gdns else set())
    states |= {"SharedPages"} if len(owners) < len(arch.attentions) else set()
    paged = {"attend"} | ({"write_pages"} if owners else set())
    return (
        *(["import math"] if any("math." in code for code in _mixer_codes(arch)) else []),
        *_TYPING,
        "import torch",
        *(["import torch.nn.functional as F"] if functional else []),
        "from torch import Tensor",
        "",
        *(["from flexgen.contract import weights"] if arch.attentions or arch.gdns else []),
        *(["from flexgen.contract.abi import Layer, Step"] if arch.attentions or arch.gdns else []),
        _from("flexgen.contract.state", states),
        *([_from("flexgen.runtime.ops.attention", paged)] if arch.attentions else []),
        *([_from("flexgen.runtime.ops.elementwise", ops)] if arch.attentions or arch.gdns else []),
        *([_from("flexgen.runtime.ops.recurrent", ("causal_conv", "delta_rule"))] if arch.gdns else []),
    )


def _merge(arch: ir.Architecture) -> tuple[str, ...]:
    return (_from("flexgen.runtime.loading.lora", {"Merge"} | {merge.function for merge in arch.merges}),)


def _mixers(arch: ir.Architecture) -> tuple[ir.Attention | ir.GatedDelta, ...]:
    return (*arch.attentions, *arch.gdns)


def _mixer_codes(arch: ir.Architecture) -> Iterator[str]:
    for part in _mixers(arch):
        yield from (str(item) for row in part.table.rows for item in (*row.arguments, *(rows for _, rows in row.rows)))
    for a in arch.attentions:
        norms = [norm.eps for norm in (a.q_norm, a.k_norm, a.v_norm) if norm]
        yield from map(str, (a.clip, *a.query_scale, a.chunk, a.alibi))
        yield from map(str, (a.scale, a.window, a.softcap, a.heads, a.kv_heads, a.head_dim, a.value_dim, a.value_scale, *norms))
    for g in arch.gdns:
        yield from map(str, (g.key_heads, g.key_dim, g.value_heads, g.value_dim, g.kernel, g.eps))


def _from(module: str, names: Iterable[str]) -> str:
    """An import on one line where it fits, else half of its names on each of two."""
    listed = sorted(set(names))
    one = f"from {module} import {', '.join(listed)}"
    if len(one) <= _WIDTH:
        return one
    half = (len(listed) + 1) // 2
    return f"from {module} import (\n    {', '.join(listed[:half])},\n    {', '.join(listed[half:])},\n)"


def _statements(arch: ir.Architecture) -> Iterator[ir.Statement]:
    """Every line that the walker computes, but for those of its fixed functions."""
    yield from arch.embedding
    for layer_input in arch.layer_inputs:
        yield from layer_input.statements
    for part in (part for block in arch.blocks for part in block.parts):
        yield from part.statements
    for block in arch.blocks:
        yield block.result
    for moe in arch.moes:
        yield from moe.route_lines


def _codes(arch: ir.Architecture, statements: Iterable[ir.Statement]) -> Iterator[str]:
    """Every piece of code that can hold arithmetic."""
    for statement in statements:
        yield from (str(statement.value), str(statement.norm.eps if statement.norm else ""), *statement.terms)
    for moe in arch.moes:
        yield from map(str, (moe.alpha, moe.limit, moe.up_offset, moe.top_k))
    for table in arch.tables:
        if table.function not in {part.table.function for part in _mixers(arch)}:
            yield from (str(item) for row in table.rows for item in (*row.arguments, *(rows for _, rows in row.rows)))
    yield from (dim.read for dim in arch.dims)
    yield from (rule.arguments for rule in arch.rules)
    yield from map(str, (arch.head.norm.eps, arch.head.scale, arch.head.softcap))
    yield from (str(size) for rope in arch.ropes for size in (rope.head_dim, rope.turned))
    for mlp in arch.mlps:
        yield from (mlp.acted, str(mlp.inner_norm.eps if mlp.inner_norm else ""))
