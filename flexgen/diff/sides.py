"""The two sides of a comparison: where the files of packages, and the specs and templates behind them, come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flexgen.assets import root
from flexgen.compiler import UsageError
from flexgen.diff import git
from flexgen.ir.resolve import resolve
from flexgen.render.render import read_templates, render
from flexgen.spec.load import parse_spec

FOLDERS = ("generated", "specs", "templates")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Sources:
    """What packages are made of: texts of specs by name, and of templates by path."""

    specs: Mapping[str, str]
    templates: Mapping[str, str]


@dataclass(frozen=True)
class Side:
    """The files of each package by name. `sources` is None where nothing says what they were made of.

    single  one package was asked for, and the others are not meant to be missing
    """

    label: str
    packages: Mapping[str, Mapping[str, str]]
    sources: Sources | None
    single: bool = False


def made(project: Path) -> Side:
    """What the specs and templates of a project make now. Raises SpecError and RenderError."""
    specs = {path.stem: _text(path.read_bytes()) for path in sorted((project / "specs").glob("*.yaml"))}
    sources = Sources(specs, _templates(project))
    made = (package(name, text, sources.templates) for name, text in specs.items())
    return Side("the specs and templates", dict(made), sources)


def narrowed(side: Side, other: Side) -> Side:
    """A side without the packages that `other` does not speak of, where that is of one package alone."""
    if not other.single:
        return side
    return replace(side, packages={name: files for name, files in side.packages.items() if name in other.packages})


def _templates(project: Path) -> dict[str, str]:
    """A project's templates: flexgen's own, but for those of another flexgen's repository."""
    folder = project / "templates"
    return read_templates(folder if folder.is_dir() else root("templates"))


def package(spec: str, text: str, templates: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The name and the files of the package that a spec makes. Raises SpecError and RenderError."""
    architecture = resolve(parse_spec(text, f"specs/{spec}.yaml"))
    return architecture.name, render(architecture, templates)


def other(project: Path, against: str | None) -> Side:
    """The side to compare with: a directory, a commit, or (None) the project's own `generated/`.

    A directory is a package, holds packages, or is another project with a `generated/`. Raises UsageError where there is no such thing.
    """
    if against is None:
        sources = at_commit(project, "HEAD").sources if git.has_commit(project) else None
        return Side("generated/", _packages(project / "generated"), sources)
    folder = Path(against)
    if folder.is_dir():
        return _directory(folder)
    if folder.exists():
        raise UsageError(f"{against} is a file: give a directory of packages, or a commit")
    return at_commit(project, against)


def at_commit(project: Path, ref: str) -> Side:
    """The packages that are checked in at a commit. Raises UsageError."""
    packages: dict[str, dict[str, str]] = {}
    specs, templates = {}, {}
    for path, content in git.files_at(project, ref, FOLDERS).items():
        folder, _, rest = path.partition("/")
        if folder == "specs" and rest.endswith(".yaml") and "/" not in rest:
            specs[rest.removesuffix(".yaml")] = _text(content)
        elif folder == "templates" and rest.endswith(".j2"):
            templates[rest] = _text(content)
        elif folder == "generated" and rest.count("/") == 1:
            name, _, file = rest.partition("/")
            packages.setdefault(name, {})[file] = _text(content)
    return Side(ref, packages, Sources(specs, templates or _templates(project)))


def _directory(folder: Path) -> Side:
    if (folder / MANIFEST).is_file():
        return Side(str(folder), {folder.resolve().name: _files(folder)}, None, single=True)
    packages = _packages(folder / "generated") if (folder / "generated").is_dir() else _packages(folder)
    if not packages and not (folder / "generated").is_dir():
        raise UsageError(f"{folder} is no generated package, holds none, and has no `generated/` that does")
    sources = None
    if (folder / "specs").is_dir() and (folder / "templates").is_dir():
        specs = {path.stem: _text(path.read_bytes()) for path in sorted((folder / "specs").glob("*.yaml"))}
        sources = Sources(specs, read_templates(folder / "templates"))
    return Side(str(folder), packages, sources)


def _packages(folder: Path) -> dict[str, dict[str, str]]:
    """The packages of a folder by name; what else lies in it is nobody's business, and may be large."""
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    return {path.name: _files(path) for path in found if not path.name.startswith(".")}


def _files(package: Path) -> dict[str, str]:
    return {path.name: _text(path.read_bytes()) for path in sorted(package.iterdir()) if path.is_file()}


def _text(content: bytes) -> str:
    """As text with the line ends of a checkout without CRLF; what is not UTF-8 still differs visibly."""
    return content.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
