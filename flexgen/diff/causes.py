"""Why a hunk is there: each change of specs and templates is taken back by itself, and what then differs is its doing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from flexgen.diff.changes import Change, apply_undo, flow, spec_changes, template_changes
from flexgen.diff.hunks import Hunk, opcodes
from flexgen.diff.sides import Side, Sources, package
from flexgen.render.render import RenderError
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.source import load

Kind = Literal["spec", "template", "hand edit", "compiler", "unknown"]
Files = Mapping[str, str]
MAX_CHANGES = 40
"""With more changes than this, a cause is a whole file: each change costs a rendering of every package that it may touch."""


@dataclass(frozen=True, order=True)
class Cause:
    """Why a hunk is there.

    kind    spec and template name the change in `file` and `where`; a hand edit is not what the old side's sources made;
            the compiler makes something else of the same sources; unknown: the old side's sources are not there to ask
    proven  false where the change cannot be taken back to see, as this compiler refuses what was there before
    """

    kind: Kind
    file: str = ""
    where: str = ""
    was: str = ""
    now: str = ""
    proven: bool = True


class Causes:
    """The causes of the hunks between two sides. `new` has sources; what `old` lacks limits what can be said."""

    def __init__(self, old: Side, new: Side) -> None:
        assert new.sources is not None
        self._old, self._new = old, new
        self._sources: Sources = new.sources
        specs = self._sources.specs.items()
        self._specs = {load(text, spec).data["name"]: spec for spec, text in specs}
        self._unproven: dict[str, list[Cause]] = {}
        self._effects: dict[str, list[tuple[Cause, Files]]] = {}

    def of(self, hunk: Hunk) -> tuple[Cause, ...]:
        """The causes of one hunk: the changes of the sources behind it, or the one reason why there are none."""
        if hunk.whole:
            return (self._whole(hunk),)
        name = hunk.architecture
        if name not in self._effects:
            self._effects[name] = self._effects_on(name)
        now = self._new.packages[name][hunk.file]
        found = [cause for cause, files in self._effects[name] if _touches(hunk, now, files)]
        return tuple(dict.fromkeys(found or self._unproven.get(name, []))) or (self._sourceless(hunk),)

    def _whole(self, hunk: Hunk) -> Cause:
        """Of a file that only one side has."""
        name, old = hunk.architecture, self._old.sources
        spec = self._specs.get(name)
        before = self._old.packages.get(name, {})
        if hunk.whole == "added":
            if old is not None and spec not in old.specs:
                return Cause("spec", f"specs/{spec}.yaml", "new")
            if before and hunk.file not in _recorded(before):
                return Cause("compiler", where="a file that was not made before")
            return Cause("hand edit", where="the file is missing")
        if spec is None and old is not None and name in old.specs:
            return Cause("spec", f"specs/{name}.yaml", "removed")
        if spec is not None and hunk.file in _recorded(before):
            return Cause("compiler", where="a file that is no longer made")
        return Cause("hand edit", where="nothing makes this file")

    def _sourceless(self, hunk: Hunk) -> Cause:
        """Of a hunk that no change explains."""
        if _is_edited(self._old.packages[hunk.architecture], hunk.file):
            return Cause("hand edit")
        spec, old = self._specs.get(hunk.architecture), self._old.sources
        if old is None or spec is None or spec not in old.specs:
            return Cause("unknown", where=f"{self._old.label} comes without its specs and templates")
        if self._rendered(old.specs[spec], old.templates) is None:
            return Cause("unknown", where=f"this compiler cannot build the specs and templates of {self._old.label}")
        return Cause("compiler")

    def _effects_on(self, architecture: str) -> list[tuple[Cause, Files]]:
        """Each cause, with the package that would be there without it."""
        spec, old = self._specs.get(architecture), self._old.sources
        if spec is None or old is None or spec not in old.specs:
            return []
        try:
            own = spec_changes(old, self._sources, spec)
        except SpecError:
            return []
        changes = own + self._template_changes
        if len(changes) > MAX_CHANGES:
            return self._whole_files(spec, own)
        alone = [(change, self._without(spec, [change])) for change in changes]
        known = [(_cause(change), files) for change, files in alone if files is not None]
        tangled = [change for change, files in alone if files is None]  # one needs the other: a new dim and its use
        together = (self._without(spec, tangled) or self._without(spec, changes)) if tangled else None
        if together is None:
            self._unproven[architecture] = [replace(_cause(change), proven=False) for change in tangled]
            return known
        return known + [(_cause(change), together) for change in tangled]

    def _whole_files(self, spec: str, own: list[Change]) -> list[tuple[Cause, Files]]:
        by_file: dict[str, list[Change]] = {}
        for change in own + self._template_changes:
            by_file.setdefault(change.file, []).append(change)
        found = []
        for file, changes in by_file.items():
            files = self._without(spec, changes) or self._without(spec, own + self._template_changes)
            if files is not None:
                found.append((Cause("template" if changes[0].is_template else "spec", file), files))
        return found

    @cached_property
    def _template_changes(self) -> list[Change]:
        assert self._old.sources is not None
        return template_changes(self._old.sources, self._sources)

    def _without(self, spec: str, changes: list[Change]) -> Files | None:
        """The package with changes taken back; None where that cannot be built."""
        text = self._sources.specs[spec]
        own = [change for change in changes if not change.is_template]
        if own:
            data = load(text, f"specs/{spec}.yaml").data
            for change in own:
                data = change.undo(data)
            text = flow(data)
        templates = dict(self._sources.templates)
        for file in {change.file for change in changes if change.is_template}:
            name = file.removeprefix("templates/")
            mine = [change for change in changes if change.file == file]
            templates[name] = apply_undo(templates.get(name, ""), mine)
        return self._rendered(text, templates)

    def _rendered(self, text: str, templates: Mapping[str, str]) -> Files | None:
        try:
            return package("variant", text, templates)[1]
        except (SpecError, RenderError):
            return None


def _cause(change: Change) -> Cause:
    return Cause("template" if change.is_template else "spec", change.file, change.where, change.was, change.now)


def _touches(hunk: Hunk, now: str, without: Files) -> bool:
    """Whether a package without some change differs from what it is now at the place of a hunk."""
    if hunk.file not in without:
        return True
    lines = now.split("\n")
    start, stop = hunk.new_line - 1, hunk.new_line - 1 + len(hunk.added)
    for tag, a, b, _, _ in opcodes(lines, without[hunk.file].split("\n")):
        meets = a < stop and start < b if a < b and start < stop else a <= stop and start <= b
        if tag != "equal" and meets:
            return True
    return False


def _is_edited(files: Files, name: str) -> bool:
    """Whether a file is not the one that its package's manifest recorded."""
    if name == "manifest.json":
        return not _recorded(files)
    return _recorded(files).get(name) != hashlib.sha256(files[name].encode()).hexdigest()


def _recorded(files: Files) -> dict[str, str]:
    """The digests in a package's manifest, itself included; empty where there is none that can be read."""
    try:
        return {**json.loads(files["manifest.json"])["files"], "manifest.json": ""}
    except (KeyError, ValueError, TypeError):
        return {}
