"""What is wrong with a spec, where, and what to do: one `Diagnostic` a mistake, shown as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexgen.errors import FlexgenError
from flexgen.spec.codes import CODES, Stage
from flexgen.spec.snippet import excerpt, printable

JSON_VERSION = 1
"""Version of the JSON form; raised by any change that could break a reader of it."""

SpecPath = tuple[str | int, ...]
"""Where something stands in a spec: keys and list indices from the root."""


def show_path(path: SpecPath) -> str:
    """A spec path as it is written: `block[1].add[0].norm`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


_SHOWN_REPEATS = 3
_COMPARED_LENGTH = 80


@dataclass(frozen=True, order=True)
class Span:
    """A range of a file. Lines and columns count characters from 1; the end is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int

    def contains(self, other: Span) -> bool:
        """Whether `other` lies within this span."""
        return (self.line, self.column) <= (other.line, other.column) and (other.end_line, other.end_column) <= (
            self.end_line,
            self.end_column,
        )


@dataclass(frozen=True)
class Note:
    """A second place that helps to understand a diagnostic ("first defined here"). Without a span it is only text."""

    message: str
    path: str = ""
    span: Span | None = None


@dataclass(frozen=True)
class Diagnostic:
    """One mistake.

    code     key of `flexgen.spec.codes.CODES`
    path     the file, as the user named it
    subject  the spec path that the message is about, where there is one
    settles  spec paths whose own messages this one makes pointless: `windw` settles that `window` is missing
    """

    code: str
    message: str
    path: str
    span: Span
    help: str | None = None
    notes: Sequence[Note] = ()
    subject: SpecPath | None = None
    settles: Sequence[SpecPath] = ()

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    @property
    def position(self) -> tuple[str, Span, str, str]:
        """The sort key: by file, then by position, then by code."""
        return self.path, self.span, self.code, self.message

    def __lt__(self, other: Diagnostic) -> bool:
        return self.position < other.position


class SpecError(FlexgenError):
    """A spec that cannot be used. `diagnostics` holds every problem found, sorted, one a mistake."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = tuple(merge_cascades(diagnostics))
        assert self.diagnostics, "a SpecError needs a diagnostic"
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n".join(
            f"{item.path}:{item.span.line}:{item.span.column}: error[{item.code}]: {printable(item.message)}"
            for item in self.diagnostics
        )


def merge_cascades(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sort, and keep one message a mistake.

    Dropped: what another diagnostic settles, and what lies at, around or inside a mistake of an earlier stage (a wrong
    shape is no news where a name is unknown). The same unknown name in many places becomes one message with notes.
    """
    ordered = sorted(dict.fromkeys(_hashable(item) for item in diagnostics))
    settled = {(item.path, path) for item in ordered for path in item.settles}
    kept = [item for item in ordered if not _is_settled(item, settled)]
    return _gather_repeats(_without_consequences(kept))


def _hashable(item: Diagnostic) -> Diagnostic:
    return replace(item, notes=tuple(item.notes), settles=tuple(item.settles))


def _is_settled(item: Diagnostic, settled: set[tuple[str, SpecPath]]) -> bool:
    subject = item.subject or ()
    return any((item.path, subject[:length]) in settled for length in range(1, len(subject) + 1))


def _without_consequences(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Those that have no mistake of an earlier stage at, around or inside their place."""
    causes: dict[Stage, list[Diagnostic]] = {stage: [] for stage in Stage}
    for item in diagnostics:
        causes[CODES[item.code].stage].append(item)
    return [
        item
        for item in diagnostics
        if not any(
            cause.path == item.path and (cause.span.contains(item.span) or item.span.contains(cause.span))
            for stage in range(Stage.FILE, CODES[item.code].stage)
            for cause in causes[Stage(stage)]
        )
    ]


def _gather_repeats(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Fold an unknown name's later places into notes of its first."""
    places: dict[tuple[str, str, str], list[Diagnostic]] = {}
    for index, item in enumerate(diagnostics):
        repeats = CODES[item.code].stage is Stage.NAME
        places.setdefault((item.path, item.code, item.message if repeats else str(index)), []).append(item)
    gathered = []
    for first, *others in places.values():
        notes = [Note("also here", other.path, other.span) for other in others[:_SHOWN_REPEATS]]
        if len(others) > _SHOWN_REPEATS:
            notes.append(Note(f"and in {len(others) - _SHOWN_REPEATS} more places"))
        gathered.append(replace(first, notes=(*first.notes, *notes)))
    return gathered


def render_text(diagnostics: Iterable[Diagnostic], sources: Mapping[str, Sequence[str]]) -> str:
    """The diagnostics as a person reads them, in the order given, a blank line between two.

    `sources` holds the lines of each file by path (`Document.lines`, or `source.split_lines` of what could not be
    loaded); without them a place has no excerpt.
    """
    return "\n".join(_render(item, sources) for item in diagnostics)


def _render(item: Diagnostic, sources: Mapping[str, Sequence[str]]) -> str:
    spans = [item.span, *(note.span for note in item.notes if note.span is not None)]
    gutter = len(str(max(span.line for span in spans)))
    pad = " " * gutter
    out = [f"error[{item.code}]: {printable(item.message)}", *_place(item.path, item.span, gutter, sources)]
    if item.help is not None:
        first, *rest = item.help.split("\n")
        out += [f"{pad} = help: {printable(first)}", *(f"{pad}         {printable(line)}" for line in rest)]
    for note in item.notes:
        if note.span is None:
            out.append(f"{pad} = note: {printable(note.message)}")
        else:
            out += [f"note: {printable(note.message)}", *_place(note.path, note.span, gutter, sources)]
    return "".join(line.rstrip() + "\n" for line in out)


def _place(path: str, span: Span, gutter: int, sources: Mapping[str, Sequence[str]]) -> list[str]:
    """`  --> file:line:column` and, where the line is known, the line with carets under the range."""
    pad = " " * gutter
    lines = sources.get(path, ())
    place = [f"{pad}--> {printable(path)}:{span.line}:{span.column}"]
    if span.line > len(lines):
        return place
    line = lines[span.line - 1]
    end = span.end_column if span.end_line == span.line else len(line) + 1
    text, carets = excerpt(line, span.column - 1, end - 1)
    return [*place, f"{pad} |", f"{span.line:>{gutter}} | {text}", f"{pad} | {carets}"]


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """The diagnostics as JSON for editors and CI; lines and columns as in `Span`."""
    payload = {"version": JSON_VERSION, "diagnostics": [_as_json(item) for item in diagnostics]}
    return json.dumps(payload, indent=2) + "\n"


def _as_json(item: Diagnostic) -> dict[str, Any]:
    return {
        "file": item.path,
        "range": _range(item.span),
        "code": item.code,
        "message": item.message,
        "help": item.help,
        "notes": [
            {
                "message": note.message,
                "file": note.path or None,
                "range": _range(note.span) if note.span is not None else None,
            }
            for note in item.notes
        ],
    }


def _range(span: Span) -> dict[str, dict[str, int]]:
    return {
        "start": {"line": span.line, "column": span.column},
        "end": {"line": span.end_line, "column": span.end_column},
    }


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` was probably meant to be: few typing slips away, or the same words and one more.

    A third of the letters may be wrong, at least one and at most three. None where nothing is near.
    """
    pool = sorted({candidate for candidate in candidates if candidate != name})
    plain = _plain(name)
    limit = min(3, max(1, len(plain) // 3))
    slips = {candidate: slips_between(plain, _plain(candidate)) for candidate in pool}
    near = min(pool, key=lambda candidate: (slips[candidate], candidate), default=None)
    if near is not None and slips[near] <= limit and slips[near] < len(plain):
        return near
    words = set(plain.split("_"))
    akin = [candidate for candidate in pool if words < (other := set(_plain(candidate).split("_"))) or other < words]
    return akin[0] if len(akin) == 1 else None


def _plain(name: str) -> str:
    return name[:_COMPARED_LENGTH].casefold().replace("-", "_")


def slips_between(a: str, b: str) -> int:
    """Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours, one each."""
    before: list[int] = []
    previous = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        current = [i]
        for j, right in enumerate(b, 1):
            cost = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (left != right))
            if i > 1 and j > 1 and left == b[j - 2] and a[i - 2] == right:
                cost = min(cost, before[j - 2] + 1)
            current.append(cost)
        before, previous = previous, current
    return previous[-1]
