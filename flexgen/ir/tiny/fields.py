"""Every field of `tiny` and of `checkpoint.defaults` is one that the spec reads, and holds what it is read as."""

from __future__ import annotations

from typing import Any

from flexgen.contract.configs import look
from flexgen.contract.ignored import NO_EFFECT
from flexgen.ir.tiny.reads import CODES, DEFAULTS, REQUIRE, TINY, Tiny
from flexgen.ir.tiny.ropes import check_rope
from flexgen.ir.tiny.values import TYPES, has, names, same_type, shown, words
from flexgen.spec.diagnostics import SpecPath, nearest


def check_model_type(tiny: Tiny) -> None:
    known = tiny.model.checkpoint.model_types
    if "model_type" not in tiny.model.tiny:
        tiny.problems.add("SPEC024", "`tiny` lacks `model_type`", TINY, key=True, help=f"one of {', '.join(known)}")
    elif tiny.model.tiny["model_type"] not in known:
        help = f"`checkpoint.model_types` has {', '.join(f'`{name}`' for name in known)}"
        message = f"`tiny` is of model type {shown(tiny.model.tiny['model_type'])}, which this spec does not serve"
        tiny.problems.add("SPEC024", message, (*TINY, "model_type"), help=help)


def check_ignored(tiny: Tiny) -> None:
    for index, field in enumerate(tiny.model.checkpoint.ignore):
        at: SpecPath = ("checkpoint", "ignore", index)
        if field in tiny.require:
            note = ("required here", (*REQUIRE, field))
            tiny.problems.add("SPEC023", f"`{field}` is both required and ignored", at, help="remove one", note=note)
        elif field in tiny.reads or field in tiny.ropes:
            where = tiny.reads[field][0].path if field in tiny.reads else ("ropes", tiny.ropes[field])
            message = f"ignoring `{field}` has no effect: the spec reads it"
            tiny.problems.add("SPEC010", message, at, help="remove it", note=("read here", where))


def check_fields(tiny: Tiny, node: dict[str, Any], prefix: str, at: SpecPath, place: SpecPath) -> None:
    names = {*tiny.reads, *tiny.ropes, *tiny.require}
    for key, value in node.items():
        field, here = prefix + key, (*at, key)
        if field == "model_type":
            if place == DEFAULTS:
                tiny.problems.add("SPEC023", "`model_type` has no default", here, key=True, help="remove it")
        elif field in names:
            _check_value(tiny, field, value, here, place)
        elif any(name.startswith(f"{field}.") for name in names):
            if isinstance(value, dict):
                check_fields(tiny, value, f"{field}.", here, place)
            else:
                tiny.problems.add(CODES[place], f"`{field}` is {shown(value)}, and must be a mapping", here)
        else:
            _unread(tiny, field, here, place, names)


def _unread(tiny: Tiny, field: str, at: SpecPath, place: SpecPath, names: set[str]) -> None:
    if place == TINY and not {field, field.split(".")[0]}.isdisjoint({*NO_EFFECT, *tiny.model.checkpoint.ignore}):
        return
    near = nearest(field, {*names, "model_type"} if place == TINY else names)
    if near and is_slip(tiny, near, field):
        misread(tiny, near, reader(tiny, near)[-1], field)
        return
    if near:
        tiny.misspelt.add(near)
    help = f"did you mean `{near}`?" if near else "remove it, or read it in `dims`, `require` or `schedule`"
    note = (f"`{near}` is read here", reader(tiny, near)) if near else None
    code, message = ("SPEC024", f"`tiny` has `{field}`, which nothing in the spec reads")
    if place == DEFAULTS:
        code, message = "SPEC010", f"the default of `{field}` has no effect: nothing reads it"
    tiny.problems.add(code, message, at, key=True, help=help, note=note)


def is_slip(tiny: Tiny, read: str, field: str, margin: int = 0) -> bool:
    """Whether the one dim that reads a field misspells it, and not `tiny`, as far as other words of the spec tell.

    margin  by how many words that occur nowhere else the misspelt name must have more
    """
    paths = {item.path for item in tiny.reads.get(read, ())}
    is_dim = len(paths) == 1 and all(path[0] == "dims" for path in paths)
    if not is_dim or read in (*tiny.ropes, *tiny.require) or look(tiny.config, read) is not None:
        return False
    others = {*tiny.reads, *tiny.ropes, *tiny.require, *tiny.model.dims, *names(tiny.config)} - {read, field}
    known = set().union(*map(words, others))
    return len(words(read) - known) >= len(words(field) - known) + margin


def misread(tiny: Tiny, field: str, dim: str | int, near: str) -> None:
    """Report a field that a dim reads and no config has, once, at its name in the dim."""
    if field in tiny.misspelt:
        return
    tiny.misspelt.add(field)
    name = next(name for name in tiny.scope.exprs[str(dim)].names() if name.dotted == field)
    place = TINY if has(tiny.model.tiny, near) else DEFAULTS
    note = (f"`{near}` is given here", (*place, *near.split(".")))
    message = f"`{dim}` reads `{field}`, which neither `tiny` nor `defaults` has"
    help, within = f"did you mean `{near}`?", (name.start, name.end)
    tiny.problems.add("SPEC024", message, ("dims", dim), help=help, within=within, note=note)


def reader(tiny: Tiny, field: str) -> SpecPath:
    if field in tiny.reads:
        return tiny.reads[field][0].path
    if field in tiny.ropes:
        return ("ropes", tiny.ropes[field], "parameters")
    return (*REQUIRE, field) if field in tiny.require else ("checkpoint", "model_types")


def _check_value(tiny: Tiny, field: str, value: Any, at: SpecPath, place: SpecPath) -> None:
    if value is None:
        return
    for read in tiny.reads.get(field, ()):
        wanted, fits = TYPES[read.want]
        if not fits(value):
            message = f"`{field}` is {shown(value)}, and must be {wanted}"
            tiny.problems.add(CODES[place], message, at, note=("read here", read.path))
            return
    if field in tiny.ropes:
        check_rope(tiny, field, value, at, place)
    if field in tiny.require and place == DEFAULTS and not same_type(value, tiny.require[field]):
        note = ("required here", (*REQUIRE, field))
        tiny.problems.add("SPEC023", f"`{field}` is {shown(value)}, of another type than what is required", at, note=note)
