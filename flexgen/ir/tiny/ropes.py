"""The rotary tables of `tiny` and of `checkpoint.defaults`: their parameters are those of their type."""

from __future__ import annotations

from typing import Any

from flexgen.contract import rope_parameters
from flexgen.contract.configs import look, merged
from flexgen.ir.tiny.reads import CODES, TINY, Tiny
from flexgen.ir.tiny.values import shown
from flexgen.spec.diagnostics import SpecPath, nearest
from flexgen.spec.expressions import parse


def check_rope(tiny: Tiny, field: str, value: Any, at: SpecPath, place: SpecPath) -> None:
    name = tiny.ropes[field]
    code, note = CODES[place], ("read here", ("ropes", name))
    if not isinstance(value, dict):
        tiny.problems.add(code, f"`{field}` is {shown(value)}, and must be a mapping", at, note=note)
        return
    default = look(tiny.model.checkpoint.defaults, field)
    whole = merged(value, default) if place == TINY and isinstance(default, dict) else value
    kind = whole.get("rope_type", "default")
    types = tiny.model.ropes[name].types
    if place == TINY and kind not in types:
        here = (*at, "rope_type") if "rope_type" in value else at
        listed = ", ".join(f"`{item}`" for item in types)
        tiny.problems.add(code, f"`tiny` has a rope of type {shown(kind)}, and `{name}` takes {listed}", here, note=note)
        return
    kinds = [kind] if place == TINY else types
    known = frozenset().union(*map(rope_parameters.known, kinds))
    for key, item in value.items():
        if key not in known and (f"{field}.{key}" in tiny.reads or f"{field}.{key}" in tiny.model.checkpoint.ignore):
            if f"{field}.{key}" in tiny.reads and (isinstance(item, bool) or not rope_parameters.is_finite(item)):
                tiny.problems.add(code, f"`{key}` is {shown(item)}, and must be a number", (*at, key))
            continue
        if key not in known:
            near = nearest(key, known)
            tiny.misspelt.add(near or "")
            help = f"did you mean `{near}`?" if near else f"known: {', '.join(sorted(known))}"
            tiny.problems.add(code, f"a rope of type `{kind}` has no `{key}`", (*at, key), key=True, help=help)
        elif problem := rope_parameters.fault(kind, key, item):
            tiny.problems.add(code, f"`{key}` is {shown(item)}, and {problem}", (*at, key))
    if place == TINY:
        for key in sorted(rope_parameters.REQUIRED[kind] - whole.keys() - tiny.misspelt):
            tiny.problems.add(code, f"a rope of type `{kind}` lacks `{key}`", at, key=True)


def check_ropes(tiny: Tiny) -> None:
    for field, name in tiny.ropes.items():
        if look(tiny.model.tiny, field) or field in tiny.misspelt:
            continue
        default = look(tiny.config, field)
        if not isinstance(default, dict) or default.get("rope_type", "default") not in tiny.model.ropes[name].types:
            message = f"`tiny` lacks `{field}`, which rope `{name}` reads"
            tiny.problems.add("SPEC024", message, TINY, key=True, note=("read here", ("ropes", name, "parameters")))


def check_rotations(tiny: Tiny, values: dict[str, Any]) -> None:
    """Rotary tables whose parameters do not fit the width of a head, or each other."""
    position = look(tiny.config, "max_position_embeddings") or 0
    for field, name in tiny.ropes.items():
        widths = {entry.head_dim for entry in tiny.model.attention.values() if entry.rope == name}
        for width in widths:
            table, beside = look(tiny.config, field), look(tiny.config, "original_max_position_embeddings")
            if beside is not None:
                table = {"original_max_position_embeddings": beside} | table
            wrong = rope_parameters.misfit(table, parse(width).evaluate(values), position)
            if wrong:
                place = (*TINY, *field.split("."))
                tiny.problems.add("SPEC024", wrong, place, note=("read here", ("ropes", name)))
