"""The one lookup of specs, templates, generated packages and the schema."""

from __future__ import annotations

from pathlib import Path


def root(name: str) -> Path:
    """The folder `name`: inside the installed package, or at the repository's root in a checkout."""
    here = Path(__file__).resolve().parent
    packed = here / "_assets" / name
    return packed if packed.exists() else here.parent / name
