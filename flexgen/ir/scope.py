"""What names mean in expressions: `dims` defines them, everything else uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from flexgen.ir.architecture import Dim
from flexgen.ir.code import Size, number
from flexgen.ir.problems import Problems
from flexgen.spec.diagnostics import SpecPath, nearest, slips_between
from flexgen.spec.expressions import Expr, ExpressionError, Name, Number, Or, parse

Want = Literal["int", "float", "bool"]
REQUIRED = ("vocab", "hidden", "layers")
"""Dims that every spec defines: the embedding's rows, the stream's width, the depth."""
_OLD_BOOLEANS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
"""How YAML 1.1 and other languages write them."""


@dataclass(frozen=True)
class Use:
    """A place that reads a dim, and the type it wants there."""

    expr: Expr
    want: Want
    path: SpecPath


class Scope:
    """The dims of one spec: parses them, hands out code that reads them, and knows which were read."""

    def __init__(self, problems: Problems, dims: dict[str, str]) -> None:
        self.problems = problems
        self.exprs: dict[str, Expr] = {}
        self.uses: list[Use] = []
        for name, text in dims.items():
            expr = self._parse(text, ("dims", name))
            self.exprs[name] = expr or Number("1", start=0, end=1)  # so that its users are not reported too
        for name in REQUIRED:
            if name not in dims:
                near = nearest(name, dims.keys() - set(REQUIRED))
                help = f"did you mean `{near}` to be it?" if near else f"add `{name}: CONFIG_FIELD`"
                note = (f"`{near}` is defined here", ("dims", near)) if near else None
                message = f"`dims` lacks `{name}`, which every spec defines"
                problems.add("SPEC005", message, ("dims",), key=True, help=help, note=note)

    def code(self, text: str, path: SpecPath, want: Want = "int") -> Size:
        """An expression over dims as code."""
        expr = self._parse(text, path)
        if expr is None:
            return number(0)
        self._check_given(expr, path)
        return self._code(expr, path, want)

    def _check_given(self, expr: Expr, path: SpecPath) -> None:
        """Report dims that may be none where a number is needed."""
        for name in expr.names():
            other = self.exprs.get(name.dotted)
            if isinstance(other, Or) and other.may_be_none and path != ("dims", name.dotted):
                help = "only a field that can be `none` takes it, by its name alone"
                span, note = (name.start, name.end), ("defined here", ("dims", name.dotted))
                message = f"`{name.dotted}` may be none where a number is needed"
                self.problems.add("SPEC029", message, path, within=span, help=help, note=note)

    def _code(self, expr: Expr, path: SpecPath, want: Want) -> Size:
        for node in expr.walk():
            if isinstance(node, Name) and node.dotted not in self.exprs:
                self._unknown(node, path)
                return number(0)
            if isinstance(node, Or):
                span = (node.start, node.end)
                self.problems.add("SPEC011", "`or` is only for `dims`, where a value can be absent", path, within=span)
                return number(0)
        self.uses.append(Use(expr, want, path))
        return Size(expr)

    def optional(self, text: str, path: SpecPath, want: Want = "float") -> Size | None:
        """As `code`, None for the word `none`; a dim may be none itself."""
        if text == "none":
            return None
        expr = self._parse(text, path)
        if isinstance(expr, Name) and expr.dotted in self.exprs:
            return self._code(expr, path, want)
        return self.code(text, path, want)

    def flag(self, text: str, path: SpecPath) -> bool | Size:
        """`true` and `false` are settled at build time; a dim is code for a flag that the checkpoint settles."""
        if text in ("true", "false"):
            return text == "true"
        expr = self._parse(text, path)
        if not isinstance(expr, Name):
            self.problems.add("SPEC029", f"`{text}` is no flag", path, help="write true, false or the name of a dim")
            return False
        return self.code(text, path, "bool")

    def field(self, text: str, path: SpecPath) -> str:
        """Python for an expression of the schedule: dims, and config fields that may be absent."""
        expr = self._parse(text, path)
        if expr is None:
            return "None"
        if isinstance(expr, Name) and expr.dotted not in self.exprs:
            return f'config.optional("{expr.dotted}")'
        return self.code(text, path).own

    def dims(self) -> tuple[Dim, ...]:
        """One `Dim` per line of the section, typed by how it is used. Reports unused dims and wrong types."""
        wants, divisors = self._wants(), self._divisors()
        lines: list[Dim] = []
        types: dict[str, Want] = {}
        for name, expr in self.exprs.items():
            path = ("dims", name)
            implied = "int" if isinstance(expr, Name) else self._kind(expr, types, path)  # a default may be a float
            kind = wants.get(name, implied) if isinstance(expr, Name | Or) else implied
            if isinstance(expr, Or) and kind == "int" and self._kind(expr, types, path) == "float":
                message = f"`{expr.text()}` can be a float where a whole number is needed"
                self.problems.add("SPEC029", message, path, help="divide with `//`")
            types[name] = kind
            self._check_given(expr, path)
            read = self._read(expr, kind, types, path, name in divisors and kind != "bool")
            lines.append(Dim(name, kind, read, expr.text(), f"dims.{name}"))
        for use in self.uses:
            kind = self._kind(use.expr, types, use.path)
            if use.want == "int" and kind == "float":
                message = f"`{use.expr.text()}` is a float where a whole number is needed"
                self.problems.add("SPEC029", message, use.path, help="divide with `//`")
        used = {name.dotted for use in self.uses for name in use.expr.names()} | set(REQUIRED)
        used |= {n.dotted for name, e in self.exprs.items() for n in e.names() if n.dotted != name}
        for name in self.exprs:
            if name not in used and not self.problems.found:  # a mistake elsewhere may be why
                help = "use it in another section, or remove it"
                self.problems.add("SPEC010", f"dim `{name}` is used by nothing", ("dims", name), key=True, help=help)
        return tuple(lines)

    def _wants(self) -> dict[str, Want]:
        wants: dict[str, Want] = {}
        for use in self.uses:
            if not isinstance(use.expr, Name):
                continue
            name = use.expr.dotted
            before = wants.get(name, use.want)
            if "bool" in (before, use.want) and before != use.want:
                message = f"`{name}` is used both as a flag and as a number"
                self.problems.add("SPEC029", message, use.path)
            wants[name] = "float" if "float" in (before, use.want) else before
        for name, expr in reversed(self.exprs.items()):  # another name for an earlier dim is read as that dim is
            if isinstance(expr, Name) and name in wants and expr.dotted in self.exprs and expr.dotted != name:
                wants.setdefault(expr.dotted, wants[name])
        return wants

    def _divisors(self) -> set[str]:
        """The dims that another one divides by."""
        found = {name.dotted for expr in self.exprs.values() for name in expr.divisors()}
        for name, expr in reversed(self.exprs.items()):  # another name for an earlier dim is that dim
            if name in found and isinstance(expr, Name):
                found.add(expr.dotted)
        return found

    def _kind(self, expr: Expr, types: dict[str, Want], path: SpecPath) -> Want:
        known = {name.dotted: types.get(name.dotted, "int") for name in expr.names()}
        try:
            return cast(Want, expr.kind(known))  # no dim is a list
        except ExpressionError as error:
            self._report(error, path)
            return "int"

    def _read(self, expr: Expr, kind: Want, earlier: dict[str, Want], path: SpecPath, is_divisor: bool) -> str:
        """Python that binds one dim: `config.int("a", "b", default=c)`, or arithmetic over earlier dims."""
        me, nonzero = path[-1], ", nonzero=True" if is_divisor else ""
        reader = {"int": "config.int", "float": "config.float", "bool": "config.flag"}[kind]

        def is_dim(name: Name) -> bool:
            return name.dotted in earlier and name.dotted != me

        if isinstance(expr, Or):
            *names, last = expr.alternatives
            paths = [f'"{name.dotted}"' for name in names if isinstance(name, Name)]
            for name in names:
                if isinstance(name, Name) and name.dotted == "none":
                    message = "nothing is tried after `none`"
                    self.problems.add("SPEC011", message, path, within=(name.start, name.end), help="write it last")
                if isinstance(name, Name) and is_dim(name):
                    message = f"dim `{name.dotted}` is never absent, so what follows `or` would never be used"
                    self.problems.add("SPEC011", message, path, within=(name.start, name.end))
            if expr.may_be_none:
                if kind == "bool":
                    self.problems.add("SPEC029", "a flag cannot be none", path, help="write `or false`")
                return f'{reader}_or_none({", ".join(paths)})'
            if isinstance(last, Name) and not is_dim(last):
                return f'{reader}({", ".join(paths)}, "{last.dotted}"{nonzero})'
            return f"{reader}({', '.join(paths)}, default={self._arithmetic(last, is_dim, path)}{nonzero})"
        if isinstance(expr, Name):
            return f"self.{expr.dotted}" if is_dim(expr) else f'{reader}("{expr.dotted}"{nonzero})'
        return self._arithmetic(expr, is_dim, path)

    def _arithmetic(self, expr: Expr, is_dim: Callable[[Name], bool], path: SpecPath) -> str:
        for node in expr.walk():
            if isinstance(node, Or):
                help = "give it a line of its own in `dims`"
                self.problems.add("SPEC011", "`or` inside arithmetic", path, within=(node.start, node.end), help=help)
        divisors = {name.dotted for name in expr.divisors()}

        def read(name: Name) -> str:
            if is_dim(name):
                return f"self.{name.dotted}"
            return f'config.number("{name.dotted}"{", nonzero=True" if name.dotted in divisors else ""})'

        return expr.python(read)

    def _parse(self, text: str, path: SpecPath) -> Expr | None:
        try:
            return parse(text)
        except ExpressionError as error:
            self._report(error, path)
            return None

    def _report(self, error: ExpressionError, path: SpecPath) -> None:
        self.problems.add(error.code, error.message, path, help=error.help, within=(error.start, error.end))

    def _unknown(self, name: Name, path: SpecPath) -> None:
        near, field = nearest(name.dotted, self.exprs), str(path[-1])
        is_slip = near is not None and slips_between(name.dotted, near) <= 2
        if not is_slip and field in self.exprs and field in name.dotted.split("_"):
            near = field  # `heads: num_heads` means the dim `heads`
        help = f"did you mean `{near}`?" if near else f"define it in `dims`: `{name.dotted}: CONFIG_FIELD`"
        if name.dotted.lower() in _OLD_BOOLEANS:
            help = f"write `{_OLD_BOOLEANS[name.dotted.lower()]}`"
        note = (f"`{near}` is defined here", ("dims", near)) if near else None
        span = (name.start, name.end)
        self.problems.add("SPEC012", f"unknown name `{name.dotted}`", path, help=help, within=span, note=note)
