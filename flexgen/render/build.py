"""Writes generated packages: all or nothing, only what changed, orphans removed, hand edits noticed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexgen.render.swap import recover, staging, swap

Change = Literal["MISSING", "CHANGED", "EXTRA", "HAND-EDITED"]


@dataclass(frozen=True)
class Difference:
    """One file of a package that is not what its spec makes."""

    change: Change
    path: Path


def compare(folder: Path, files: dict[str, str]) -> list[Difference]:
    """How a package on disk differs from what its spec makes now."""
    hashes = _recorded(folder)
    found: list[Difference] = []
    for name, text in files.items():
        path = folder / name
        if not path.is_file():
            found.append(Difference("MISSING", path))
        elif path.read_bytes().replace(b"\r\n", b"\n") != text.encode():
            edited = name in hashes and hashes[name] != _hash(path)
            found.append(Difference("HAND-EDITED" if edited else "CHANGED", path))
    known = set(files)
    extra = sorted(p for p in folder.glob("*") if p.is_file() and p.name not in known) if folder.exists() else []
    return found + [Difference("EXTRA", path) for path in extra]


def write(folder: Path, files: dict[str, str]) -> list[Path]:
    """Make a package what its spec makes. -> the files written or removed.

    The new package is made beside the old one and takes its place at once, so that a reader, and a kill, finds one or the
    other whole (`flexgen.render.swap`). Files that the old manifest names and the spec no longer makes are removed;
    anything else is left alone. A folder that is a link stays one: what it points to is exchanged. Raises OSError, which
    names the folder, where the system lets nothing be written; the package is then as it was.
    """
    real = folder.resolve()
    recover(real.parent)
    changed = [d.path for d in compare(folder, files) if d.change != "EXTRA"]
    orphans = [folder / name for name in _recorded(folder) if name not in files and (folder / name).exists()]
    if not changed and not orphans:
        return []
    real.parent.mkdir(parents=True, exist_ok=True)
    try:
        _exchange(real, files, [orphan.name for orphan in orphans])
    except OSError as error:
        raise OSError(error.errno or errno.EIO, f"{_reason(error)}; it is as it was", str(folder)) from None
    return changed + orphans


def _exchange(folder: Path, files: dict[str, str], orphans: list[str]) -> None:
    with staging(folder) as staged:
        if folder.exists():
            shutil.copytree(folder, staged, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for name in orphans:
            (staged / name).unlink()
        for name, text in files.items():
            target = staged / name
            if not target.exists() or target.read_bytes() != text.encode():
                target.write_bytes(text.encode())
        staged.chmod(0o755)
        swap(staged, folder)


def _reason(error: OSError) -> str:
    """What the system said; `shutil` has it in a text for each file."""
    number = re.search(r"\[Errno (\d+)\]", str(error))
    return os.strerror(int(number[1])) if number else error.strerror or str(error)


def _recorded(folder: Path) -> dict[str, str]:
    """The files that a package's manifest names, with their hashes; none where it is no manifest of ours."""
    try:
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        return {name: digest for name, digest in files.items() if Path(name).name == name}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
