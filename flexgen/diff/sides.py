"""The two sides of a comparison: where the files of packages, and the specs and templates behind them, come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen.compiler import UsageError
from flexgen.diff import git
from flexgen.ir.resolve import resolve
from flexgen.render.render import read_templates, render
from flexgen.spec.load import parse_spec

FOLDERS = ("generated", "specs", "templates")


@dataclass(frozen=True)
class Sources:
    """What packages are made of: texts of specs by name, and of templates by path."""

    specs: Mapping[str, str]
    templates: Mapping[str, str]


@dataclass(frozen=True)
class Side:
    """The files of each package by name. `sources` is None where nothing says what they were made of."""

    label: str
    packages: Mapping[str, Mapping[str, str]]
    sources: Sources | None


def made(project: Path) -> Side:
    """What the specs and templates of a project make now. Raises SpecError and RenderError."""
    specs = {path.stem: _text(path.read_bytes()) for path in sorted((project / "specs").glob("*.yaml"))}
    sources = Sources(specs, read_templates(project / "templates"))
    made = (package(name, text, sources.templates) for name, text in specs.items())
    return Side("the specs and templates", dict(made), sources)


def package(spec: str, text: str, templates: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The name and the files of the package that a spec makes. Raises SpecError and RenderError."""
    architecture = resolve(parse_spec(text, f"specs/{spec}.yaml"))
    return architecture.name, render(architecture, templates)


def other(project: Path, against: str | None) -> Side:
    """The side to compare with: a directory, a commit, or (None) the project's own `generated/`.

    A directory holds packages, or is another project with a `generated/`. Raises UsageError where there is no such thing.
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
    return Side(ref, packages, Sources(specs, templates))


def _directory(folder: Path) -> Side:
    is_project = (folder / "generated").is_dir()
    packages = _packages(folder / "generated" if is_project else folder)
    if not is_project and not any("manifest.json" in files for files in packages.values()):
        raise UsageError(f"{folder} holds no generated packages, and no `generated/` that does")
    sources = None
    if (folder / "specs").is_dir() and (folder / "templates").is_dir():
        specs = {path.stem: _text(path.read_bytes()) for path in sorted((folder / "specs").glob("*.yaml"))}
        sources = Sources(specs, read_templates(folder / "templates"))
    return Side(str(folder), packages, sources)


def _packages(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*/*")):
        if path.is_file() and not path.parent.name.startswith("."):
            found.setdefault(path.parent.name, {})[path.name] = _text(path.read_bytes())
    return found


def _text(content: bytes) -> str:
    """As text with the line ends of a checkout without CRLF; what is not UTF-8 still differs visibly."""
    return content.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
