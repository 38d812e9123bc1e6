"""`like: NAME` written out: an entry with the fields of the one it names, and its own in their place. `load` calls it."""

from __future__ import annotations

from typing import Any

from flexgen.spec.annotations import field_names, model_at
from flexgen.spec.diagnostics import Diagnostic, Note, SpecPath, nearest
from flexgen.spec.models import SECTIONS_WITH_LIKE
from flexgen.spec.source import Document


def expand_likes(document: Document) -> tuple[dict[str, Any], dict[SpecPath, SpecPath], list[Diagnostic]]:
    """Copy the fields of the entries that `like` names. -> (data, origins of copied fields, problems)"""
    data = dict(document.data)
    origins: dict[SpecPath, SpecPath] = {}
    found: list[Diagnostic] = []
    for section in SECTIONS_WITH_LIKE:
        entries = data.get(section)
        if isinstance(entries, dict):
            chains = {name: _follow(entries, name) for name in entries}
            found += _broken_chains(document, section, chains)
            data[section] = {name: _merge(section, entries, chains[name][0], origins) for name in entries}
    return data, origins, found


def _follow(entries: dict[str, Any], name: str) -> tuple[list[str], Any]:
    """The entries that `like` leads to from one, itself first, and what it names last: unknown, or passed before."""
    chain = [name]
    while isinstance(entry := entries[chain[-1]], dict) and "like" in entry:
        base = entry["like"]
        if not isinstance(base, str) or base not in entries or base in chain:
            return chain, base
        chain.append(base)
    return chain, None


def _merge(section: str, entries: dict[str, Any], chain: list[str], origins: dict[SpecPath, SpecPath]) -> Any:
    """The first entry of the chain with the fields of the others, the nearest one's first; `why` is not copied."""
    name = chain[0]
    if not all(isinstance(entries[other], dict) for other in chain):
        return {key: value for key, value in entries[name].items() if key != "like"} if len(chain) > 1 else entries[name]
    merged: dict[str, Any] = {}
    for other in reversed(chain):
        merged.pop("why", None)
        for key, value in entries[other].items():
            if key != "like":
                merged[key] = value
                origins[(section, name, key)] = (section, other, key)
    for key in entries[name]:
        origins.pop((section, name, key), None)
    return merged


def _broken_chains(document: Document, section: str, chains: dict[str, tuple[list[str], Any]]) -> list[Diagnostic]:
    """One diagnostic a `like` that leads nowhere, and one a circle; what entries lack because of it is settled."""
    found = []
    for name, (chain, base) in chains.items():
        if base is None:
            continue
        is_circle = isinstance(base, str) and base in chain
        message, help, note = None, "give one of them all its fields", None
        if is_circle and name == base == min(chain):
            message = f"`like` goes in a circle: {' -> '.join((*chain, base))}"
            note = Note("the cycle passes here", document.path, document.key_span((section, chain[-1])))
        elif not is_circle and len(chain) == 1:
            near = nearest(str(base), chains)
            message = f"`like` names {_named(base)}, which `{section}` does not define"
            help = f"did you mean `{near}`?" if near else "`like` names another entry of the same section"
            note = Note(f"`{near}` is defined here", document.path, document.key_span((section, near))) if near else None
        if message:
            at = document.value_span((section, name, "like"))
            lacking = _lacking(document, section, [other for other, (_, end) in chains.items() if end is not None])
            notes = [note] if note else []
            found.append(Diagnostic("SPEC009", message, document.path, at, help=help, notes=notes, settles=lacking))
    return found


def _named(base: Any) -> str:
    return f"`{base}`" if isinstance(base, str | int | float) else "no entry"


def _lacking(document: Document, section: str, names: list[str]) -> list[SpecPath]:
    """The fields that entries do not give themselves."""
    entries = document.data[section]
    model = model_at((section, names[0]), document.data)
    fields = field_names(model) if model else []
    return [(section, name, field) for name in names for field in fields if field not in entries[name]]
