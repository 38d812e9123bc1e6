"""`flexgen new` and `flexgen init`: choose what to start from, draft, prove that it is a spec, write it whole or not at all."""

from __future__ import annotations

import keyword
import os
import re
import tempfile
from pathlib import Path

from flexgen.compiler import UsageError, every_spec, find_specs, shown
from flexgen.ir.resolve import resolve
from flexgen.new.draft import Draft, from_spec
from flexgen.new.text import MARK
from flexgen.project import Project, here, own
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.load import Spec, load_spec, parse_spec
from flexgen.spec.schema import json_schema

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def draft(name: str, spec: str | None, config: Path | None) -> tuple[Draft, str]:
    """The draft of a new spec, and what it was made from. Raises UsageError, ConfigFileError, ConfigError and SpecError."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"`{name}` cannot name a spec: lower-case letters, digits and _, a letter first, at most 40")
    if keyword.iskeyword(name):
        raise UsageError(f"`{name}` cannot name a spec: it is a word of Python")
    if (spec is None) == (config is None):
        raise UsageError("give exactly one of --from SPEC and --config CONFIG_JSON")
    if spec is not None:
        base = _load(find_specs([spec])[0])
        made, source = from_spec(base, name), base.path
    else:
        assert config is not None
        made, source = _from_config(name, config)
    resolve(parse_spec(made.text, f"{name}.yaml"))
    return made, source


def _from_config(name: str, path: Path) -> tuple[Draft, str]:
    from flexgen.new.config import read

    given = read(path)
    from flexgen.new.described import from_config
    from flexgen.new.reads import fit

    fits = [(spec, fit(spec, given)) for spec in _finished()]
    spec, found = min(
        fits, key=lambda item: (not item[1].is_exact, not item[1].serves, item[1].distance, len(item[0].model.dims))
    )
    what = "describes this config" if found.is_exact else "is the nearest family"
    made = from_config(spec, name, given, found)
    try:
        resolve(parse_spec(made.text, f"{name}.yaml"))
    except SpecError:  # the config's own values do not go with the nearest family's words
        made = from_config(spec, name, given, found, own=False)
    return made, f"{spec.path}, which {what}"


def _finished() -> list[Spec]:
    """The specs that a draft may start from: a draft whose decisions are open is none, nor one with mistakes."""
    found = []
    for path in every_spec():
        try:
            spec = _load(path)
        except SpecError:
            continue  # its own author hears of it from `flexgen check`; a neighbour needs another start, and there are others
        if MARK not in "\n".join(spec.document.lines):
            found.append(spec)
    return found


def _load(path: Path) -> Spec:
    spec = load_spec(path, shown(path))
    resolve(spec)
    return spec


def target(name: str, out: Path | None) -> Path:
    """Where the draft goes: `out`, else specs/NAME.yaml of the project, or of one begun in the working directory."""
    return out or (here() or Project(Path.cwd())).specs / f"{name}.yaml"


def init(folder: Path) -> list[Path]:
    """Make a folder a project: specs/, generated/ and the schema for editors. -> what was not there. Raises OSError."""
    project = Project(folder)
    made = [place for place in (project.specs, project.generated) if not place.is_dir()]
    for place in made:
        place.mkdir(parents=True)
    if not project.schema.exists():
        project.schema.parent.mkdir(exist_ok=True)
        project.schema.write_text(json_schema(), "utf-8")
        made.append(project.schema)
    return made


def for_editors(text: str, path: Path) -> str:
    """A spec's text whose first line says where its schema lies, as seen from `path`."""
    project = here()
    schema = project.schema if project and project.schema.exists() else own().schema
    line = f"# yaml-language-server: $schema={Path(os.path.relpath(schema, path.resolve().parent)).as_posix()}"
    first, _, rest = text.partition("\n")
    return f"{line}\n{rest if first.startswith('# yaml-language-server') else text}"


def write(path: Path, text: str, force: bool) -> None:
    """Write a file whole or not at all. Raises UsageError where there is one already and `force` is off."""
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no directory: make it, or give another --out")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    staged = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        staged.chmod(0o644)
        if force:
            os.replace(staged, path)
        else:
            os.link(staged, path)  # fails where a file of this name is there, even one made this instant
    except FileExistsError:
        raise UsageError(f"{path} is there already: give another name, or --force to overwrite it") from None
    finally:
        staged.unlink(missing_ok=True)
