"""What `flexgen explain` says of a generated line, of a place in a spec, and of a whole spec."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from flexgen.compiler import UsageError, find_specs, shown
from flexgen.ir.architecture import Architecture
from flexgen.ir.kinds import entries
from flexgen.ir.resolve import resolve
from flexgen.render.linemap import Origin, line_map, parse_path, place, show_path, to_json
from flexgen.spec.annotations import field_names, model_at
from flexgen.spec.diagnostics import SpecPath, nearest
from flexgen.spec.load import Spec, load_spec

Map = dict[str, list[Origin]]
LINE = re.compile(r"(.+):([0-9]+)")
MAX_LINES = 12


def load_map(name: str) -> tuple[Spec, Map]:
    """A spec by name or path with its line map. Raises UsageError, SpecError."""
    spec, architecture = _load(name)
    return spec, line_map(spec, architecture)


def _load(name: str) -> tuple[Spec, Architecture]:
    if name.endswith(".py"):
        raise UsageError(f"{name} is no spec: give one of its lines, as in {name}:1")
    path = find_specs([name])[0]
    spec = load_spec(path, shown(path))
    return spec, resolve(spec)


def whole_map(name: str | None) -> str:
    """The map of one spec, or of all, as JSON. Raises UsageError, SpecError."""
    return to_json([load_map(str(path)) for path in find_specs([name] if name else [])])


def explain_line(path: Path, number: int) -> str:
    """Where a line of a generated file comes from.

    Raises UsageError where the file or the line is not there, or the file is not what its spec makes.
    """
    manifest = path.parent / "manifest.json"
    if not path.is_file() or not manifest.is_file():
        raise UsageError(f"no generated file `{path}`: give one of a generated package, as in generated/llama/walker.py:1")
    try:
        name = json.loads(manifest.read_bytes())["name"]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"`{manifest}` is no manifest: run `flexgen build` again") from None
    spec, found = load_map(name)
    if path.name not in found:
        raise UsageError(f"`{path.name}` comes from no template: give {', '.join(found)}")
    lines = found[path.name]
    if path.read_text("utf-8", "replace").splitlines() != [origin.text for origin in lines]:
        raise UsageError(f"`{path}` is not what {spec.path} makes: undo the edit, or run `flexgen build {name}`")
    if not 1 <= number <= len(lines):
        raise UsageError(f"`{path}` has lines 1 to {len(lines)}, not {number}")
    origin = lines[number - 1]
    out = [f"{path}:{number}: {origin.text.strip()}", *(f"  template  {item}" for item in origin.template)]
    out += [f"  spec      {show_path(item)}  ({place(spec, item)})" for item in origin.spec]
    return "\n".join(out if origin.spec else [*out, "  spec      none: the template alone says this"]) + "\n"


def explain_path(name: str, text: str) -> str:
    """What a place of a spec means, says and becomes. Raises UsageError, SpecError."""
    spec, found = load_map(name)
    path, node = parse_path(text), _value(spec, text)
    out = [f"{show_path(path)}: {_doc(spec, path)}", "", f"{place(spec, path)}: {_written(spec, path, node)}"]
    holder, lines = next(((p, ls) for p in _upwards(path) if (ls := _lines(found, p))), ((), []))
    if holder != path:
        what = f"it is part of `{show_path(holder)}`, which becomes" if holder else "only the manifest's digest tells it"
        out += ["", f"no generated line is about it alone: {what}"]
    out += ["", *(f"generated/{spec.model.name}/{file}:{number}: {code}" for file, number, code in lines[:MAX_LINES])]
    if len(lines) > MAX_LINES:
        out.append(f"and {len(lines) - MAX_LINES} more lines")
    return "\n".join(out).rstrip("\n") + "\n"


def _upwards(path: SpecPath) -> list[SpecPath]:
    """A place and the entries around it, as far as the entry that has a name; `tiny` stands for nothing generated."""
    return [path[:length] for length in range(len(path), min(len(path), 2) - 1, -1)] if path[0] != "tiny" else []


def _lines(found: Map, path: SpecPath) -> list[tuple[str, int, str]]:
    return [
        (file, number, origin.text.strip())
        for file, origins in found.items()
        for number, origin in enumerate(origins, 1)
        if origin.text and any(item[: len(path)] == path for item in origin.spec)
    ]


def explain_spec(name: str) -> str:
    """The resolved architecture in short. Raises UsageError, SpecError."""
    spec, architecture = _load(name)
    rows = [("model types", ", ".join(architecture.checkpoint.model_types))]
    rows += [(f"dims.{dim.name}", f"{dim.type} = {dim.source}") for dim in architecture.dims]
    for kind, slots in spec.model.kinds.items():
        rows.append((f"kinds.{kind}", ", ".join(f"{slot}: {' + '.join(entries(filling)) or 'none'}" for slot, filling in slots.items())))
    for rule in architecture.rules:
        arguments = ", ".join(filter(None, (rule.arguments, rule.target)))
        rows.append((rule.path, f"{rule.selector.removeprefix('schedule.')}({arguments})"))
    width = max(len(key) for key, _ in rows)
    return "\n".join([f"{architecture.name}: {architecture.summary}", *(f"  {key:<{width}}  {value}" for key, value in rows)]) + "\n"


def _value(spec: Spec, text: str) -> Any:
    node: Any = spec.data
    done: list[str | int] = []
    for step in parse_path(text):
        known = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if step not in known:
            near = nearest(str(step), map(str, known))
            hint = f"did you mean `{show_path((*done, near))}`?" if near else f"there are {', '.join(map(str, known)) or 'none'}"
            where = f"`{show_path(tuple(done))}`" if done else spec.path
            raise UsageError(f"{where} has no `{step}`: {hint}")
        node = node[step]
        done.append(step)
    if not done:
        raise UsageError("a path names a place, as in `attention.full.rope`")
    return node


def _doc(spec: Spec, path: SpecPath) -> str:
    """The field's description; of what a list or a section holds, that of the section."""
    for length in range(len(path), 0, -1):
        model = model_at(path[: length - 1], spec.data)
        if model is not None and path[length - 1] in field_names(model):
            fields = {info.alias or name: info for name, info in model.model_fields.items()}
            return fields[str(path[length - 1])].description or ""
    return ""


def _written(spec: Spec, path: SpecPath, node: Any) -> str:
    if isinstance(node, dict):
        return f"entries {', '.join(node)}"
    if isinstance(node, list):
        return f"a list of {len(node)}"
    source = spec.document.source(spec.origin(path))
    return source if spec.origin(path) == path else f"{source} (inherited from {show_path(spec.origin(path)[:2])})"
