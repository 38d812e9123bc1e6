"""Lines that differ between two files, and which of these differences are the same one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

_DIGEST = re.compile(r'"[0-9a-f]{64}"')
_IMPORT = re.compile(r"(from [\w.]+ )?import |[\w, ]+,$|\)$")
"""A line of an import, of a long one too."""

_CONTEXT = 2


@dataclass(frozen=True)
class Hunk:
    """Neighbouring lines of one file that differ. Line numbers count from 1; `whole` says that only one side has the file."""

    architecture: str
    file: str
    old_line: int
    new_line: int
    removed: tuple[str, ...]
    added: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    within: str = ""
    whole: Literal["added", "removed"] | None = None

    @property
    def is_bookkeeping(self) -> bool:
        """Whether it follows from other changes: imports, and the manifest."""
        if self.file == "manifest.json" and not self.whole:
            return True
        changed = [line.strip() for line in (*self.removed, *self.added) if line.strip()]
        return bool(changed) and not self.whole and all(_IMPORT.match(line) for line in changed)

    @property
    def identity(self) -> tuple[object, ...]:
        """What hunks of several architectures have in common: all but the architecture's own name and digests."""
        return self.file, self.whole, self._plain(self.removed), self._plain(self.added)

    def _plain(self, lines: tuple[str, ...]) -> tuple[str, ...]:
        if self.whole:
            return ()
        name = re.compile(rf"\b{re.escape(self.architecture)}\b")
        return tuple(_DIGEST.sub("DIGEST", name.sub("NAME", line)) for line in lines)


def package_hunks(architecture: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[Hunk]:
    """The hunks of one package. Digests in the manifest follow from the other files, and count only where these are equal."""
    differing = [file for file in sorted({*old, *new}) if old.get(file) != new.get(file)]
    found: list[Hunk] = []
    for file in differing:
        before, after = old.get(file), new.get(file)
        if before is None or after is None:
            text = (after if before is None else before) or ""
            lines = tuple(text.removesuffix("\n").split("\n"))
            if before is None:
                found.append(Hunk(architecture, file, 1, 1, (), lines, whole="added"))
            else:
                found.append(Hunk(architecture, file, 1, 1, lines, (), whole="removed"))
        elif file == "manifest.json" and differing != [file]:
            found += _file_hunks(architecture, file, _DIGEST.sub('"…"', before), _DIGEST.sub('"…"', after))
        else:
            found += _file_hunks(architecture, file, before, after)
    return found


def _file_hunks(architecture: str, file: str, old: str, new: str) -> list[Hunk]:
    before, after = old.split("\n"), new.split("\n")
    hunks = []
    for tag, a, b, c, d in opcodes(before, after):
        if tag != "equal":
            shift = _slide(after, c, d) if tag == "insert" else _slide(before, a, b) if tag == "delete" else 0
            a, b, c, d = a + shift, b + shift, c + shift, d + shift
            context = tuple(after[max(0, c - _CONTEXT) : c]), tuple(after[d : d + _CONTEXT])
            sides = tuple(before[a:b]), tuple(after[c:d])
            hunks.append(Hunk(architecture, file, a + 1, c + 1, *sides, *context, _within(after, c)))
    return hunks


def opcodes(before: list[str], after: list[str]) -> Sequence[tuple[str, int, int, int, int]]:
    """difflib's opcodes from one list of lines to another."""
    return SequenceMatcher(None, before, after, autojunk=False).get_opcodes()


def _slide(lines: list[str], start: int, stop: int) -> int:
    """How far to move lines that were inserted or deleted so that they begin a statement, the outermost there is.

    An inserted function may as well be said to start with the blank lines before it, or with the one after the last.
    """
    shifts = [0]
    while start + shifts[0] > 0 and lines[start + shifts[0] - 1] == lines[stop + shifts[0] - 1]:
        shifts.insert(0, shifts[0] - 1)
    while stop + shifts[-1] < len(lines) and lines[start + shifts[-1]] == lines[stop + shifts[-1]]:
        shifts.append(shifts[-1] + 1)
    firsts = {shift: lines[start + shift] for shift in shifts}
    return min(
        shifts, key=lambda shift: (not firsts[shift], len(firsts[shift]) - len(firsts[shift].lstrip()), abs(shift))
    )


def _within(lines: list[str], index: int) -> str:
    """The function or class that a line stands in; empty above the first."""
    if index < len(lines) and lines[index].startswith(("def ", "class ")):
        return ""
    for line in reversed(lines[:index]):
        match = re.match(r"\s*(?:def|class) (\w+)", line)
        if match:
            return match.group(1)
    return ""
