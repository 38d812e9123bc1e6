"""What an expression of a spec means: its names, its type, its value, and how it is written. Never `eval`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

from flexgen.errors import FlexgenError
from flexgen.spec.scalars import INT_LIMIT

Kind = Literal["int", "float", "bool", "list"]
Operator = Literal["+", "-", "*", "/", "//"]

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
}

# How tightly a form binds; an operand that binds less tightly is put in parentheses.
_OR, _SUM, _PRODUCT, _SIGN, _ATOM = range(5)


class ExpressionError(FlexgenError):
    """A mistake in an expression, at the characters [start, end) of its text. `code` is the diagnostic's."""

    def __init__(self, message: str, start: int, end: int, help: str | None = None, code: str = "SPEC011") -> None:
        super().__init__(message)
        self.message = message
        self.start = start
        self.end = end
        self.help = help
        self.code = code


@dataclass(frozen=True)
class Expr:
    """An expression, at the characters [start, end) of its text. Two are equal where they read the same."""

    start: int = field(compare=False, kw_only=True)
    end: int = field(compare=False, kw_only=True)
    binding: ClassVar[int] = _ATOM

    def children(self) -> tuple[Expr, ...]:
        """The operands, left to right."""
        return ()

    def walk(self) -> Iterator[Expr]:
        """This expression and all within it, each before its operands."""
        yield self
        for child in self.children():
            yield from child.walk()

    def names(self) -> list[Name]:
        """Every name in the expression, in order, each time that it occurs; `none` is no name of anything."""
        return [node for node in self.walk() if isinstance(node, Name) and node.dotted != "none"]

    def divisors(self) -> list[Name]:
        """The names that the expression divides by: none of them can be 0."""
        divided = (node.right for node in self.walk() if isinstance(node, Binary) and "/" in node.operator)
        return [name for divisor in divided for name in divisor.factors()]

    def factors(self) -> list[Name]:
        """The names that make the expression 0 where one of them is."""
        return []

    def text(self) -> str:
        """The expression in canonical form: one blank around operators, no parentheses that change nothing."""
        return self._render(_Form(lambda name: name.dotted, "sqrt", " or ".join))

    def python(self, name: Callable[[Name], str]) -> str:
        """The expression as Python source; `name` gives the source of a name, which must bind as tightly as a name.

        A name with alternatives gives None where it is absent.
        """
        return self._render(_Form(name, "math.sqrt", _first_that_is_not_none))

    def kind(self, types: Mapping[str, Kind]) -> Kind:
        """The type of the result, given that of each name. Raises ExpressionError where there is none."""
        raise NotImplementedError

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """The result, given each name's value; a missing key and None are absent.

        Raises ExpressionError where a name is absent and has no alternative, or arithmetic has no finite result.
        """
        raise NotImplementedError

    def _render(self, form: _Form) -> str:
        raise NotImplementedError

    def _operand(self, form: _Form, binding: int) -> str:
        """The rendering, in parentheses where it binds less tightly than `binding`."""
        text = self._render(form)
        return text if self.binding >= binding else f"({text})"

    def _fail(self, message: str, help: str | None = None, code: str = "SPEC029") -> NoReturn:
        raise ExpressionError(message, self.start, self.end, help, code)

    def _number_kind(self, types: Mapping[str, Kind]) -> Literal["int", "float"]:
        """The type as an operand of arithmetic, where a bool counts as an int."""
        kind = self.kind(types)
        if kind == "list":
            self._fail(f"`{self.text()}` is a list, and lists have no arithmetic")
        return "float" if kind == "float" else "int"

    def _number(self, values: Mapping[str, Any]) -> int | float:
        """The value as an operand of arithmetic."""
        value = self.evaluate(values)
        if not isinstance(value, int | float):
            self._fail(f"`{self.text()}` is {_shown(value)}, not a number")
        if isinstance(value, float) and not math.isfinite(value):
            self._fail(f"`{self.text()}` is {value}, not a finite number")
        return int(value) if isinstance(value, bool) else value


@dataclass(frozen=True)
class _Form:
    """A way to write an expression: its names, its square root, and its alternatives."""

    name: Callable[[Name], str]
    sqrt: str
    either: Callable[[Sequence[str]], str]


def _first_that_is_not_none(alternatives: Sequence[str]) -> str:
    *tried, last = alternatives
    return "".join(f"{text} if {text} is not None else " for text in tried) + last


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


@dataclass(frozen=True)
class Number(Expr):
    """A number as written. Without point and exponent it is an int."""

    source: str

    @property
    def value(self) -> int | float:
        """The number."""
        return int(self.source) if self.source.isdigit() else float(self.source)

    def kind(self, types: Mapping[str, Kind]) -> Kind:
        return "int" if self.source.isdigit() else "float"

    def evaluate(self, values: Mapping[str, Any]) -> int | float:
        return self.value

    def _render(self, form: _Form) -> str:
        return self.source


@dataclass(frozen=True)
class Name(Expr):
    """A name, or a path of names joined by dots."""

    parts: tuple[str, ...]

    @property
    def dotted(self) -> str:
        """The name as written."""
        return ".".join(self.parts)

    def kind(self, types: Mapping[str, Kind]) -> Kind:
        if self.dotted not in types:
            self._fail(f"unknown name `{self.dotted}`", code="SPEC012")
        return types[self.dotted]

    def factors(self) -> list[Name]:
        return [self]

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        value = values.get(self.dotted)
        if value is None:
            self._fail(f"`{self.dotted}` is absent", f"give an alternative: `{self.dotted} or …`", "SPEC012")
        return value

    def _render(self, form: _Form) -> str:
        return form.name(self)


@dataclass(frozen=True)
class Unary(Expr):
    """`-operand`"""

    operand: Expr
    binding: ClassVar[int] = _SIGN

    def children(self) -> tuple[Expr, ...]:
        return (self.operand,)

    def kind(self, types: Mapping[str, Kind]) -> Kind:
        return self.operand._number_kind(types)

    def factors(self) -> list[Name]:
        return self.operand.factors()

    def evaluate(self, values: Mapping[str, Any]) -> int | float:
        return -self.operand._number(values)

    def _render(self, form: _Form) -> str:
        return "-" + self.operand._operand(form, _SIGN)


@dataclass(frozen=True)
class Binary(Expr):
    """`left operator right`; operators of one rank group from the left."""

    operator: Operator
    left: Expr
    right: Expr

    @property
    def binding(self) -> int:  # type: ignore[override]
        return _SUM if self.operator in "+-" else _PRODUCT

    def children(self) -> tuple[Expr, ...]:
        return self.left, self.right

    def kind(self, types: Mapping[str, Kind]) -> Kind:
        kinds = [child._number_kind(types) for child in self.children()]
        if self.operator == "//":
            for child, kind in zip(self.children(), kinds):
                if kind == "float":
                    self._refuse_floor(child)
        return "float" if self.operator == "/" or "float" in kinds else "int"

    def factors(self) -> list[Name]:
        if self.operator == "*":
            return [*self.left.factors(), *self.right.factors()]
        return self.left.factors() if self.operator == "/" else []

    def evaluate(self, values: Mapping[str, Any]) -> int | float:
        left, right = self.left._number(values), self.right._number(values)
        if self.operator == "//":
            for child, value in zip(self.children(), (left, right)):
                if isinstance(value, float):
                    self._refuse_floor(child)
        if right == 0 and "/" in self.operator:
            self.right._fail(f"`{self.text()}` divides by zero")
        return _bounded(self, lambda: _ARITHMETIC[self.operator](left, right))

    def _refuse_floor(self, child: Expr) -> NoReturn:
        child._fail(f"`{child.text()}` is a float, and `//` divides integers", "divide with `/`")

    def _render(self, form: _Form) -> str:
        left = self.left._operand(form, self.binding)
        return f"{left} {self.operator} {self.right._operand(form, self.binding + 1)}"


@dataclass(frozen=True)
class Call(Expr):
    """`min(...)`, `max(...)` of two or more, `sqrt(...)` of one."""

    function: str
    arguments: tuple[Expr, ...]

    def children(self) -> tuple[Expr, ...]:
        return self.arguments

    def kind(self, types: Mapping[str, Kind]) -> Kind:
        kinds = [argument._number_kind(types) for argument in self.arguments]
        return "float" if self.function == "sqrt" or "float" in kinds else "int"

    def factors(self) -> list[Name]:
        return self.arguments[0].factors() if self.function == "sqrt" else []

    def evaluate(self, values: Mapping[str, Any]) -> int | float:
        numbers = [argument._number(values) for argument in self.arguments]
        if self.function != "sqrt":
            return min(numbers) if self.function == "min" else max(numbers)
        if numbers[0] < 0:
            self.arguments[0]._fail(f"`{self.text()}` is the square root of {_shown(numbers[0])}")
        return _bounded(self, lambda: math.sqrt(numbers[0]))

    def _render(self, form: _Form) -> str:
        function = form.sqrt if self.function == "sqrt" else self.function
        return f"{function}({', '.join(argument._render(form) for argument in self.arguments)})"


@dataclass(frozen=True)
class Or(Expr):
    """The first alternative that is neither absent nor null; 0 and false count. All but the last are names, which may be `none`."""

    alternatives: tuple[Expr, ...]
    binding: ClassVar[int] = _OR

    def children(self) -> tuple[Expr, ...]:
        return self.alternatives

    def kind(self, types: Mapping[str, Kind]) -> Kind:
        kinds = [each.kind(types) for each in (self.alternatives[:-1] if self.may_be_none else self.alternatives)]
        if "list" in kinds and set(kinds) != {"list"}:
            odd = self.alternatives[kinds.index("list")]
            odd._fail(f"`{odd.text()}` is a list, and its alternatives are not")
        return max(set(kinds), key=("bool", "int", "float", "list").index)

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        for name in self.alternatives[:-1]:
            assert isinstance(name, Name)
            if values.get(name.dotted) is not None:
                return name.evaluate(values)
        return None if self.may_be_none else self.alternatives[-1].evaluate(values)

    @property
    def may_be_none(self) -> bool:
        """Whether the last alternative is the word `none`: nothing takes the place of what is absent."""
        return self.alternatives[-1] == Name(("none",), start=0, end=0)

    def _render(self, form: _Form) -> str:
        return form.either([alternative._render(form) for alternative in self.alternatives])


def _bounded(expr: Expr, compute: Callable[[], int | float]) -> int | float:
    """The result where it is finite and, as an integer, fits 64 bits with its sign."""
    try:
        result = compute()
    except OverflowError:  # an integer too large for a float
        result = math.inf
    if isinstance(result, float) and not math.isfinite(result):
        expr._fail(f"`{expr.text()}` is too large for a float")
    if isinstance(result, int) and not -INT_LIMIT <= result < INT_LIMIT:
        expr._fail(f"`{expr.text()}` does not fit 64 bits")
    return result
