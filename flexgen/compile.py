"""The compiler as functions: find specs, check them, build them. No torch, no transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexgen.assets import root
from flexgen.errors import FlexError
from flexgen.ir.architecture import Architecture
from flexgen.ir.resolve import resolve
from flexgen.spec.diagnostics import Diagnostic, SpecError
from flexgen.spec.load import load_spec
from flexgen.spec.source import split_lines


class UsageError(FlexError):
    """A command line that names something which is not there."""


@dataclass(frozen=True)
class Checked:
    """The outcome of checking one spec: an architecture, or diagnostics."""

    path: Path
    architecture: Architecture | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The file's lines, for excerpts."""
        return split_lines(self.path.read_bytes())


def find_specs(names: list[str]) -> list[Path]:
    """Spec files by path or by name; all of them where none is named. Raises UsageError."""
    folder = root("specs")
    if not names:
        return sorted(folder.glob("*.yaml"))
    found = []
    for name in names:
        path = Path(name)
        if not path.exists():
            path = folder / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
            raise UsageError(f"no spec `{name}`: give a path, or one of {known}")
        found.append(path)
    return found


def check(path: Path) -> Checked:
    """Read and resolve one spec; problems are returned, not raised."""
    try:
        return Checked(path, resolve(load_spec(path, shown(path))), ())
    except SpecError as error:
        return Checked(path, None, error.diagnostics)


def shown(path: Path) -> str:
    """The path as messages and headers name it: relative to the working directory where it is below it."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.as_posix()
