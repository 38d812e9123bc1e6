"""The compiler as functions: find specs, check them, build them. No torch, no transformers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flexgen.assets import root
from flexgen.errors import FlexgenError
from flexgen.ir.architecture import Architecture
from flexgen.ir.resolve import mistakes_beside, resolve
from flexgen.spec.diagnostics import Diagnostic, SpecError, merge_cascades
from flexgen.spec.load import load_spec


class UsageError(FlexgenError):
    """A command line that names something which is not there."""


@dataclass(frozen=True)
class Checked:
    """The outcome of checking one spec: an architecture, or diagnostics."""

    path: Path
    architecture: Architecture | None
    diagnostics: tuple[Diagnostic, ...]


def find_specs(names: list[str]) -> list[Path]:
    """Spec files by path or by name; all of flexgen's own where none is named. Raises UsageError.

    A name stands for one of flexgen's own specs, or for a file where `flexgen new` puts one.
    """
    folder = root("specs")
    every = sorted(folder.glob("*.yaml"))
    if not names and not every:
        raise UsageError(f"there is no spec in {shown(folder)}: give the path of one, or draft one with `flexgen new`")
    if not names:
        return every
    known = ", ".join(path.stem for path in every)
    found: dict[Path, Path] = {}
    for name in names:
        places = (Path(name), *(place / f"{name}.yaml" for place in (folder, Path("specs"), Path())))
        path = next(filter(os.path.isfile, places), None)
        if path is None:
            what = f"`{name}` is a folder" if os.path.isdir(name) else f"no spec `{name}`"
            raise UsageError(f"{what}: give the path of a file, or one of {known}")
        found.setdefault(path.resolve(), path)
    return list(found.values())


def check(path: Path) -> Checked:
    """Read and resolve one spec; problems are returned, not raised."""
    try:
        return Checked(path, resolve(load_spec(path, shown(path))), ())
    except SpecError as error:
        others = mistakes_beside(error.mended) if error.mended else ()
        return Checked(path, None, tuple(merge_cascades([*error.diagnostics, *others])))


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


def shown(path: Path) -> str:
    """The path as messages and headers name it: relative to the working directory where it is below it."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()
