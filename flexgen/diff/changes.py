"""What differs between two versions of specs and templates, as changes that can be taken back one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flexgen.diff.hunks import opcodes
from flexgen.diff.sides import Sources
from flexgen.spec.diagnostics import SpecPath
from flexgen.spec.source import load

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """One changed value of a spec, or neighbouring changed lines of a template.

    where   the spec path, or the lines of the template as it is now
    was, now   the values of a spec path as they are written; empty where absent, and for templates
    undo    takes the text of the file as it is now (of a spec: its data) and takes this change back
    """

    file: str
    where: str
    was: str = ""
    now: str = ""
    undo: Callable[[Any], Any] = field(compare=False, repr=False, default=lambda value: value)

    @property
    def is_template(self) -> bool:
        return self.file.startswith("templates/")


def spec_changes(old: Sources, new: Sources, spec: str) -> list[Change]:
    """The values that differ between two versions of a spec. Raises SpecError where one of them is no YAML."""
    before, after = (load(side.specs[spec], f"specs/{spec}.yaml").data for side in (old, new))
    return [
        Change(f"specs/{spec}.yaml", label(path), _shown(was), _shown(now), _undo_value(path, was, before))
        for path, was, now in _differences(before, after, ())
        if path[:1] != ("tiny",)  # no code is made of it
    ]


def template_changes(old: Sources, new: Sources) -> list[Change]:
    """The lines that differ between two versions of the templates."""
    found = []
    for name in sorted({*old.templates, *new.templates}):
        before, after = (side.templates.get(name, "").split("\n") for side in (old, new))
        for tag, a, b, c, d in opcodes(before, after):
            if tag != "equal":
                lines = f"{c + 1}" if d - c <= 1 else f"{c + 1}-{d}"
                found.append(Change(f"templates/{name}", lines, undo=_undo_lines(before[a:b], c, d)))
    return found


def apply_undo(text: str, changes: list[Change]) -> str:
    """A template's text with changes taken back, the last first so that the lines of the others stay where they are."""
    for change in reversed(changes):
        text = change.undo(text)
    return text


def label(path: SpecPath) -> str:
    """A spec path as people write it: `block[1].add[0]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def flow(value: Any) -> str:
    """A value of a spec as YAML on one line, numbers as they were written."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, str):
        return _quoted(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return getattr(value, "text", None) or str(value)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return ""
    return value if isinstance(value, str) else flow(value).replace('"', "")


def _differences(old: Any, new: Any, path: SpecPath) -> Iterator[tuple[SpecPath, Any, Any]]:
    """Path, old and new value of everything that differs; a list of another length or a mapping in another order is one."""
    if isinstance(old, dict) and isinstance(new, dict) and old and new:
        if [key for key in old if key in new] != [key for key in new if key in old]:
            yield path, old, new
            return
        for key in _merged_order(list(old), list(new)):
            yield from _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (was, now) in enumerate(zip(old, new, strict=True)):
            yield from _differences(was, now, (*path, index))
    elif type(old) is not type(new) or flow(old) != flow(new):
        yield path, old, new


def _merged_order(old: list[str], new: list[str]) -> list[str]:
    """The keys of both: those of `new`, and each of `old` alone after the key that it followed."""
    order = list(new)
    for index, key in enumerate(old):
        if key not in order:
            order.insert(order.index(old[index - 1]) + 1 if index else 0, key)
    return order


def _undo_value(path: SpecPath, was: Any, before: Any) -> Callable[[Any], Any]:
    def undo(data: Any, steps: SpecPath = path, old: Any = before) -> Any:
        if not steps:
            return was
        head, rest = steps[0], steps[1:]
        if isinstance(data, list):
            return [undo(item, rest, old[head]) if index == head else item for index, item in enumerate(data)]
        changed = dict(data)
        if rest:
            changed[head] = undo(data[head], rest, old[head])
        elif was is _ABSENT:
            del changed[head]
        else:
            changed[head] = was
        return {key: changed[key] for key in _merged_order(list(old), list(changed)) if key in changed}

    return undo


def _undo_lines(was: list[str], start: int, stop: int) -> Callable[[str], str]:
    def undo(text: str) -> str:
        lines = text.split("\n")
        return "\n".join([*lines[:start], *was, *lines[stop:]])

    return undo
