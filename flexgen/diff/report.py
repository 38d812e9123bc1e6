"""Hunks grouped: each distinct one once, with all its places, below what caused it."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class Entry:
    """All that has the same causes, however many specs they stand in: what a reviewer decides on at once.

    `groups` are its changes, `bookkeeping` imports and manifests, which follow from them.
    """

    causes: tuple[Cause, ...]
    groups: tuple[Group, ...]
    bookkeeping: tuple[Group, ...]

    @property
    def architectures(self) -> list[str]:
        return sorted({name for group in (*self.groups, *self.bookkeeping) for name in group.architectures})

    @property
    def hunks(self) -> int:
        return sum(len(group.hunks) for group in (*self.groups, *self.bookkeeping))


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

    @property
    def entries(self) -> list[Entry]:
        """The changes by their causes, those of most architectures first."""
        found: dict[frozenset[Cause], list[Group]] = {}
        for group in self.groups:
            key = frozenset(replace(cause, file="") if cause.kind == "spec" and cause.where else cause for cause in group.causes)
            found.setdefault(key, []).append(group)
        return sorted(map(_entry, found.values()), key=lambda entry: (-len(entry.architectures), -entry.hunks))


def _entry(groups: list[Group]) -> Entry:
    causes = tuple(dict.fromkeys(cause for group in groups for cause in group.causes))
    follows = tuple(group for group in groups if group.first.is_bookkeeping)
    if len(follows) == len(groups):
        return Entry(causes, follows, ())
    return Entry(causes, tuple(group for group in groups if not group.first.is_bookkeeping), follows)


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
