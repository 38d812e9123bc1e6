"""The draft of a spec for a config.json: what the config states, lacks and says beyond the language stands above the lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flexgen.contract.configs import leaves, look
from flexgen.contract.synonyms import SYNONYMS
from flexgen.diff.changes import flow
from flexgen.new.config import Given
from flexgen.new.draft import Draft, finished, mark_decisions, rename
from flexgen.new.made import class_defaults, small
from flexgen.new.meanings import MEANINGS
from flexgen.new.reads import Fit
from flexgen.new.text import MARK, Text
from flexgen.spec.load import Spec


def from_config(spec: Spec, name: str, given: Given, found: Fit, own: bool = True) -> Draft:
    """A spec for a config: the one that describes it, or the nearest with all that differs marked.

    own: `defaults` are those of the config's class and `tiny` has the config's values; else both are the nearest family's.
    """
    text = Text(spec.document)
    adopted = _mark_differences(text, spec, given, found)
    if found.is_exact:
        text.replace(("name",), name)
        head = [
            f"# Drafted by `flexgen new {name} --config {given.path.name}`: {spec.path} describes this config already."
        ]
    else:
        types = spec.model.checkpoint.model_types if found.serves else given.model_types
        rename(text, spec, name, types)
        _nest(text, spec, given)
        head = [f"# Drafted by `flexgen new {name} --config {given.path.name}` from {spec.path}, the nearest family."]
        if own:
            head += _take(text, spec, given, adopted)
        else:
            head.append(f"{MARK} `defaults` and `tiny` are those of {spec.path}: with the config's own values this is no spec")
        mark_decisions(text, spec)
    head += _section("config.json states:", _stated(given, found))
    unsupported = []
    for path, value in found.unread.items():
        meaning = _meaning(path)
        shown = f"{path}: {_short(value)}"
        if path in adopted and (meaning is None or meaning.place):
            continue
        if meaning is None:
            head.append(
                f"{MARK} `{shown}` is read by nothing: state it, or add it to `checkpoint.ignore` if it has no effect"
            )
        elif meaning.place is None:
            unsupported.append(f"{shown} ({meaning.feature})")
        else:
            head.append(f"{MARK} `{shown}` is read by nothing: {meaning.feature}, see `{meaning.place}`")
    head += _section("Unsupported: config.json states what the language cannot say yet:", unsupported)
    return finished(text, head, tuple(unsupported))


def _take(text: Text, spec: Spec, given: Given, adopted: set[str]) -> list[str]:
    """Write defaults of the config's class, and its own values in `tiny`. -> what a person must look at instead."""
    filled = class_defaults(spec, given.model_types[0])
    if filled and not adopted:  # fields under another name are renamed where they stand
        if "defaults" in spec.document.data["checkpoint"]:
            text.fill(("checkpoint", "defaults"), {field: flow(value) for field, value in filled.items()})
        else:
            text.insert(("checkpoint", "model_types"), f"defaults: {flow(filled)}")
    for field, value in small(spec, given).items():
        text.replace(("tiny", field), flow(value))
    if filled:
        return []
    return [f"{MARK} `defaults` are those of {spec.path}: transformers has no config class for {given.model_types[0]} that gives any"]


def _nest(text: Text, spec: Spec, given: Given) -> None:
    stated = spec.model.checkpoint.text_config
    if given.nested and stated is None:
        text.insert(("checkpoint", "model_types"), f"text_config: {given.nested}")
    elif given.nested and stated != given.nested:
        text.replace(("checkpoint", "text_config"), given.nested)


def _mark_differences(text: Text, spec: Spec, given: Given, found: Fit) -> set[str]:
    """What the spec needs and the config lacks; another name of a missing field takes its place. -> those names"""
    adopted: set[str] = set()
    for dim, fields in found.missing.items():
        synonyms = [(field, other) for field in fields for other in SYNONYMS.get(field, ())]
        field, other = next(((f, o) for f, o in synonyms if look(given.text, o) is not None), (fields[0], None))
        listed = " nor ".join(f"`{field}`" for field in fields)
        hint = f"; is `{other}` the same?" if other else ""
        text.mark(("dims", dim), f"config.json states no {listed}{hint}")
        if other is not None and other in found.unread:  # nothing else reads it
            adopted.add(other)
            text.replace(("dims", dim), re.sub(rf"(?<![\w.]){re.escape(field)}(?![\w.])", other, spec.model.dims[dim]))
            for place in (("tiny",), ("checkpoint", "defaults")):
                if field in spec.document.data_at(place):
                    text.rename((*place, field), other)
    for field, reason in found.fences.items():
        text.mark(("checkpoint", "require", field), f"{reason} in {spec.path}")
    for path, reason in found.foreign.items():
        text.mark(path, reason)
    return adopted


def _stated(given: Given, found: Fit) -> list[str]:
    """The features that the config states and the draft reads, one a line."""
    text, lines = given.text, []
    for path, value in leaves({key: value for key, value in text.items() if key != "rope_parameters"}):
        meaning = _meaning(path)
        if meaning and meaning.place and path not in found.unread and value not in (None, False):
            lines.append(f"{meaning.feature}: {path} {_short(value)}")
    for table in _rope_tables(text.get("rope_parameters"), ""):
        lines.append(table)
    if text.get("tie_word_embeddings") is not None:
        lines.append(
            f"the head is {'the embedding' if text['tie_word_embeddings'] else 'a tensor of its own'}: tie_word_embeddings"
        )
    return lines


def _rope_tables(table: Any, name: str) -> Iterator[str]:
    if isinstance(table, Mapping):
        nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        for key, value in nested.items():
            yield from _rope_tables(value, f" of {key}")
        if not nested and table:
            yield f"rope{name}: {table.get('rope_type', 'default')}, theta {table.get('rope_theta')}"


def _meaning(path: str) -> Any:
    return MEANINGS.get(path) or MEANINGS.get(path.rsplit(".", 1)[-1])


def _short(value: Any) -> str:
    """A value on one line, a list of layers as its counts."""
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(f"{value.count(item)} {_plain(item)}" for item in dict.fromkeys(value))
    return _plain(value)


def _plain(value: Any) -> str:
    """One line of printable characters: it stands in a comment of YAML."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() and c.isascii() else "?" for c in text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"# {title}", *(f"#   {line}" for line in lines)] if lines else []
