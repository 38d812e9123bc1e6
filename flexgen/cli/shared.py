"""What commands share: the app they belong to, the types of their arguments, how they show files and diagnostics."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from flexgen.compiler import Checked, UsageError, check, find_specs, shown
from flexgen.spec.diagnostics import Diagnostic, render_text
from flexgen.spec.source import split_lines

ENDS = "Exit codes: 0 fine, 2 wrong usage, 3 an invalid spec or checkpoint, 4 a failure, 130 interrupted."
DIFFERS = ENDS.replace("0 fine, ", "0 fine, 1 something differs, ")

app = typer.Typer(no_args_is_help=True)
Specs = Annotated[list[str] | None, typer.Argument(metavar="[SPEC]...", help="Paths or names of specs; none: all.")]
Generated = Annotated[Path | None, typer.Option(help="Another folder of generated packages.")]


class Format(StrEnum):
    """How a command prints."""

    text = "text"
    json = "json"


class DiffFormat(StrEnum):
    """How a comparison prints."""

    text = "text"
    json = "json"
    markdown = "markdown"


def diagnosed(diagnostics: Iterable[Diagnostic]) -> str:
    """Diagnostics with excerpts of the files they are about, in colour where a person reads them."""
    every = list(diagnostics)
    files = {item.path: Path(item.path) for item in every}
    text = render_text(every, {name: split_lines(path.read_bytes()) for name, path in files.items() if path.is_file()})
    in_colour = bool(os.environ.get("FORCE_COLOR")) or (sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    return coloured(text) if in_colour else text


_STYLES = (
    (re.compile(r"^error\[\w+\]:.*", re.MULTILINE), "1;31"),
    (re.compile(r"^ *--> .*", re.MULTILINE), "34"),
    (re.compile(r"(?<=\| ) *\^+", re.MULTILINE), "1;31"),
    (re.compile(r"^ *= (?:help|note):|^note:", re.MULTILINE), "36"),
)
"""What of a diagnostic stands out, and how a terminal is told."""


def coloured(text: str) -> str:
    for pattern, style in _STYLES:
        text = pattern.sub(lambda match, style=style: f"\x1b[{style}m{match[0]}\x1b[0m", text)  # type: ignore[misc]
    return text


def or_usage(make: Callable[[], Any]) -> Any:
    """What `make` makes; a value that an argument cannot have is a mistake of the command line."""
    try:
        return make()
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None


def listed(what: str, paths: Iterable[Path]) -> None:
    for path in paths:
        print(f"{what} {shown(path)}")


def checked_specs(specs: list[str] | None) -> list[Checked]:
    return [check(path) for path in find_specs(specs or [])]


def refuse(checked: list[Checked]) -> None:
    """Print the diagnostics of specs that are wrong and exit 3."""
    diagnostics = [diagnostic for item in checked for diagnostic in item.diagnostics]
    if diagnostics:
        print(diagnosed(diagnostics), end="", file=sys.stderr)
        raise typer.Exit(3)


