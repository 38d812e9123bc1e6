"""Lowers the schedule's rules to calls of the runtime's selectors, and checks that every layer can get a kind."""

from __future__ import annotations

import json
from typing import Any

from flexgen.contract.layer_kinds import SELECTORS
from flexgen.ir import architecture as ir
from flexgen.ir.kinds import check_halves
from flexgen.ir.problems import Problems, defined
from flexgen.ir.scope import Scope
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path


def schedules(model: models.SpecModel, scope: Scope, problems: Problems) -> tuple[ir.RuleList, ...]:
    """The rules as code, in order: of one list, or of one a slot."""
    check_halves(model, problems)
    lists = tuple(_rules(each, model, scope, problems) for each in model.schedules)
    used = {name for _, rule in model.rules for name in _kinds_of(rule)}
    for name in model.kinds:
        if name not in used and ("kinds", name) not in problems.meant:
            message = f"kind `{name}` is chosen by no rule of the schedule"
            problems.add("SPEC010", message, ("kinds", name), key=True, help="schedule it or remove it")
    return lists


def _rules(each: models.RuleList, model: models.SpecModel, scope: Scope, problems: Problems) -> ir.RuleList:
    names = {name: kind for name, kind in model.kinds.items() if each.slot is None or each.slot in kind}
    found = [_rule(rule, (*each.path, index), names, scope, problems) for index, rule in enumerate(each.rules)]
    if not any((rule.all or rule.pattern or rule.by) and not rule.when for rule in each.rules):
        help = "begin with `{all: true, kind: KIND}`"
        what = "the schedule" if each.slot is None else f"the schedule of `{each.slot}`"
        problems.add("SPEC014", f"no rule of {what} reaches every layer", each.path, key=True, help=help)
    return ir.RuleList(each.slot, tuple(rule for rule in found if rule is not None))


def _kinds_of(rule: models.Rule) -> list[str]:
    return [*(rule.pattern or ()), *([rule.kind] if rule.kind else []), *(rule.kinds or {}).values()]


def _rule(
    rule: models.Rule, path: SpecPath, kinds: dict[str, Any], scope: Scope, problems: Problems
) -> ir.ScheduleRule | None:
    given = rule.selectors
    if len(given) != 1:
        found = " and ".join(f"`{s}`" for s in given) or "none"
        help = f"one of {', '.join(SELECTORS)}"
        problems.add("SPEC005", f"a rule takes exactly one selector, found {found}", path, help=help)
        return None
    selector = given[0]
    if not _check_target(rule, selector, path, problems):
        return None
    known = defined("kinds", kinds)
    for field, names in (("pattern", rule.pattern or ()), ("kind", [rule.kind] if rule.kind else [])):
        for index, name in enumerate(names):
            if name not in kinds:
                at = (*path, field, index) if field == "pattern" else (*path, field)
                problems.unknown("kind", name, known, at, "SPEC013")
    for key, name in (rule.kinds or {}).items():
        if name not in kinds:
            problems.unknown("kind", name, known, (*path, "kinds", key), "SPEC013")
        if selector != "by" and key not in kinds:
            problems.unknown("kind", key, known, (*path, "kinds", key), "SPEC013", key=True)
    target = f'"{rule.kind}"' if rule.kind else _mapping(rule.kinds or {})
    when = None if rule.when is None else f'config.optional("{rule.when}")'
    name = f"schedule.{SELECTORS[selector].__name__}"
    where = show_path(path)
    if selector == "all":
        return ir.ScheduleRule(name, target, "", when, where, rule.why)
    if selector == "pattern":
        named = "".join(f'"{kind}", ' for kind in rule.pattern or ())
        return ir.ScheduleRule(
            name,
            f"({named.rstrip(', ') if len(rule.pattern or ()) > 1 else named.rstrip()})",
            "",
            when,
            where,
            rule.why,
        )
    if selector in ("at", "by"):
        argument = f'config.optional("{rule.given(selector)}")'
    else:
        argument = scope.field(rule.given(selector), (*path, selector))
    return ir.ScheduleRule(name, argument, target, when, where, rule.why)


def _check_target(rule: models.Rule, selector: str, path: SpecPath, problems: Problems) -> bool:
    wanted = {"pattern": (False, False), "by": (False, True)}.get(selector)
    has = (rule.kind is not None, rule.kinds is not None)
    if wanted is None and has in ((True, False), (False, True)):
        return True
    if wanted == has:
        return True
    help = {"pattern": "the pattern itself names the kinds", "by": "give `kinds: {VALUE: KIND}`"}.get(selector)
    message = f"`{selector}` does not go with {'both' if all(has) else 'neither' if not any(has) else 'this one'} of `kind` and `kinds`"
    problems.add("SPEC005", message, path, help=help or "give `kind: KIND`, or `kinds: {BEFORE: AFTER}`")
    return False


def _mapping(kinds: dict[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: \"{value}\"" for key, value in kinds.items()) + "}"
