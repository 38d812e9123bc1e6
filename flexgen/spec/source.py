"""A spec file as data with positions. In: the bytes of a file. Out: a `Document`, or every problem of it at once."""

from __future__ import annotations

import itertools
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
)

from flexgen.spec.diagnostics import Diagnostic, Note, Span, SpecError, SpecPath
from flexgen.spec.scalars import Float, Scalar, resolve
from flexgen.spec.yaml_errors import explain_syntax

__all__ = ["MAX_BYTES", "MAX_DEPTH", "Document", "Float", "Span", "load", "split_lines"]

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
"""Collections within each other."""

_BREAK = re.compile(r"\r\n|\r|\n")
# All but printable characters and line ends: controls, line separators, marks that reorder text, halves of characters.
_UNUSABLE = re.compile(
    r"[^\n\x20-\x7e\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_WORD = re.compile(r"[^\s,\]}]+")
_START = Span(1, 1, 1, 1)
_NO_ALIAS = "write the fields out, or share them with `like`"
_WRITE_A_SPEC = "a spec starts with `flexgen: 1` and `name: …`; `flexgen new` writes a first draft"


@dataclass(frozen=True)
class Document:
    """A spec file.

    path   the file as the user named it
    lines  its lines without their ends
    data   dict, list, str, int, bool and None; floats are `Float`. Keys are the text of the key, whatever it looks like
    """

    path: str
    lines: tuple[str, ...]
    data: dict[str, Any]
    _keys: dict[SpecPath, Span] = field(repr=False)
    _values: dict[SpecPath, Span] = field(repr=False)

    def key_span(self, path: SpecPath) -> Span:
        """Where the key of `path` stands; of a list's item, the item; of the root, the file's beginning."""
        return self._keys[path]

    def value_span(self, path: SpecPath) -> Span:
        """Where the value of `path` stands."""
        return self._values[path]

    def source(self, path: SpecPath) -> str:
        """The value of `path` as written, quotes included."""
        span = self._values[path]
        lines = list(self.lines[span.line - 1 : span.end_line])
        lines[-1] = lines[-1][: span.end_column - 1]
        lines[0] = lines[0][span.column - 1 :]
        return "\n".join(lines)

    def part_span(self, path: SpecPath, start: int, end: int) -> Span:
        """Where the characters [start, end) of a scalar stand; all of it where folding or escapes hide that."""
        span, written, value = self._values[path], self.source(path), self.data_at(path)
        quotes = 1 if isinstance(value, str) and written[1:-1] == value else 0
        if span.line != span.end_line or (isinstance(value, str) and not quotes and written != value):
            return span
        first = span.column + quotes
        return Span(span.line, first + start, span.line, first + end)

    def data_at(self, path: SpecPath) -> Any:
        """The value of `path`."""
        value: Any = self.data
        for step in path:
            value = value[step]
        return value


def split_lines(text: bytes | str) -> tuple[str, ...]:
    """The lines of a file as diagnostics count them, for showing; bytes that are not UTF-8 become U+FFFD."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return tuple(_BREAK.split(text.removeprefix("\ufeff")))


def load(text: bytes | str, path: str) -> Document:
    """Read a spec file. Raises SpecError with all problems found; `path` is what their messages call the file."""
    return _Composer(_decode(text, path), path).document()


def _decode(text: bytes | str, path: str) -> str:
    """The text with `\\n` at line ends and without a byte order mark."""
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        message = f"the file has {size:,} bytes, more than the {MAX_BYTES:,} of the largest spec"
        raise SpecError([Diagnostic("SPEC028", message, path, _START, "check that this is a spec")])
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            before = split_lines(text[: error.start])
            span = Span(len(before), len(before[-1]) + 1, len(before), len(before[-1]) + 2)
            message = f"byte 0x{text[error.start]:02x} is not UTF-8"
            raise SpecError([Diagnostic("SPEC028", message, path, span, "save the file as UTF-8")]) from None
    return "\n".join(split_lines(text))


class _Events(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):
    """PyYAML's event stream, of text."""

    def __init__(self, text: str) -> None:
        yaml.reader.Reader.__init__(self, text)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)


@dataclass
class _Entry:
    """A key of a flow mapping, with its value where that is plain text, to tell what a comma has cut off."""

    key: str
    span: Span
    bare: bool
    text: str | None


class _Composer:
    """Builds the data and the positions of one file from its events, and collects what is wrong with it."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.lines = tuple(text.split("\n"))
        self.problems: list[Diagnostic] = []
        self.keys: dict[SpecPath, Span] = {(): _START}
        self.values: dict[SpecPath, Span] = {}
        self.text = self.usable(text)
        self.events = _Events(self.text)

    def document(self) -> Document:
        misread = bool(self.problems)  # what was replaced to read on may look like a mistake of its own
        try:
            data = self.root()
        except yaml.MarkedYAMLError as error:
            if not misread:
                self.refuse_syntax(error)
            raise SpecError(self.problems) from None
        except (ValueError, OverflowError):  # PyYAML converts an escape such as "\\UFFFFFFFF" without a look
            self.refuse("SPEC001", "this is not a character", self.here(), "escapes end at \\U0010FFFF")
            raise SpecError(self.problems) from None
        if self.problems:
            raise SpecError(self.problems)
        return Document(self.path, self.lines, data, self.keys, self.values)

    def refuse(self, code: str, message: str, span: Span, help: str, *notes: Note) -> None:
        self.problems.append(Diagnostic(code, message, self.path, span, help, notes))

    def refuse_syntax(self, error: yaml.MarkedYAMLError) -> None:
        advice = explain_syntax(error)
        at = error.context_mark if advice.at_start else error.problem_mark
        opened = error.context_mark if advice.in_brackets else None
        notes = [Note("the bracket is opened here", self.path, _span(opened))] if opened else []
        self.refuse(advice.code, advice.message, _span(at) if at else self.here(), advice.help, *notes)

    def refuse_features(self, event: NodeEvent) -> None:
        """Refuse an alias, an anchor or a tag of a node."""
        if isinstance(event, AliasEvent):
            self.refuse("SPEC002", f"`*{event.anchor}` is an alias", self.word(event), _NO_ALIAS)
            return
        if event.anchor is not None:
            self.refuse("SPEC002", f"`&{event.anchor}` is an anchor", self.word(event), _NO_ALIAS)
        if getattr(event, "tag", None) is not None:
            advice = "remove the tag; quote the value where it is text"
            self.refuse("SPEC002", "tags are not part of the language", self.word(event), advice)

    def usable(self, text: str) -> str:
        """The text with each character that no spec may hold replaced, and refused at its first place."""
        found: dict[str, list[Span]] = {}
        for number, line in enumerate(self.lines, 1):
            for match in _UNUSABLE.finditer(line):
                found.setdefault(match.group(), []).append(Span(number, match.start() + 1, number, match.end() + 1))
        for char, spans in found.items():
            lines = len({span.line for span in spans})
            notes = [Note(f"{lines:,} lines hold one")] if lines > 1 else []
            name, advice = ("a tab", "indent and separate with blanks") if char == "\t" else (_named(char), "remove it")
            self.refuse("SPEC002", f"{name} cannot be used in a spec", spans[0], advice, *notes)
        return _UNUSABLE.sub(" ", text)

    def here(self) -> Span:
        return _span(self.events.get_mark())

    def word(self, event: NodeEvent) -> Span:
        """The anchor, alias or tag that a node starts with."""
        line, start = event.start_mark.line, event.start_mark.column
        match = _WORD.match(self.lines[line], start)
        return Span(line + 1, start + 1, line + 1, 1 + (match.end() if match else start + 1))

    def scalar_span(self, event: ScalarEvent) -> Span:
        """Where a scalar stands, without the blank lines that block style counts as part of it."""
        span = _span(event.start_mark, event.end_mark)
        if event.style not in ("|", ">"):
            return span
        written = self.text[event.start_mark.index : event.end_mark.index].rstrip().split("\n")
        column = len(written[-1]) + (event.start_mark.column if len(written) == 1 else 0)
        return Span(span.line, span.column, span.line + len(written) - 1, column + 1)

    def root(self) -> Any:
        self.events.get_event()
        data = None
        if self.events.check_event(DocumentStartEvent):
            self.start_document()
            data = self.node((), 0)
        self.events.get_event()
        if self.events.check_event(DocumentStartEvent):
            span = _span(self.events.peek_event().start_mark)
            self.refuse("SPEC002", "a second document starts here", span, "a file holds one spec: remove the `---`")
        if not isinstance(data, dict) and not self.problems:
            message = "the file is empty" if data is None else "the top level is not a mapping"
            self.refuse("SPEC028", message, _START, _WRITE_A_SPEC)
        return data

    def start_document(self) -> None:
        event = self.events.get_event()
        if event.version or event.tags:
            advice = "remove the lines that start with `%`"
            self.refuse("SPEC002", "directives are not part of the language", _span(event.start_mark), advice)

    def node(self, path: SpecPath, depth: int) -> Any:
        """The value of the next node; its position goes to `values`."""
        event = self.events.get_event()
        self.refuse_features(event)
        if isinstance(event, CollectionStartEvent):
            return self.collection(event, path, depth + 1)
        self.values[path] = self.scalar_span(event) if isinstance(event, ScalarEvent) else self.word(event)
        return self.scalar(event) if isinstance(event, ScalarEvent) else None

    def collection(self, start: CollectionStartEvent, path: SpecPath, depth: int) -> Any:
        if depth > MAX_DEPTH:
            message = f"nested more than {MAX_DEPTH} deep"
            self.refuse("SPEC028", message, _span(start.start_mark), "check that this is a spec")
            raise SpecError(self.problems)
        is_mapping = isinstance(start, MappingStartEvent)
        data = self.mapping(start, path, depth) if is_mapping else self.sequence(path, depth)
        end = self.events.get_event()
        span = _span(start.start_mark, end.end_mark)
        if not start.flow_style and data:  # a block ends where its last value does, not where the next key starts
            last = self.values[(*path, next(reversed(data)) if is_mapping else len(data) - 1)]
            span = Span(span.line, span.column, last.end_line, last.end_column)
        self.values[path] = span
        return data

    def sequence(self, path: SpecPath, depth: int) -> list[Any]:
        data: list[Any] = []
        while not self.events.check_event(SequenceEndEvent):
            here = (*path, len(data))
            data.append(self.node(here, depth))
            self.keys[here] = self.values[here]
        return data

    def mapping(self, start: MappingStartEvent, path: SpecPath, depth: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        entries: list[_Entry] = []
        while not self.events.check_event(MappingEndEvent):
            event = self.events.peek_event()
            key = self.key()
            here = (*path, key)
            span = _span(event.start_mark, event.end_mark)
            if key in data:
                note = Note("first defined here", self.path, self.keys[here])
                self.refuse("SPEC003", f"`{key}` is defined twice", span, "remove one of the two", note)
            self.keys.setdefault(here, span)
            value_event = self.events.peek_event()
            data[key] = self.node(here, depth)
            if start.flow_style:
                entries.append(self.entry(key, span, event, value_event))
        self.refuse_cut_text(entries)
        return data

    def key(self) -> str:
        """The next key as text; one that is no text is refused and stands for nothing."""
        event = self.events.get_event()
        if isinstance(event, CollectionStartEvent):  # what follows would all be misread
            self.refuse("SPEC002", "a key must be text", _span(event.start_mark), "write `key: value`")
            raise SpecError(self.problems)
        self.refuse_features(event)
        if not isinstance(event, ScalarEvent):
            return ""
        span = self.scalar_span(event)
        if event.style is None and event.value == "<<":
            self.refuse("SPEC002", "`<<` is a merge key", span, _NO_ALIAS)
        elif not event.value:
            self.refuse("SPEC001", "a key is missing before `:`", span, "write `key: value`")
        else:
            self.check_text(event.value, span)
        return event.value

    def scalar(self, event: ScalarEvent) -> Scalar:
        span = self.scalar_span(event)
        if event.style is not None:
            self.check_text(event.value, span)
            return event.value
        try:
            return resolve(event.value)
        except ValueError as error:
            self.refuse("SPEC027", f"{_short(event.value)}: {error}", span, "quote it where it is text")
            return None

    def check_text(self, text: str, span: Span) -> None:
        """Refuse what escapes such as `"\\e"` bring in."""
        if char := _UNUSABLE.search(text):
            self.refuse("SPEC002", f"{_named(char.group())} cannot be used in a spec", span, "remove the escape")

    def entry(self, key: str, span: Span, key_event: Event, value_event: Event) -> _Entry:
        text = value_event.value if isinstance(value_event, ScalarEvent) and value_event.style is None else None
        is_empty = text == "" and value_event.start_mark.index == value_event.end_mark.index
        has_colon = ":" in self.text[key_event.end_mark.index : value_event.start_mark.index]
        if is_empty and has_colon:
            self.refuse("SPEC026", f"`{key}` has no value", span, f"write `{key}: none`, or `null` in a config")
        return _Entry(key, span, is_empty and not has_colon, text)

    def refuse_cut_text(self, entries: list[_Entry]) -> None:
        """Refuse keys without `:` between braces, once for each text that commas cut into them."""
        before: _Entry | None = None
        for index, entry in enumerate(entries):
            if not entry.bare:
                before = entry
            elif index == 0 or not entries[index - 1].bare:
                rest = [entry.key]
                rest += [other.key for other in itertools.takewhile(lambda other: other.bare, entries[index + 1 :])]
                self.refuse_bare(entry, before, rest)

    def refuse_bare(self, entry: _Entry, before: _Entry | None, rest: list[str]) -> None:
        if ":" in entry.key:
            name, _, value = entry.key.partition(":")
            advice = f"put a blank after the `:`: `{name}: {value}`"
            self.refuse("SPEC026", f"`{entry.key}` has no value", entry.span, advice)
        elif before is None or not before.text:
            self.refuse("SPEC026", f"`{entry.key}` has no value", entry.span, "between braces, write `key: value`")
        else:
            whole = ", ".join([before.text, *rest]).replace('"', '\\"')
            message = f"a comma ended the text of `{before.key}`, so `{entry.key}` is a key without a value"
            self.refuse("SPEC026", message, entry.span, f'text in flow style must be quoted: `{before.key}: "{whole}"`')


def _span(start: yaml.Mark, end: yaml.Mark | None = None) -> Span:
    if end is None:
        return Span(start.line + 1, start.column + 1, start.line + 1, start.column + 2)
    return Span(start.line + 1, start.column + 1, end.line + 1, end.column + 1)


def _named(char: str) -> str:
    return f"U+{ord(char):04X} ({unicodedata.name(char, 'not printable').lower()})"


def _short(text: str) -> str:
    return f"`{text}`" if len(text) <= 40 else f"`{text[:39]}…`"
