"""The schedule that `tiny` gets: every rule has its field, and every kind occurs."""

from __future__ import annotations

from typing import Any

from flexgen.contract import layer_kinds
from flexgen.contract.configs import look
from flexgen.errors import ConfigError
from flexgen.ir.tiny.reads import TINY, Tiny
from flexgen.spec.diagnostics import nearest
from flexgen.spec.expressions import Name, parse
from flexgen.spec.models import Rule


def check_schedule(tiny: Tiny, values: dict[str, Any]) -> None:
    """Every rule has its field, every value of `by` occurs, and so does every kind: as `tiny` is, or with one flag turned."""
    before = len(tiny.problems.found)
    for field, reads in tiny.reads.items():
        for read in reads:
            if read.path[0] == "schedule" and look(tiny.config, field) is None:
                message = f"neither `tiny` nor `defaults` has `{field}`, so nothing shows what this rule does"
                near = nearest(field, {*tiny.model.tiny, *tiny.model.checkpoint.defaults})
                help = f"did you mean `{near}`?" if near else f"give `{field}` in `tiny`"
                tiny.problems.add("SPEC024", message, read.path, help=help)
    for at, rule in tiny.model.rules:
        for value in rule.kinds or () if rule.by else ():
            if value not in map(layer_kinds.written, look(tiny.config, rule.by or "") or [value]):
                message = f"no layer of `tiny` has `{value}` in `{rule.by}`"
                tiny.problems.add("SPEC024", message, (*at, "kinds", value), key=True)
    flags = dict.fromkeys(rule.when for _, rule in tiny.model.rules if rule.when)
    if len(tiny.problems.found) > before:
        return
    seen: set[str] = set()
    for flag in (None, *flags):
        turned = {} if flag is None else {flag: not look(tiny.config, flag)}
        try:
            for each in tiny.model.schedules:
                rules = [_rule(tiny, rule, values, turned) for rule in each.rules]
                seen.update(layer_kinds.resolve(values["layers"], rules))
        except ConfigError as error:
            tiny.problems.add("SPEC024", f"`tiny` does not fit the schedule: {error}", TINY, key=True)
            return
    for name in tiny.model.kinds:
        if name not in seen:
            message = f"no layer of `tiny` is of kind `{name}`"
            help = "give `tiny` more layers, or the fields that choose this kind"
            tiny.problems.add("SPEC024", message, TINY, key=True, help=help, note=("the kind", ("kinds", name)))


def _rule(tiny: Tiny, rule: Rule, values: dict[str, Any], turned: dict[str, bool]) -> layer_kinds.Rule:
    """A rule as the loader makes it, for `tiny` with some flags turned."""
    when = True if rule.when is None else turned.get(rule.when, look(tiny.config, rule.when))
    (selector,) = rule.selectors
    given = rule.given(selector)
    select = layer_kinds.SELECTORS[selector]
    if selector == "pattern":
        return select(given, when)
    target: Any = rule.kind or rule.kinds or {}
    if selector == "all":
        return select(target, when)
    if selector in ("at", "by"):
        return select(look(tiny.config, given), target, when)
    expr = parse(given)
    is_field = isinstance(expr, Name) and expr.dotted not in values
    return select(look(tiny.config, given) if is_field else expr.evaluate(values), target, when)
