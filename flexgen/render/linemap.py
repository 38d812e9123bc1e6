"""Where each generated line comes from: template lines and spec paths. Made in memory when asked, never a file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexgen.ir.architecture import Architecture
from flexgen.render.marks import Mark
from flexgen.render.render import FILES, render_marked
from flexgen.spec.diagnostics import SpecPath, show_path
from flexgen.spec.load import Spec

VERSION = 1
"""Version of the JSON form; raised by any change that could break a reader of it."""


@dataclass(frozen=True)
class Origin:
    """The template lines that wrote a line, outermost first, and the spec paths that it depends on."""

    text: str
    template: tuple[str, ...]
    spec: tuple[SpecPath, ...]


def line_map(spec: Spec, architecture: Architecture) -> dict[str, list[Origin]]:
    """The origin of every line of the generated modules, by file name. Raises RenderError."""
    return {name: _origins(render_marked(architecture, name), spec) for name in FILES}


def _origins(lines: Sequence[tuple[str, list[Mark]]], spec: Spec) -> list[Origin]:
    found: list[Origin] = []
    marks: list[Mark] = []
    for text, own in lines:
        marks = own or marks  # what a filter lays out over several lines has one mark
        template = dict.fromkeys(f"templates/{mark.template}:{mark.line}" for mark in marks)
        found.append(Origin(text, tuple(template), _paths([path for mark in marks for path in mark.reads], spec.data)))
    return found


def _paths(reads: Sequence[str], data: dict[str, Any]) -> tuple[SpecPath, ...]:
    """The places of the spec that were read, the closest that are written in it; none that holds another."""
    paths = [_written(path, data) for read in reads for path in read.split(", ")]
    found = dict.fromkeys(path for path in paths if path)
    return tuple(path for path in found if not any(other[: len(path)] == path for other in found if other != path))


def _written(read: str, data: Any) -> SpecPath:
    path: list[str | int] = []
    for step in parse_path(read):
        if (isinstance(data, dict) and step in data) or (isinstance(data, list) and isinstance(step, int) and step < len(data)):
            data = data[step]  # type: ignore[index]
            path.append(step)
        else:
            break
    return tuple(path)


def parse_path(text: str) -> SpecPath:
    """`block[1].add[0].norm` -> its steps."""
    return tuple(int(step) if step.isdigit() else step for step in re.findall(r"[^.\[\]]+", text))


def place(spec: Spec, path: SpecPath) -> str:
    """`file:line` of a spec path; of the entry it is inherited from, where it is."""
    return f"{spec.path}:{spec.span(path, key=True).line}"


def to_json(maps: Sequence[tuple[Spec, dict[str, list[Origin]]]]) -> str:
    """The maps of specs: for each generated file a list of lines, the first one line 1."""
    files = {
        f"generated/{spec.model.name}/{name}": [
            {
                "template": list(origin.template),
                "spec": [{"path": show_path(path), "at": place(spec, path)} for path in origin.spec],
            }
            for origin in lines
        ]
        for spec, found in maps
        for name, lines in sorted(found.items())
    }
    return json.dumps({"version": VERSION, "files": files}, indent=1) + "\n"
