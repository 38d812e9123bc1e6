"""PyYAML's syntax errors in words for the author of a spec."""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml


@dataclass(frozen=True)
class SyntaxAdvice:
    """What is wrong and what to do. `at_start`: it is shown where the unfinished thing starts, not where it broke off.

    `in_brackets`: it helps to see where the bracket was opened.
    """

    message: str
    help: str
    code: str = "SPEC001"
    at_start: bool = False
    in_brackets: bool = False


_REFUSED_FEATURE = SyntaxAdvice(
    "anchors, aliases, tags and directives are not part of the language",
    "quote text that starts with `&`, `*`, `!` or `%`; entries share fields with `like`",
    "SPEC002",
)
_FEATURE_CONTEXTS = (
    "scanning an alias",
    "scanning an anchor",
    "scanning a tag",
    "parsing a tag",
    "scanning a directive",
)
_FEATURE_PROBLEMS = ("found incompatible YAML document", "found duplicate", "found undefined tag handle")
_OPEN_QUOTE = "the quote is never closed"
_LONE_KEY = "expected `:` after this"
_INDENTATION = "give the keys of one mapping the same indentation, and close every bracket and quote above"

# Pattern of PyYAML's problem, our message (with the pattern's groups), and advice; the first that matches is used.
_PROBLEMS: tuple[tuple[str, str, str], ...] = (
    (
        r"mapping values are not allowed here",
        "a `:` cannot stand here",
        "quote text that holds `: `, and check that this line is indented like its neighbours",
    ),
    (r"sequence entries are not allowed here", "a `-` cannot stand here", "start the list on a line of its own"),
    (
        r"expected ',' or '([\]}])', but got .*",
        "expected `,` or `{0}`",
        "close the bracket, separate the entries with commas, and quote text that holds brackets, commas or `: `",
    ),
    (
        r"found unexpected end of stream|found unexpected document separator",
        _OPEN_QUOTE,
        "end the text with the quote that starts it; within '…' a quote is written twice",
    ),
    (r"found character '(.)' that cannot start any token", "text cannot start with `{0}`", "quote the text"),
    (
        r"could not find expected ':'",
        _LONE_KEY,
        "a line reads `key: value`; text that runs over several lines is indented or quoted",
    ),
    (
        r"expected <block end>, but found '([\]}])'",
        "`{0}` closes nothing",
        "remove it, or add the bracket that it closes",
    ),
    (r"expected <block end>, but found .*", "this line does not fit the lines above", _INDENTATION),
    (r"expected '<document start>'.*", "this line does not fit the lines above", _INDENTATION),
    (
        r"expected the node content, but found '<stream end>'",
        "the file ends where a value should stand",
        "give the value, and close every bracket above",
    ),
    (
        r"expected the node content, but found '<?(.*?)>?'",
        "expected a value, found `{0}`",
        "give a value, or quote the text",
    ),
    (
        r"found unknown escape character '(.)'|expected escape sequence .*",
        "this is not an escape",
        "write text with backslashes in single quotes",
    ),
    (
        r"expected chomping or indentation indicators, .*|expected a comment or a line break, .*",
        "text after `|` or `>` starts on the next line",
        "move the text to the next line and indent it",
    ),
)
_UNKNOWN = SyntaxAdvice("this cannot be read as YAML", "compare the line with its neighbours, and quote text")


def explain_syntax(error: yaml.MarkedYAMLError) -> SyntaxAdvice:
    """Our words for a syntax error."""
    problem, context = error.problem or "", error.context or ""
    if context.endswith(_FEATURE_CONTEXTS) or problem.startswith(_FEATURE_PROBLEMS):
        return _REFUSED_FEATURE
    for pattern, message, advice in _PROBLEMS:
        if match := re.fullmatch(pattern, problem):
            at_start = message in (_OPEN_QUOTE, _LONE_KEY)
            in_brackets = context in ("while parsing a flow sequence", "while parsing a flow mapping")
            return SyntaxAdvice(message.format(*match.groups()), advice, at_start=at_start, in_brackets=in_brackets)
    return _UNKNOWN
