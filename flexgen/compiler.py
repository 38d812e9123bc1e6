"""The compiler in the open. No torch, no transformers: a spec goes in, the files of a package come out, or diagnostics.

    find_specs   names -> files
    check        file -> architecture, or every mistake:
                   spec.source   YAML with positions
                   spec.load     `like` written out, shapes checked
                   ir.resolve    names, numbers, weights and layers settled, every rule of meaning checked, `tiny` tried
    build        architectures -> packages in memory:
                   render        templates printed, and every file linted
    difference   packages in memory against the folder that holds them
    write        packages into that folder, each at once and whole

The command line calls these in this order; so may anything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flexgen.errors import FlexgenError
from flexgen.ir.architecture import Architecture
from flexgen.ir.resolve import resolve
from flexgen.project import here, projects
from flexgen.render import build as folders
from flexgen.render.build import Difference
from flexgen.spec.diagnostics import Diagnostic, SpecError
from flexgen.spec.load import load_spec


class UsageError(FlexgenError):
    """A command line that names something which is not there."""


@dataclass(frozen=True)
class Checked:
    """The outcome of checking one spec: an architecture, or diagnostics."""

    path: Path
    architecture: Architecture | None
    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class Built:
    """One package in memory: its spec's file, and its own files by name."""

    path: Path
    files: dict[str, str]


def find_specs(names: list[str]) -> list[Path]:
    """Spec files by path or by name; all of the project's where none is named. Raises UsageError.

    A name stands for a spec of the project, for one of flexgen's own, or for a file in the working directory.
    """
    found_in = [project.specs for project in projects()]
    if not names:
        if every := sorted(found_in[0].glob("*.yaml")):
            return every
        raise UsageError(f"there is no spec in {shown(found_in[0])}: give the path of one, or draft one with `flexgen new`")
    found: dict[Path, Path] = {}
    for name in names:
        places = (Path(name), *(place / f"{name}.yaml" for place in (*found_in, Path())))
        path = next(filter(os.path.isfile, places), None)
        if path is None:
            what = f"`{name}` is a folder" if os.path.isdir(name) else f"no spec `{name}`"
            raise UsageError(f"{what}: give the path of a file, or one of {', '.join(path.stem for path in every_spec())}")
        found.setdefault(path.resolve(), path)
    return list(found.values())


def every_spec() -> list[Path]:
    """The project's specs, and flexgen's own whose names none of them has."""
    found: dict[str, Path] = {}
    for project in projects():
        for path in sorted(project.specs.glob("*.yaml")):
            found.setdefault(path.stem, path)
    return list(found.values())


def check(path: Path) -> Checked:
    """Read and resolve one spec; problems are returned, not raised: of shape, or of meaning once the shape is right."""
    try:
        return Checked(path, resolve(load_spec(path, shown(path))), ())
    except SpecError as error:
        return Checked(path, None, error.diagnostics)


def named(checked: Iterable[Checked]) -> dict[str, tuple[Path, Architecture]]:
    """Architectures by name, each with its spec's file.

    Raises UsageError where two specs have one name, or a spec has that of another file in its folder.
    """
    found: dict[str, tuple[Path, Architecture]] = {}
    for item in checked:
        if item.architecture is None:
            continue
        name = item.architecture.name
        owner = item.path.with_name(f"{name}.yaml")
        other = found[name][0] if name in found else owner
        if name in found or (owner.is_file() and not owner.samefile(item.path)):
            both = f"{shown(other)} and {shown(item.path)}"
            raise UsageError(f"{both} are both called `{name}`, and would make one package: rename one of them")
        found[name] = item.path, item.architecture
    return found


def build(checked: Iterable[Checked]) -> dict[str, Built]:
    """The packages of specs by name, in memory; those with diagnostics make none. Raises UsageError, RenderError."""
    from flexgen.render.render import render  # brings Jinja, which no check needs

    return {name: Built(path, render(architecture)) for name, (path, architecture) in named(checked).items()}


def difference(built: dict[str, Built], folder: Path) -> Iterator[tuple[Built, Difference]]:
    """How the packages below a folder differ from what was built, file by file."""
    for name, package in built.items():
        for found in folders.compare(folder / name, package.files):
            yield package, found


def write(built: dict[str, Built], folder: Path) -> Iterator[Path]:
    """Put packages into their folders below `folder`. -> each file written or removed. Raises OSError."""
    for name, package in built.items():
        yield from folders.write(folder / name, package.files)


def orphans(built: dict[str, Built], folder: Path) -> list[Path]:
    """Packages below a folder that no spec made."""
    return sorted(path.parent for path in folder.glob("*/manifest.json") if path.parent.name not in built)


def output_folder(out: Path | None, writes: bool) -> Path:
    """Where packages go, or are looked at where nothing `writes`: `out`, or the project's `generated/`, or flexgen's own.

    Raises UsageError where that is a file, or where an installed flexgen would be written to.
    """
    if out is None and writes and here() is None:
        raise UsageError("there is no project here or above: `flexgen init` makes one, and --out DIR writes to a folder")
    folder = out or projects()[0].generated
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a folder as --out")
    return folder


def shown(path: Path) -> str:
    """The path as messages and headers name it: relative to the working directory where it is below it."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()
