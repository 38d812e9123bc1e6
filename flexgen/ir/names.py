"""Names of a spec that become names of generated code: none is a word of Python, and no two become the same one."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable
from typing import Any

from flexgen.ir import architecture as ir
from flexgen.ir.problems import Problems
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath

SECTIONS = ("dims", *models.SECTIONS_WITH_LIKE, "layer_inputs", "kinds")
PARTS = ("attention", "gdn", "mlp", "moe")
"""Sections whose names the block uses."""

_MODULE = """
    annotations attend block_weights causal_conv check_groups check_heads check_widths clip delta_rule dims embed experts gated_rms_norm
    inputs keep_groups l2_norm layer layer_norm layer_norm_one_plus math gelu_new model_weights project quick_gelu relu2 renormalise
    rms_norm rms_norm_cast_before rms_norm_one_plus rope_tables rotate rotate_pairs rounded routes run scale_queries schedule slices
    softcap sparsemixer state step top_k torch w weights widen write_pages xielu
"""
MODULE = frozenset(_MODULE.split())
"""Names that generated modules define, import, or use for arguments and variables."""

_DIMS = "check_groups check_heads check_widths cls config from_config ignore kinds math raw schedule self"
DIMS = frozenset(_DIMS.split())
"""Names that the constructors of `Dims` use themselves."""

LAYER = frozenset({"k_pages", "v_pages", "rope_cos", "rope_sin"})
"""Attributes of a layer that are no weights."""


def check_names(model: models.SpecModel, problems: Problems) -> None:
    """Report names that are words of Python."""
    for section in SECTIONS:
        for name in getattr(model, section):
            if keyword.iskeyword(name):
                _refuse(name, f"`{name}` is a word of Python", (section, name), problems)
    owners: dict[str, str] = {}
    for section in PARTS:
        for name in getattr(model, section):
            if owners.setdefault(name, section) != section:
                message = f"`{name}` names an entry of `{owners[name]}` and one of `{section}`"
                note = ("the other one", (owners[name], name))
                problems.add("SPEC020", message, (section, name), key=True, help="take another name", note=note)
    if keyword.iskeyword(model.name):
        message = f"`{model.name}` is a word of Python"
        problems.add("SPEC020", message, ("name",), help="take another name")


def check_generated_names(architecture: ir.Architecture, problems: Problems) -> None:
    """Report names that generated code would give to two things."""
    arch, taken = architecture, {**dict.fromkeys(MODULE), **dict.fromkeys(dir(builtins))}
    functions: tuple[Any, ...] = (*arch.attentions, *arch.gdns, *arch.mlps)
    numbers: tuple[Any, ...] = (*arch.dims, *arch.ropes)
    _claim(((part.function, part.path) for part in functions), taken, problems)
    _claim(((name, moe.path) for moe in arch.moes for name in (moe.route, moe.experts)), taken, problems)
    _claim(((kind.function, kind.path) for kind in arch.kinds), taken, problems)
    own = {kind.function for kind in arch.kinds}
    _claim(((block.function, block.path) for block in arch.blocks if block.function not in own), taken, problems)
    _claim(((part.table.function, part.path) for part in _parts(arch)), taken, problems)
    locals_: dict[str, str | None] = {**dict.fromkeys(DIMS), **dict.fromkeys(dir(builtins))}
    _claim(((item.name, item.path) for item in numbers), locals_, problems)
    _check_roles(arch, problems)


def _parts(arch: ir.Architecture) -> tuple:
    return (*arch.attentions, *arch.gdns, *arch.mlps, *arch.moes)


def _check_roles(arch: ir.Architecture, problems: Problems) -> None:
    """A layer holds its weights, pages, state and routes as attributes: each needs a name of its own."""
    tables = {table.function: table for table in arch.tables}
    states = {g.name: (f"{g.name}_conv_state", f"{g.name}_state") for g in arch.gdns}
    for kind in arch.kinds:
        taken: dict[str, str | None] = dict.fromkeys(LAYER)
        taken |= dict.fromkeys([*(name for name, _ in kind.routes), *(n for m in kind.mixers for n in states.get(m, ()))])
        for name in dict.fromkeys(kind.tables):
            table = tables[name]
            _claim(((role, table.path) for row in table.rows for role in row.roles), taken, problems)
        for name in {name for name in kind.mixers if kind.mixers.count(name) > 1}:
            message = f"kind `{kind.name}` runs `{name}` twice, and one layer keeps one state of it"
            problems.add("SPEC025", message, ("kinds", kind.name), key=True, help="define it twice, under two names")


def _claim(names: Iterable[tuple[str, str]], taken: dict[str, str | None], problems: Problems) -> None:
    for name, path in names:
        if name not in taken:
            taken[name] = path
            continue
        owner = taken[name]
        what = f"`{owner}` is called that too" if owner else "generated code uses that name itself"
        where: SpecPath = tuple(path.split(", ", 1)[0].split("."))
        _refuse(name, f"`{path}` would be called `{name}` in generated code, and {what}", where, problems)


def _refuse(name: str, message: str, path: SpecPath, problems: Problems) -> None:
    problems.add("SPEC020", message, path, key=True, help="take another name")
