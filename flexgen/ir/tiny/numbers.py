"""The numbers that `tiny` gives: it passes the fences, every dim has a value, and heads divide."""

from __future__ import annotations

from typing import Any

from flexgen.contract.configs import holds, look
from flexgen.contract.heads import BEST, MULTIPLES, groups_fault, is_multiple, widths_fault
from flexgen.ir.tiny.fields import is_slip, misread
from flexgen.ir.tiny.reads import DEFAULTS, REQUIRE, TINY, Tiny
from flexgen.ir.tiny.values import has, shown
from flexgen.spec.diagnostics import SpecPath, nearest
from flexgen.spec.expressions import ExpressionError, Name, Or, parse
from flexgen.spec.models import RouterGroups


def check_fences(tiny: Tiny) -> None:
    for field, wanted in tiny.require.items():
        at = (*REQUIRE, field)
        inside = has(tiny.model.tiny, field)
        if field in tiny.misspelt:
            continue
        if not inside and not has(tiny.model.checkpoint.defaults, field):
            message = f"neither `tiny` nor `defaults` has `{field}`, so nothing shows that there is such a field"
            near = nearest(field, {*tiny.model.tiny, *tiny.model.checkpoint.defaults})
            help: str | None = f"did you mean `{near}`?" if near else "give its default, null where it is absent"
            tiny.problems.add("SPEC023", message, at, key=True, help=help)
        elif not holds(value := look(tiny.config, field), wanted):
            place = (*(TINY if inside else DEFAULTS), *field.split("."))
            origin = "" if inside else " by default"
            message = f"`{field}` of `tiny` is {shown(value)}{origin}, which `require` rules out"
            help = None if inside else f"give `{field}` in `tiny`, or another default"
            tiny.problems.add("SPEC024", message, place, help=help, note=("required here", at))


def evaluate_dims(tiny: Tiny) -> dict[str, Any]:
    """The value of each dim as far as `tiny` settles it."""
    values: dict[str, Any] = {}
    order = list(tiny.scope.exprs)
    for place, (name, expr) in enumerate(tiny.scope.exprs.items()):
        fields = tiny.fields_of(name)
        seen = {**values, **{field: look(tiny.config, field) for field in fields}}
        try:
            values[name] = expr.evaluate(seen)
            if isinstance(expr, Or) and not isinstance(expr.alternatives[-1], Name):
                expr.alternatives[-1].evaluate(seen)  # the load computes the default whether it is needed or not
        except ExpressionError as error:
            missing = [field for field in fields if seen[field] is None]
            if late := next((field for field in missing if field in order[place + 1 :]), None):
                message = f"`{name}` reads `{late}`, a dim that is defined further down"
                note = ("it is here", ("dims", late))
                tiny.problems.add("SPEC024", message, ("dims", name), help=f"move `{late}` above it", note=note)
                values[name] = 1
                continue
            if not missing and any(isinstance(values.get(dim), str) for dim in (each.dotted for each in expr.names())):
                values[name] = 1
                continue  # what that dim is has been said of its own field
            near = nearest(missing[0], {*tiny.scope.exprs, *tiny.config} - {name}) if missing else None
            if near in tiny.config and is_slip(tiny, missing[0], near, margin=1):
                misread(tiny, missing[0], name, near)
            elif not tiny.misspelt.intersection(missing):
                shown = f"lacks `{missing[0]}`" if missing else f"does not fit: {error.message}"
                help = f"add it, or did `dims.{name}` mean `{near}`?" if near else None
                note = ("read here", ("dims", name))
                tiny.problems.add("SPEC024", f"`tiny` {shown}", TINY, key=True, help=help, note=note)
            values[name] = 1
    return values


def check_null_defaults(tiny: Tiny) -> None:
    """Numbers whose only default is null: a checkpoint that is silent about the field could not be loaded."""
    defaults = tiny.model.checkpoint.defaults
    for name, expr in tiny.scope.exprs.items():
        field = expr.dotted if isinstance(expr, Name) else None
        if field is not None and field not in tiny.scope.exprs and look(defaults, field, "absent") is None:
            message = f"`{name}` is a number, and where config.json is silent `{field}` is null"
            help = f"`{field} or 0`, or for a window `{field} or none`"
            note = ("its default", (*DEFAULTS, *field.split(".")))
            tiny.problems.add("SPEC024", message, ("dims", name), help=help, note=note)


def check_groups(tiny: Tiny, values: dict[str, Any]) -> None:
    """Experts that do not make the groups that their router tells apart."""
    for name, entry in tiny.model.moe.items():
        groups = entry.router.groups
        if isinstance(groups, RouterGroups):
            texts = (entry.experts, groups.count, groups.keep)
            experts, count, keep = (parse(text).evaluate(values) for text in texts)
            fault = groups_fault(experts, count, keep, BEST[groups.rank], parse(entry.top_k).evaluate(values))
            if fault:
                note = ("read here", ("moe", name, "router", "groups"))
                tiny.problems.add("SPEC024", f"`tiny` does not fit `{name}`: {fault}", TINY, key=True, note=note)


def check_value_widths(tiny: Tiny, values: dict[str, Any]) -> None:
    """Values that are wider than keys."""
    for name, entry in tiny.model.attention.items():
        if entry.value_dim is None:
            continue
        fault = widths_fault(*(parse(text).evaluate(values) for text in (entry.head_dim, entry.value_dim)))
        if fault:
            note = ("read here", ("attention", name, "value_dim"))
            tiny.problems.add("SPEC024", f"`tiny` gives `{name}` {fault}", TINY, key=True, note=note)


def check_head_counts(tiny: Tiny, values: dict[str, Any]) -> None:
    """Key/value heads that do not divide the query heads; the same of gated-delta mixers' value heads."""
    for section, many, few in MULTIPLES:
        for name, entry in getattr(tiny.model, section).items():
            exprs = [parse(getattr(entry, field)) for field in (many, few)]
            counts = [expr.evaluate(values) for expr in exprs]
            if is_multiple(*counts):
                continue
            at: SpecPath = (section, name, few)
            if any(expr.names() for expr in exprs):
                message = f"`tiny` gives `{name}` {counts[0]} {many}, which is no multiple of its {counts[1]} {few}"
                tiny.problems.add("SPEC024", message, TINY, key=True, note=("read here", at))
            else:
                message = f"`{name}` has {counts[0]} {many}, which is no multiple of its {counts[1]} {few}"
                tiny.problems.add("SPEC016", message, at, note=(f"the {many} are here", (section, name, many)))
