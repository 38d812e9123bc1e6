"""Loads `tiny` at build time: every field of it is read and has the right type, the fences hold, every kind occurs.

The same rules hold for `checkpoint.defaults` as far as they can: a default that nothing reads would be lost in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flexgen.contract import layer_kinds as runtime
from flexgen.contract import rope_parameters
from flexgen.errors import ConfigError
from flexgen.ir.architecture import Dim
from flexgen.ir.problems import Problems
from flexgen.ir.scope import Scope
from flexgen.spec.diagnostics import SpecPath, nearest
from flexgen.spec.expressions import ExpressionError, Name, Or, parse
from flexgen.spec.load import Spec
from flexgen.spec.models import AtLeast, Checkpoint, Rule

TINY: SpecPath = ("tiny",)
DEFAULTS: SpecPath = ("checkpoint", "defaults")
REQUIRE: SpecPath = ("checkpoint", "require")
_CODES = {TINY: "SPEC024", DEFAULTS: "SPEC023"}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number, not negative", lambda value: _is_int(value) and value >= 0),
    "float": ("a number", lambda value: _is_int(value) or isinstance(value, float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "number": ("a number or a flag", lambda value: isinstance(value, int | float)),
    "indices": ("a list of layer indices", lambda value: isinstance(value, list) and all(map(_is_int, value))),
    "values": ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value)),
}


@dataclass(frozen=True)
class Read:
    """A field of config.json that the spec reads: as what, and where the spec says so."""

    want: str
    path: SpecPath


def check_tiny(spec: Spec, scope: Scope, dims: tuple[Dim, ...], problems: Problems) -> None:
    """Report what would keep the spec from loading its own `tiny`. Expects a spec without other problems."""
    _Tiny(spec, scope, dims, problems).check()


class _Tiny:
    def __init__(self, spec: Spec, scope: Scope, dims: tuple[Dim, ...], problems: Problems) -> None:
        self.model, self.scope, self.problems = spec.model, scope, problems
        self.types = {dim.name: dim.type for dim in dims}
        self.ropes = {entry.parameters: name for name, entry in self.model.ropes.items()}
        self.require = fences(self.model.checkpoint)
        self.config = merged(self.model.tiny, self.model.checkpoint.defaults)
        self.reads: dict[str, list[Read]] = {}
        for field, read in (*self._dim_reads(), *self._schedule_reads()):
            self.reads.setdefault(field, []).append(read)
        self.misspelt: set[str] = set()

    def check(self) -> None:
        self._model_type()
        self._ignored()
        for place, node in ((TINY, self.model.tiny), (DEFAULTS, self.model.checkpoint.defaults)):
            self._fields(node, "", place, place)
        self._fences()
        self._ropes_are_there()
        values = self._dims()
        self.problems.raise_if_any()
        self._heads(values)
        self._rotations(values)
        self._schedule(values)

    # ------------------------------------------------------------ what the spec reads

    def _dim_reads(self) -> Iterator[tuple[str, Read]]:
        for name, expr in self.scope.exprs.items():
            want = self.types[name] if isinstance(expr, Name | Or) else "number"
            want = "number" if want == "int" and self.problems.is_open else want  # what is wrong may use it as another type
            for field in self._fields_of(name):
                yield field, Read(want, ("dims", name))
        if self.model.ropes:
            yield "max_position_embeddings", Read("int", ("ropes",))

    def _fields_of(self, dim: str) -> list[str]:
        """The config fields that a dim reads: its names that are no earlier dims."""
        earlier = list(self.scope.exprs)[: list(self.scope.exprs).index(dim)]
        return [name.dotted for name in self.scope.exprs[dim].names() if name.dotted not in earlier]

    def _schedule_reads(self) -> Iterator[tuple[str, Read]]:
        for index, rule in enumerate(self.model.schedule):
            at: SpecPath = ("schedule", index)
            for field, want in (("when", "bool"), ("at", "indices"), ("by", "values")):
                if getattr(rule, field) is not None:
                    yield getattr(rule, field), Read(want, (*at, field))
            for field in ("every", "first", "last", "from"):
                text = getattr(rule, "from_" if field == "from" else field)
                if text is not None and isinstance(expr := parse(text), Name) and expr.dotted not in self.types:
                    yield expr.dotted, Read("int", (*at, field))

    # ------------------------------------------------------------ fields

    def _model_type(self) -> None:
        known = self.model.checkpoint.model_types
        if "model_type" not in self.model.tiny:
            self.problems.add("SPEC024", "`tiny` lacks `model_type`", TINY, key=True, help=f"one of {', '.join(known)}")
        elif self.model.tiny["model_type"] not in known:
            help = f"`checkpoint.model_types` has {', '.join(f'`{name}`' for name in known)}"
            message = f"`tiny` is of model type {_shown(self.model.tiny['model_type'])}, which this spec does not serve"
            self.problems.add("SPEC024", message, (*TINY, "model_type"), help=help)

    def _ignored(self) -> None:
        for index, field in enumerate(self.model.checkpoint.ignore):
            at: SpecPath = ("checkpoint", "ignore", index)
            if field in self.require:
                note = ("required here", (*REQUIRE, field))
                self.problems.add("SPEC023", f"`{field}` is both required and ignored", at, help="remove one", note=note)
            elif field in self.reads or field in self.ropes:
                where = self.reads[field][0].path if field in self.reads else ("ropes", self.ropes[field])
                message = f"ignoring `{field}` has no effect: the spec reads it"
                self.problems.add("SPEC010", message, at, help="remove it", note=("read here", where))

    def _fields(self, node: dict[str, Any], prefix: str, at: SpecPath, place: SpecPath) -> None:
        names = {*self.reads, *self.ropes, *self.require}
        for key, value in node.items():
            field, here = prefix + key, (*at, key)
            if field == "model_type":
                if place == DEFAULTS:
                    self.problems.add("SPEC023", "`model_type` has no default", here, key=True, help="remove it")
            elif field in names:
                self._value(field, value, here, place)
            elif any(name.startswith(f"{field}.") for name in names):
                if isinstance(value, dict):
                    self._fields(value, f"{field}.", here, place)
                else:
                    self.problems.add(_CODES[place], f"`{field}` is {_shown(value)}, and must be a mapping", here)
            else:
                self._unread(field, here, place, names)

    def _unread(self, field: str, at: SpecPath, place: SpecPath, names: set[str]) -> None:
        near = nearest(field, {*names, "model_type"} if place == TINY else names)
        if near and self._is_slip(near, field):
            self._misread(near, self._reader(near)[-1], field)
            return
        if near:
            self.misspelt.add(near)
        if self.problems.is_open and (near is None or _look(self.config, near) is not None):
            return  # what is wrong may read it
        help = f"did you mean `{near}`?" if near else "remove it, or read it in `dims`, `require` or `schedule`"
        note = (f"`{near}` is read here", self._reader(near)) if near else None
        code, message = ("SPEC024", f"`tiny` has `{field}`, which nothing in the spec reads")
        if place == DEFAULTS:
            code, message = "SPEC010", f"the default of `{field}` has no effect: nothing reads it"
        self.problems.add(code, message, at, key=True, help=help, note=note)

    def _is_slip(self, read: str, field: str, margin: int = 0) -> bool:
        """Whether the one dim that reads a field misspells it, and not `tiny`, as far as other words of the spec tell.

        margin  by how many words that occur nowhere else the misspelt name must have more
        """
        paths = {item.path for item in self.reads.get(read, ())}
        is_dim = len(paths) == 1 and all(path[0] == "dims" for path in paths)
        if not is_dim or read in (*self.ropes, *self.require) or _look(self.config, read) is not None:
            return False
        others = {*self.reads, *self.ropes, *self.require, *self.model.dims, *_names(self.config)} - {read, field}
        words = set().union(*map(_words, others))
        return len(_words(read) - words) >= len(_words(field) - words) + margin

    def _misread(self, field: str, dim: str | int, near: str) -> None:
        """Report a field that a dim reads and no config has, once, at its name in the dim."""
        if field in self.misspelt:
            return
        self.misspelt.add(field)
        name = next(name for name in self.scope.exprs[str(dim)].names() if name.dotted == field)
        place = TINY if _has(self.model.tiny, near) else DEFAULTS
        note = (f"`{near}` is given here", (*place, *near.split(".")))
        message = f"`{dim}` reads `{field}`, which neither `tiny` nor `defaults` has"
        help, within = f"did you mean `{near}`?", (name.start, name.end)
        self.problems.add("SPEC024", message, ("dims", dim), help=help, within=within, note=note)

    def _reader(self, field: str) -> SpecPath:
        if field in self.reads:
            return self.reads[field][0].path
        if field in self.ropes:
            return ("ropes", self.ropes[field], "parameters")
        return (*REQUIRE, field) if field in self.require else ("checkpoint", "model_types")

    def _value(self, field: str, value: Any, at: SpecPath, place: SpecPath) -> None:
        if value is None:
            return
        for read in self.reads.get(field, ()):
            wanted, fits = _TYPES[read.want]
            if not fits(value):
                message = f"`{field}` is {_shown(value)}, and must be {wanted}"
                self.problems.add(_CODES[place], message, at, note=("read here", read.path))
                return
        if field in self.ropes:
            self._rope(field, value, at, place)
        if field in self.require and place == DEFAULTS and not _same_type(value, self.require[field]):
            note = ("required here", (*REQUIRE, field))
            self.problems.add("SPEC023", f"`{field}` is {_shown(value)}, of another type than what is required", at, note=note)

    # ------------------------------------------------------------ ropes

    def _rope(self, field: str, value: Any, at: SpecPath, place: SpecPath) -> None:
        name = self.ropes[field]
        code, note = _CODES[place], ("read here", ("ropes", name))
        if not isinstance(value, dict):
            self.problems.add(code, f"`{field}` is {_shown(value)}, and must be a mapping", at, note=note)
            return
        default = _look(self.model.checkpoint.defaults, field)
        whole = merged(value, default) if place == TINY and isinstance(default, dict) else value
        kind = whole.get("rope_type", "default")
        types = self.model.ropes[name].types
        if place == TINY and kind not in types:
            here = (*at, "rope_type") if "rope_type" in value else at
            listed = ", ".join(f"`{item}`" for item in types)
            self.problems.add(code, f"`tiny` has a rope of type {_shown(kind)}, and `{name}` takes {listed}", here, note=note)
            return
        kinds = [kind] if place == TINY else types
        known = rope_parameters.COMMON.union(*(rope_parameters.REQUIRED[k] | rope_parameters.OPTIONAL[k] for k in kinds))
        for key, item in value.items():
            if key not in known:
                near = nearest(key, known)
                self.misspelt.add(near or "")
                help = f"did you mean `{near}`?" if near else f"known: {', '.join(sorted(known))}"
                self.problems.add(code, f"a rope of type `{kind}` has no `{key}`", (*at, key), key=True, help=help)
            elif problem := rope_parameters.fault(key, item):
                self.problems.add(code, f"`{key}` is {_shown(item)}, and {problem}", (*at, key))
        if place == TINY:
            for key in sorted(rope_parameters.REQUIRED[kind] - whole.keys() - self.misspelt):
                self.problems.add(code, f"a rope of type `{kind}` lacks `{key}`", at, key=True)

    def _ropes_are_there(self) -> None:
        for field, name in self.ropes.items():
            if _look(self.model.tiny, field) or field in self.misspelt:
                continue
            default = _look(self.config, field)
            if not isinstance(default, dict) or default.get("rope_type", "default") not in self.model.ropes[name].types:
                message = f"`tiny` lacks `{field}`, which rope `{name}` reads"
                self.problems.add("SPEC024", message, TINY, key=True, note=("read here", ("ropes", name, "parameters")))

    # ------------------------------------------------------------ fences

    def _fences(self) -> None:
        for field, wanted in self.require.items():
            at = (*REQUIRE, field)
            inside = _has(self.model.tiny, field)
            if field in self.misspelt:
                continue
            if not inside and not _has(self.model.checkpoint.defaults, field):
                message = f"neither `tiny` nor `defaults` has `{field}`, so nothing shows that there is such a field"
                near = nearest(field, {*self.model.tiny, *self.model.checkpoint.defaults})
                help = f"did you mean `{near}`?" if near else "give its default, null where it is absent"
                self.problems.add("SPEC023", message, at, key=True, help=help)
            elif not holds(value := _look(self.config, field), wanted):
                place = (*(TINY if inside else DEFAULTS), *field.split("."))
                origin = "" if inside else " by default"
                message = f"`{field}` of `tiny` is {_shown(value)}{origin}, which `require` rules out"
                help = None if inside else f"give `{field}` in `tiny`, or another default"
                self.problems.add("SPEC024", message, place, help=help, note=("required here", at))

    # ------------------------------------------------------------ numbers

    def _dims(self) -> dict[str, Any]:
        """The value of each dim as far as `tiny` settles it."""
        values: dict[str, Any] = {}
        for name, expr in self.scope.exprs.items():
            fields = self._fields_of(name)
            seen = {**values, **{field: _look(self.config, field) for field in fields}}
            try:
                values[name] = expr.evaluate(seen)
                if isinstance(expr, Or) and not isinstance(expr.alternatives[-1], Name):
                    expr.alternatives[-1].evaluate(seen)  # the load computes the default whether it is needed or not
            except ExpressionError as error:
                missing = [field for field in fields if seen[field] is None]
                near = nearest(missing[0], {*self.scope.exprs, *self.config} - {name}) if missing else None
                if near in self.config and self._is_slip(missing[0], near, margin=1):
                    self._misread(missing[0], name, near)
                elif not self.misspelt.intersection(missing):
                    shown = f"lacks `{missing[0]}`" if missing else f"does not fit: {error.message}"
                    help = f"add it, or did `dims.{name}` mean `{near}`?" if near else None
                    note = ("read here", ("dims", name))
                    self.problems.add("SPEC024", f"`tiny` {shown}", TINY, key=True, help=help, note=note)
                values[name] = 1
        return values

    def _heads(self, values: dict[str, Any]) -> None:
        """Key/value heads that do not divide the query heads; the same of gated-delta mixers' value heads."""
        for section, many, few in (("attention", "heads", "kv_heads"), ("gdn", "value_heads", "key_heads")):
            for name, entry in getattr(self.model, section).items():
                exprs = [parse(getattr(entry, field)) for field in (many, few)]
                counts = [expr.evaluate(values) for expr in exprs]
                if counts[1] >= 1 and counts[0] % counts[1] == 0:
                    continue
                at: SpecPath = (section, name, few)
                if any(expr.names() for expr in exprs):
                    message = f"`tiny` gives `{name}` {counts[0]} {many}, which is no multiple of its {counts[1]} {few}"
                    self.problems.add("SPEC024", message, TINY, key=True, note=("read here", at))
                else:
                    message = f"`{name}` has {counts[0]} {many}, which is no multiple of its {counts[1]} {few}"
                    self.problems.add("SPEC016", message, at, note=(f"the {many} are here", (section, name, many)))

    def _rotations(self, values: dict[str, Any]) -> None:
        """Rotary tables whose parameters do not fit the width of a head, or each other."""
        position = _look(self.config, "max_position_embeddings") or 0
        for field, name in self.ropes.items():
            widths = {entry.head_dim for entry in self.model.attention.values() if entry.rope == name}
            for width in widths:
                wrong = rope_parameters.misfit(_look(self.config, field), parse(width).evaluate(values), position)
                if wrong:
                    place = (*TINY, *field.split("."))
                    self.problems.add("SPEC024", wrong, place, note=("read here", ("ropes", name)))

    # ------------------------------------------------------------ schedule

    def _schedule(self, values: dict[str, Any]) -> None:
        """Every rule has its field, every value of `by` occurs, and so does every kind: as `tiny` is, or with one flag turned."""
        before = len(self.problems.found)
        for field, reads in self.reads.items():
            for read in reads:
                if read.path[0] == "schedule" and _look(self.config, field) is None:
                    message = f"neither `tiny` nor `defaults` has `{field}`, so nothing shows what this rule does"
                    near = nearest(field, {*self.model.tiny, *self.model.checkpoint.defaults})
                    help = f"did you mean `{near}`?" if near else f"give `{field}` in `tiny`"
                    self.problems.add("SPEC024", message, read.path, help=help)
        for index, rule in enumerate(self.model.schedule):
            for value in rule.kinds or () if rule.by else ():
                if value not in (_look(self.config, rule.by or "") or [value]):
                    message = f"no layer of `tiny` has `{value}` in `{rule.by}`"
                    self.problems.add("SPEC024", message, ("schedule", index, "kinds", value), key=True)
        flags = dict.fromkeys(rule.when for rule in self.model.schedule if rule.when)
        if len(self.problems.found) > before:
            return
        seen: set[str] = set()
        for flag in (None, *flags):
            turned = {} if flag is None else {flag: not _look(self.config, flag)}
            try:
                rules = [self._rule(rule, values, turned) for rule in self.model.schedule]
                seen.update(runtime.resolve(values["layers"], rules))
            except ConfigError as error:
                self.problems.add("SPEC024", f"`tiny` does not fit the schedule: {error}", TINY, key=True)
                return
        for name in self.model.kinds:
            if name not in seen:
                message = f"no layer of `tiny` is of kind `{name}`"
                help = "give `tiny` more layers, or the fields that choose this kind"
                self.problems.add("SPEC024", message, TINY, key=True, help=help, note=("the kind", ("kinds", name)))

    def _rule(self, rule: Rule, values: dict[str, Any], turned: dict[str, bool]) -> runtime.Rule:
        when = True if rule.when is None else turned.get(rule.when, _look(self.config, rule.when))
        target: Any = rule.kind or rule.kinds or {}
        if rule.pattern:
            return runtime.pattern(rule.pattern, when)
        if rule.at or rule.by:
            field = _look(self.config, rule.at or rule.by or "")
            return runtime.at(field, target, when) if rule.at else runtime.by(field, target, when)
        selectors = ((rule.every, runtime.every), (rule.first, runtime.first), (rule.last, runtime.last), (rule.from_, runtime.since))
        for text, selector in selectors:
            if text is not None:
                expr = parse(text)
                own = isinstance(expr, Name) and expr.dotted not in values
                return selector(_look(self.config, text) if own else expr.evaluate(values), target, when)
        return runtime.everywhere(target, when)


# ---------------------------------------------------------------- configs


def merged(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`config` over `defaults`, as the runtime merges them: null counts as absent, mappings field by field."""
    out = dict(config)
    for key, value in defaults.items():
        if out.get(key) is None:
            out[key] = value
        elif isinstance(value, dict) and isinstance(out[key], dict):
            out[key] = merged(out[key], value)
    return out


def fences(checkpoint: Checkpoint) -> dict[str, Any]:
    """`require` as plain data, as generated code holds it."""
    return {
        field: {"min": wanted.min} if isinstance(wanted, AtLeast) else wanted
        for field, wanted in checkpoint.require.items()
    }


def holds(value: Any, wanted: Any) -> bool:
    """Whether a value satisfies a requirement: a value, a list of values, or `{min: n}`."""
    if isinstance(wanted, dict):
        return not isinstance(value, bool) and isinstance(value, int | float) and value >= wanted["min"]
    allowed = wanted if isinstance(wanted, list) else [wanted]
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)


def _same_type(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return _TYPES["float"][1](value)
    return any(_type(value) == _type(item) for item in (wanted if isinstance(wanted, list) else [wanted]))


def _type(value: Any) -> str | None:
    kinds = (("flag", bool), ("number", int | float), ("text", str), ("list", list), ("mapping", dict))
    return next((name for name, kind in kinds if isinstance(value, kind)), None)


def _look(config: Any, field: str) -> Any:
    """The value at a dotted path; None where it is absent, and for `layers.VALUE.field`, which no tiny config has."""
    for key in field.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _has(config: Any, field: str) -> bool:
    *parents, last = field.split(".")
    node = _look(config, ".".join(parents)) if parents else config
    return isinstance(node, dict) and last in node


def _names(config: Any) -> Iterator[str]:
    """The names of a config's fields, at any depth."""
    for key, value in config.items() if isinstance(config, dict) else ():
        yield key
        yield from _names(value)


def _words(name: str) -> set[str]:
    return set(re.split(r"[._]", name))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    text = str(value)
    text = text if len(text) <= 40 else text[:39] + "…"
    reads_as_other = isinstance(value, str) and (value in ("true", "false", "null") or value[:1] in "+-.0123456789")
    return f'`"{text}"`' if reads_as_other else f"`{text}`"
