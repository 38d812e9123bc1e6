"""JSON files of checkpoints, which anybody may have written: read soon and whole, or refused by name.

Called for config.json, generation_config.json, indices and manifests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flexgen.errors import ConfigError, FlexgenError

MOST_DEPTH = 64
"""Levels of objects and lists; published files have five."""

MOST_BYTES = 2**20
"""Of a file that holds settings; published ones have a tenth."""


def read_object(path: Path, most_bytes: int = MOST_BYTES, error: type[FlexgenError] = ConfigError) -> dict[str, Any]:
    """The object in a file. Raises `error` for one that is no plain file, too large, too deep, no JSON or no object."""
    if not path.is_file():
        raise error(f"{path} is {'no plain file' if path.exists() else 'missing'}")
    if (size := path.stat().st_size) > most_bytes:
        raise error(f"{path} has {size} bytes, and {most_bytes} is the most that one may have: it is damaged, or no model's")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise error(f"{path} cannot be read: {fault.strerror}") from None
    except RecursionError:
        raise error(f"{path} is nested too deeply, more than {MOST_DEPTH} levels") from None
    except ValueError as fault:
        raise error(f"{path} is not JSON: {shown(fault)}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, not an object")
    if depth(value) > MOST_DEPTH:
        raise error(f"{path} is nested too deeply, more than {MOST_DEPTH} levels")
    return value


def depth(value: Any) -> int:
    """How many objects and lists lie within each other."""
    levels, inner = 0, [value]
    while inner := [node for node in inner if isinstance(node, dict | list)]:
        levels += 1
        inner = [child for node in inner for child in (node.values() if isinstance(node, dict) else node)]
    return levels


def shown(value: object, most: int = 80) -> str:
    """A value as a message shows it, long ones cut."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def listed(names: list[str], most: int = 12) -> str:
    """Names as a message lists them: not more than some, each cut."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if len(name) <= 80 else f"{name[:79]}…" for name in names[:most]) + more
