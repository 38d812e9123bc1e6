"""Where people's own specs and packages lie. A project is a folder with specs; flexgen reads and writes in the nearest one.

    my_models/          found from the working directory upwards
      specs/*.yaml      what people write; they come first, and flexgen's own behind them
      generated/        what `flexgen build` makes of them
      schema/           for editors

flexgen's own specs are a project too: its repository. An installed flexgen is read, and never written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flexgen.assets import root

_SPEC = re.compile(rb"^flexgen:", re.MULTILINE)
_HEAD = 4096


@dataclass(frozen=True)
class Project:
    """The folders of one project."""

    folder: Path

    @property
    def specs(self) -> Path:
        return self.folder / "specs"

    @property
    def generated(self) -> Path:
        return self.folder / "generated"

    @property
    def schema(self) -> Path:
        return self.folder / "schema" / "flexgen.schema.json"

    @property
    def is_own(self) -> bool:
        """Whether these are flexgen's own specs, in its repository or as installed."""
        return self.folder == own().folder


def own() -> Project:
    """flexgen's own specs and packages."""
    return Project(root("specs").parent)


def here() -> Project | None:
    """The nearest project, from the working directory upwards."""
    working = Path.cwd().resolve()
    return next((Project(folder) for folder in (working, *working.parents) if _is_project(folder)), None)


def projects() -> list[Project]:
    """Where specs and packages are looked for, first come first."""
    mine = here()
    return [own()] if mine is None or mine.is_own else [mine, own()]


def _is_project(folder: Path) -> bool:
    specs = folder / "specs"
    if not specs.is_dir():
        return False
    if (folder / "generated").is_dir():
        return True
    return any(_SPEC.search(_head(path)) for path in sorted(specs.glob("*.yaml")))


def _head(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_HEAD)
