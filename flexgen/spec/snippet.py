"""One line of a file on a terminal: its excerpt, and carets under a range of it."""

from __future__ import annotations

import unicodedata

MAX_COLUMNS = 140
"""Longer lines are cut to a window around the carets."""

_CONTEXT = 40
_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """`text` on one line, with everything that a terminal would act on or hide written as an escape."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def excerpt(line: str, start: int, end: int) -> tuple[str, str]:
    """The line as shown, and the carets for its characters [start, end), at least one.

    Wide characters take two columns, combining ones none; what a terminal would act on or hide is shown as U+FFFD.
    """
    cells = [_cell(char) for char in line]
    offsets = [0]
    for _, width in cells:
        offsets.append(offsets[-1] + width)
    start = min(start, len(cells))
    first, last = offsets[start], offsets[min(max(end, start), len(cells))]
    text, shift = "".join(char for char, _ in cells), 0
    if offsets[-1] > MAX_COLUMNS:
        left = _window_start(first, last, offsets[-1])
        text, shift = _cut(cells, offsets, left)
        last = min(last, left + MAX_COLUMNS - (left + MAX_COLUMNS < offsets[-1]))
    return text, " " * (first - shift) + "^" * max(1, last - first)


def _cell(char: str) -> tuple[str, int]:
    """A character as shown, and how many columns it takes."""
    if char == "\t":
        return " ", 1
    category = unicodedata.category(char)
    if category in ("Mn", "Me"):
        return char, 0
    if category[0] in "CZ" and char != " " and not char.isprintable():
        return _REPLACEMENT, 1
    return char, 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _window_start(first: int, last: int, total: int) -> int:
    """The first column of the window: the range in the middle, or its beginning where it is too long for that."""
    room = MAX_COLUMNS - (last - first)
    before = room // 2 if room > 2 * _CONTEXT else _CONTEXT
    return max(0, min(first - before, total - MAX_COLUMNS))


def _cut(cells: list[tuple[str, int]], offsets: list[int], left: int) -> tuple[str, int]:
    """The cells within the window that starts at column `left`, an ellipsis at each cut, and the columns cut off.

    A wide character or a mark that the cut would split falls with the ellipsis.
    """
    right = left + MAX_COLUMNS
    total = offsets[-1]
    low, high = left + (left > 0), right - (right < total)
    shown = [index for index in range(len(cells)) if offsets[index] >= low and offsets[index + 1] <= high]
    while left > 0 and cells[shown[0]][1] == 0:
        del shown[0]
    text = "".join(cells[index][0] for index in shown)
    shift = offsets[shown[0]] - (left > 0)
    return ("…" if left > 0 else "") + text + ("…" if right < total else ""), shift
