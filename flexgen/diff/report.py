"""Hunks grouped: each distinct one once, with all its places and causes."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.diff.causes import Cause, Causes
from flexgen.diff.hunks import Hunk, package_hunks
from flexgen.diff.sides import Side


@dataclass(frozen=True)
class Group:
    """One distinct change: its hunks, one a place, and why it is there."""

    hunks: tuple[Hunk, ...]
    causes: tuple[Cause, ...]

    @property
    def first(self) -> Hunk:
        return self.hunks[0]

    @property
    def architectures(self) -> list[str]:
        return list(dict.fromkeys(hunk.architecture for hunk in self.hunks))


@dataclass(frozen=True)
class Report:
    """The outcome of a comparison; empty where both sides hold the same bytes."""

    against: str
    made: str
    packages: int
    files: int
    groups: tuple[Group, ...]

    def __bool__(self) -> bool:
        return bool(self.groups)


def compare(old: Side, new: Side) -> Report:
    """Compare two sides; `new` must have sources."""
    causes = Causes(old, new)
    grouped: dict[tuple[object, ...], list[Hunk]] = {}
    for name in sorted({*old.packages, *new.packages}):
        for hunk in package_hunks(name, old.packages.get(name, {}), new.packages.get(name, {})):
            grouped.setdefault(hunk.identity, []).append(hunk)
    groups = [
        Group(tuple(hunks), tuple(dict.fromkeys(cause for hunk in hunks for cause in causes.of(hunk))))
        for hunks in grouped.values()
    ]
    groups.sort(
        key=lambda group: (-len(group.architectures), group.first.file, group.first.architecture, group.first.new_line)
    )
    files = sum(len(files) for files in new.packages.values())
    return Report(old.label, new.label, len(new.packages), files, tuple(groups))
