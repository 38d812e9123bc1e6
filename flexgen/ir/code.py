"""Code that reads dims, as a value: what it computes, and how generated code and messages write it."""

from __future__ import annotations

from flexgen.spec.expression_tree import Binary, Expr, Name, Number


class Size:
    """An expression over dims. As text it is Python over `dims`; sizes multiply and add to sizes."""

    __slots__ = ("expr",)

    def __init__(self, expr: Expr) -> None:
        self.expr = expr

    def __str__(self) -> str:
        return self.expr.python(lambda name: f"dims.{name.dotted}")

    @property
    def own(self) -> str:
        """As the constructor of `Dims` writes it, whose fields are its own."""
        return self.expr.python(lambda name: f"self.{name.dotted}")

    @property
    def label(self) -> str:
        """As a spec writes it."""
        return self.expr.text()

    def __mul__(self, other: Size) -> Size:
        return Size(Binary("*", self.expr, other.expr, start=0, end=0))

    def __add__(self, other: Size) -> Size:
        return Size(Binary("+", self.expr, other.expr, start=0, end=0))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.expr == other.expr

    def __hash__(self) -> int:
        return hash(self.expr)

    def __repr__(self) -> str:
        return f"Size({self.label})"


def number(value: int) -> Size:
    """A whole number."""
    return Size(Number(str(value), start=0, end=0))


def dim(name: str) -> Size:
    """A dim that every spec has, by its name."""
    return Size(Name((name,), start=0, end=0))
