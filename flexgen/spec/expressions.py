"""Reading the arithmetic of specs: `head_dim or hidden_size // num_attention_heads`. Never `eval`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, cast

from flexgen.spec.expression_tree import (
    Binary,
    Call,
    Expr,
    ExpressionError,
    Kind,
    Name,
    Number,
    Operator,
    Or,
    Unary,
)
from flexgen.spec.scalars import INT_LIMIT

__all__ = [
    "MAX_DEPTH",
    "MAX_LENGTH",
    "Binary",
    "Call",
    "Expr",
    "ExpressionError",
    "Kind",
    "Name",
    "Number",
    "Or",
    "Unary",
    "parse",
]

MAX_LENGTH = 200
"""Characters of an expression, blanks not counted."""

MAX_DEPTH = 32
"""Parentheses, calls and signs within each other."""

_FUNCTIONS = ("min", "max", "sqrt")
_RESERVED = (*_FUNCTIONS, "or")
_TOKEN = re.compile(
    r"""(?P<blank>[ \n]+)
    |(?P<number>(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)
    |(?P<symbol>//|[-+*/(),])""",
    re.VERBOSE,
)
_ADVICE = {
    "%": "there is no remainder; `//` divides integers",
    "^": "there are no powers; `sqrt` is the only root",
    "{": "names are written without braces",
    "'": "names are written without quotes",
    '"': "names are written without quotes",
    "=": "comparisons belong in `require`",
    "<": "comparisons belong in `require`",
    ">": "comparisons belong in `require`",
}
_ALLOWED = "an expression holds names, numbers, `+ - * / // ( )`, `min`, `max`, `sqrt` and `or`"


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int

    @property
    def shown(self) -> str:
        return "the end" if self.kind == "end" else f"`{self.text}`"


def parse(text: str) -> Expr:
    """Parse an expression. Raises ExpressionError with the place in `text` and what to write instead."""
    return _Parser(_tokens(text)).parse()


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = counted = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            char = text[position]
            raise ExpressionError(f"`{char}` cannot be used here", position, position + 1, _ADVICE.get(char, _ALLOWED))
        kind = match.lastgroup or ""
        if kind != "blank":
            tokens.append(_Token(kind, match.group(), position, match.end()))
            counted += match.end() - position
        position = match.end()
        if counted > MAX_LENGTH:
            advice = "name parts of it in `dims`"
            raise ExpressionError(f"the expression is longer than {MAX_LENGTH} characters", 0, len(text), advice)
    return [*tokens, _Token("end", "", len(text), len(text))]


class _Parser:
    """Recursive descent over the tokens: or, sum, product, sign, atom."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self.tokens = tokens
        self.index = 0
        self.depth = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.index]

    def take(self) -> _Token:
        token = self.token
        self.index += token.kind != "end"
        return token

    def take_symbol(self, *symbols: str) -> _Token | None:
        return self.take() if self.token.kind == "symbol" and self.token.text in symbols else None

    def fail(self, message: str, token: _Token, help: str | None = None) -> NoReturn:
        raise ExpressionError(message, token.start, token.end, help)

    def parse(self) -> Expr:
        if self.token.kind == "end":
            self.fail("the expression is empty", self.token, "write a number, a name or arithmetic with them")
        expr = self.alternatives()
        if self.token.kind != "end":
            self.fail_after(self.tokens[self.index - 1], self.token)
        return expr

    def fail_after(self, before: _Token, token: _Token) -> NoReturn:
        """Refuse what follows a complete operand."""
        if token.text == "(" and before.kind == "name":
            functions = ", ".join(f"`{name}`" for name in _FUNCTIONS)
            self.fail(f"there is no function `{before.text}`", before, f"the functions are {functions}")
        advice = None
        if token.text.startswith("_") and token.start == before.end:
            advice = "numbers are written without `_`"
        elif token.kind == "number" and before.text == "0":
            advice = "numbers are written without leading zeros"
        self.fail(f"expected an operator, found {token.shown}", token, advice)

    def alternatives(self) -> Expr:
        operands = [self.sum()]
        while self.token.text == "or":
            self.take()
            operands.append(self.sum())
        if len(operands) == 1:
            return operands[0]
        found = [one for expr in operands for one in (expr.alternatives if isinstance(expr, Or) else [expr])]
        for expr in found[:-1]:
            if not isinstance(expr, Name):
                advice = "only a name can be absent, so what follows would never be used"
                raise ExpressionError("`or` after something that is never absent", expr.start, expr.end, advice)
        return Or(tuple(found), start=operands[0].start, end=operands[-1].end)

    def sum(self) -> Expr:
        return self.chain(self.product, "+", "-")

    def product(self) -> Expr:
        return self.chain(self.sign, "*", "/", "//")

    def chain(self, operand: Callable[[], Expr], *operators: Operator) -> Expr:
        left = operand()
        while token := self.take_symbol(*operators):
            right = operand()
            left = Binary(cast(Operator, token.text), left, right, start=left.start, end=right.end)
        return left

    def sign(self) -> Expr:
        minus = self.take_symbol("-")
        if minus is None:
            return self.atom()
        operand = self.nested(minus, self.sign)
        return Unary(operand, start=minus.start, end=operand.end)

    def nested(self, opener: _Token, read: Callable[[], Expr]) -> Expr:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"the expression is nested more than {MAX_DEPTH} deep", opener, "name parts of it in `dims`")
        expr = read()
        self.depth -= 1
        return expr

    def atom(self) -> Expr:
        token = self.take()
        if token.kind == "number":
            return self.number(token)
        if token.kind == "name" and token.text not in _RESERVED:
            return Name(tuple(token.text.split(".")), start=token.start, end=token.end)
        if token.text in _FUNCTIONS:
            return self.call(token)
        if token.text == "(":
            expr = self.nested(token, self.alternatives)
            return replace(expr, start=token.start, end=self.close(token).end)
        self.fail(f"expected a name, a number or `(`, found {token.shown}", token)

    def number(self, token: _Token) -> Number:
        number = Number(token.text, start=token.start, end=token.end)
        if isinstance(number.value, int) and number.value >= INT_LIMIT:
            self.fail("the integer does not fit 64 bits", token)
        if math.isinf(number.value):
            self.fail("the number is too large for a float", token, "a float is at most about 1.8e308")
        return number

    def call(self, function: _Token) -> Call:
        opener = self.take_symbol("(")
        if opener is None:
            self.fail(f"`{function.text}` is a function", function, f"write `{function.text}(…)`, or another name")
        arguments = [self.nested(opener, self.alternatives)]
        while self.take_symbol(","):
            arguments.append(self.nested(opener, self.alternatives))
        closer = self.close(opener)
        if (len(arguments) == 1) != (function.text == "sqrt"):
            wanted = "one argument" if function.text == "sqrt" else "two or more arguments"
            message = f"`{function.text}` takes {wanted}, not {len(arguments)}"
            raise ExpressionError(message, function.start, closer.end)
        return Call(function.text, tuple(arguments), start=function.start, end=closer.end)

    def close(self, opener: _Token) -> _Token:
        closer = self.take_symbol(")")
        if closer is None and self.token.kind == "end":
            self.fail("expected `)`", self.token, f"the `(` at character {opener.start + 1} is still open")
        if closer is None:
            self.fail_after(self.tokens[self.index - 1], self.token)
        return closer
