"""A report as text for a terminal, markdown for a pull request, and JSON for tools."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from flexgen.diff.causes import Cause
from flexgen.diff.report import Group, Report

JSON_VERSION = 1
"""Version of the JSON form; raised by any change that could break a reader of it."""

_MOST_LINES, _MOST_CHARACTERS = 80, 60_000
"""Of a hunk and of all in markdown: a comment on GitHub ends at 65 536 characters."""


def text(report: Report) -> str:
    """As a person reads it in a terminal: what was caused by what, then each cause with its changes."""
    if not report:
        return _nothing(report) + "\n"
    titles = [" · ".join(_cause_lines(entry.causes)) for entry in report.entries]
    out = [f"{_headline(report)}\n\n"]
    for number, (title, entry) in enumerate(zip(titles, report.entries), 1):
        out.append(f"  [{number}] {_count(entry.hunks, 'hunk'):>10}  {_names(entry.architectures)}: {title}\n")
    for number, (title, entry) in enumerate(zip(titles, report.entries), 1):
        out.append(f"\n[{number}] {title}\n")
        for group in entry.groups:
            out.append(f"\n  {_where(group)}\n")
            out += [f"    {line}".rstrip() + "\n" for line in _lines(group)]
        out += [f"\n  {_follows(group)}\n" for group in entry.bookkeeping]
    return "".join(out)


def _names(architectures: list[str]) -> str:
    return ", ".join(architectures) if len(architectures) <= 4 else f"{len(architectures)} architectures"


def _follows(group: Group) -> str:
    """Imports and manifests in a line."""
    hunk = group.first
    what = "the manifest" if hunk.file == "manifest.json" else f"imports of {hunk.file}"
    names = [f"{sign}{line.strip()}" for sign, lines in (("-", hunk.removed), ("+", hunk.added)) for line in lines if line.strip()]
    return f"{what}, {_names(group.architectures)}: {_short(' '.join(names), 110)}"


def _nothing(report: Report) -> str:
    return f"no difference: {report.made} make {report.against} byte for byte ({report.files} files of {report.packages} packages)"


def _headline(report: Report) -> str:
    names = {name for group in report.groups for name in group.architectures}
    changes, causes = _count(len(report.groups), "distinct change"), _count(len(report.entries), "cause")
    return f"{changes} of {causes} in {_count(len(names), 'architecture')}, against {report.against}"


def _where(group: Group) -> str:
    names = group.architectures
    many = f"{len(names)} architectures: " if len(names) > 1 else ""
    return f"{group.first.file} of {many}{', '.join(names)}"


def _lines(group: Group) -> list[str]:
    """The hunk as diff prints it, with its context; a file of one side only as its length."""
    hunk = group.first
    if hunk.whole:
        return [f"({hunk.whole}: {_count(max(len(hunk.added), len(hunk.removed)), 'line')} in {hunk.architecture})"]
    head = f"@@ {hunk.architecture}/{hunk.file}:{hunk.new_line} @@ {hunk.within}".rstrip()
    context = [f" {line}" for line in hunk.before], [f" {line}" for line in hunk.after]
    changed = [f"-{line}" for line in hunk.removed] + [f"+{line}" for line in hunk.added]
    return [head, *context[0], *changed, *context[1]]


def _cause_lines(causes: Iterable[Cause]) -> list[str]:
    """One line a cause; the same change of several specs is one line."""
    files: dict[Cause, list[str]] = {}
    for cause in causes:
        files.setdefault(replace(cause, file="") if cause.kind == "spec" else cause, []).append(cause.file)
    return [_cause_line(cause, ", ".join(names) if len(names) <= 3 else f"{len(names)} specs") for cause, names in files.items()]


def _cause_line(cause: Cause, files: str) -> str:
    reasons = {
        "hand edit": "edited by hand: specs and templates do not make it",
        "compiler": "the compiler: the same specs and templates make something else now",
        "unknown": "unknown",
    }
    if cause.kind in reasons:
        return f"{reasons[cause.kind]} ({cause.where})" if cause.where else reasons[cause.kind]
    place = files + (":" if cause.kind == "template" else ": ") * bool(cause.where) + cause.where
    return ("" if cause.proven else "probably ") + place + _values(cause.was, cause.now)


def _values(was: str, now: str) -> str:
    if was and now:
        return f" ({_short(was)} -> {_short(now)})"
    return f" (new: {_short(now)})" if now else f" (removed: {_short(was)})" if was else ""


def _short(value: str, most: int = 60) -> str:
    return value if len(value) <= most else f"{value[: most - 1]}…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def markdown(report: Report) -> str:
    """As a pull request shows it: a table of causes, and each cause's changes folded below it; what is too long is cut."""
    if not report:
        return f"**Generated code:** {_nothing(report)}.\n"
    out = [f"**Generated code:** {_headline(report)}.\n\n| cause | architectures | hunks |\n|---|---|---:|\n"]
    titles = ["<br>".join(f"<code>{_escaped(line)}</code>" for line in _cause_lines(entry.causes)) for entry in report.entries]
    for title, entry in zip(titles, report.entries):
        out.append(f"| {title.replace('|', '&#124;')} | {', '.join(entry.architectures)} | {entry.hunks} |\n")
    for title, entry in zip(titles, report.entries):
        parts = [_fenced(group) for group in entry.groups]
        parts += [f"{_escaped(_follows(group))}\n" for group in entry.bookkeeping]
        room = _MOST_CHARACTERS - sum(map(len, out))
        kept = 0
        while kept < len(parts) and (room := room - len(parts[kept])) > 0:
            kept += 1
        left = f"\n{_count(len(parts) - kept, 'more change')}: `flexgen diff` shows all.\n" if kept < len(parts) else ""
        body = "\n".join(parts[:kept])
        out.append(f"\n<details><summary>{title}</summary>\n\n{body}{left}\n</details>\n")
    return "".join(out)


def _fenced(group: Group) -> str:
    lines = _lines(group)
    cut = lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"… {len(lines) - _MOST_LINES} more lines"]
    fence = "`" * max(3, 1 + max((_ticks(line) for line in cut), default=0))
    body = "\n".join(cut)
    return f"{_escaped(_where(group))}\n\n{fence}diff\n{body}\n{fence}\n"


def _escaped(line: str) -> str:
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _ticks(line: str) -> int:
    """The longest run of backticks."""
    return max((len(run) for run in "".join(c if c == "`" else " " for c in line).split()), default=0)


def as_json(report: Report) -> str:
    """For tools. Lines count from 1; `whole` is "added" or "removed" for a file that only one side has."""
    payload = {
        "version": JSON_VERSION,
        "against": report.against,
        "equal": not report,
        "packages": report.packages,
        "files": report.files,
        "causes": [
            {
                "causes": [cause.__dict__ for cause in entry.causes],
                "architectures": entry.architectures,
                "hunks": entry.hunks,
                "changes": [report.groups.index(group) for group in (*entry.groups, *entry.bookkeeping)],
            }
            for entry in report.entries
        ],
        "changes": [_group(group) for group in report.groups],
    }
    return json.dumps(payload, indent=2) + "\n"


def _group(group: Group) -> dict[str, object]:
    return {
        "file": group.first.file,
        "whole": group.first.whole,
        "removed": list(group.first.removed),
        "added": list(group.first.added),
        "places": [
            {
                "architecture": hunk.architecture,
                "old_line": hunk.old_line,
                "new_line": hunk.new_line,
                "within": hunk.within,
            }
            for hunk in group.hunks
        ],
        "causes": [cause.__dict__ for cause in group.causes],
    }
