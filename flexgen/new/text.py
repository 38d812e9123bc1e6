"""Edits of a spec's text that leave everything else, comments included, as it was written."""

from __future__ import annotations

from collections.abc import Mapping

from flexgen.spec.diagnostics import Span, SpecPath
from flexgen.spec.source import Document

MARK = "# TODO decide:"


class Text:
    """A spec's text with values replaced and comments put above lines."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._values: dict[Span, str] = {}
        self._above: dict[int, list[str]] = {}

    def replace(self, path: SpecPath, value: str) -> None:
        """Write another value at a path; the last one counts."""
        self._values[self._document.value_span(path)] = value

    def fill(self, path: SpecPath, fields: Mapping[str, str]) -> None:
        """Write another mapping at a path, a line a field where the old one had that form."""
        span = self._document.value_span(path)
        indent = self._document.lines[span.line - 1][: span.column - 1]
        lines = [f"{field}: {value}" for field, value in fields.items()]
        self._values[span] = f"\n{indent}".join(lines) if indent.isspace() else f"{{{', '.join(lines)}}}"

    def rename(self, path: SpecPath, key: str) -> None:
        """Write another key at a path."""
        self._values[self._document.key_span(path)] = key

    def mark(self, path: SpecPath, question: str) -> None:
        """Put a decision above the line of a path's key."""
        self._comment(path, one_line(f"{MARK} {question}"))

    def insert(self, path: SpecPath, line: str) -> None:
        """Put a line above a path's key, as deep as the key."""
        self._comment(path, line)

    def _comment(self, path: SpecPath, line: str) -> None:
        lines = self._above.setdefault(self._document.key_span(path).line, [])
        if line not in lines:
            lines.append(line)

    def written(self, head: list[str]) -> str:
        """The edited text; `head` goes below the modeline, or on top where there is none."""
        lines: list[str | None] = list(self._document.lines)
        for span, value in sorted(self._values.items(), reverse=True):
            first, last = lines[span.line - 1] or "", lines[span.end_line - 1] or ""
            lines[span.line - 1] = first[: span.column - 1] + value + last[span.end_column - 1 :]
            for number in range(span.line, span.end_line):  # a value of several lines: the rest of them go
                lines[number] = None
        out: list[str] = []
        for number, line in enumerate(lines, 1):
            if line is None:
                continue
            indent = line[: len(line) - len(line.lstrip())]
            out += [indent + above for above in self._above.get(number, ())]
            out.append(line)
        start = 1 if out and out[0].startswith("# yaml-language-server") else 0
        return "\n".join([*out[:start], *map(one_line, head), *out[start:]])


def one_line(text: str) -> str:
    """Text that a comment can hold, whatever it was made of."""
    return "".join(char if char.isprintable() else "?" for char in text)
