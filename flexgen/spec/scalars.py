"""Plain YAML scalars by the YAML 1.2 core schema, minus what reads as one thing here and another elsewhere."""

from __future__ import annotations

import math
import re

INT_LIMIT = 2**63
"""Integers beyond 64 bits with their sign are refused."""

Scalar = str | int | float | bool | None

_WORDS: dict[str, bool | None] = {
    "": None,
    **dict.fromkeys(("null", "Null", "NULL", "~")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_BASES = ((re.compile(r"0o[0-7]+"), 8), (re.compile(r"0x[0-9a-fA-F]+"), 16))
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Float(float):
    """A float that remembers how it was written, so that `1e-06` prints as `1e-06`."""

    text: str

    def __new__(cls, text: str) -> Float:
        value = super().__new__(cls, text)
        value.text = text
        return value


def resolve(text: str) -> Scalar:
    """The value of a plain scalar.

    `no`, `on`, `12:30`, `1_000` and `0755` are strings. Raises ValueError, whose text is for the user, for a number
    that is not finite or does not fit 64 bits.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _DECIMAL.fullmatch(text):
        return _integer(text, 10)
    for pattern, base in _BASES:
        if pattern.fullmatch(text):
            return _integer(text[2:], base)
    if _FLOAT.fullmatch(text):
        value = Float(text)
        if math.isinf(value):
            raise ValueError("the number is too large for a float: at most about 1.8e308")
        return value
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("infinity and not-a-number are not values of a spec")
    return text


def _integer(digits: str, base: int) -> int:
    if len(digits) > 64 or not -INT_LIMIT <= (value := int(digits, base)) < INT_LIMIT:
        raise ValueError("the integer is out of range: at most 64 bits with its sign")
    return value
