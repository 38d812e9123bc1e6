"""Every code of the catalogue is one that a spec can meet, and its examples are what they say."""

from __future__ import annotations

import pytest

from flexgen.assets import root
from flexgen.ir.resolve import resolve
from flexgen.spec.codes import CODES
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.load import parse_spec

BASES = {
    "SPEC002": "qwen3",
    "SPEC009": "gemma4_dense",
    "SPEC016": "qwen3",
    "SPEC018": "gemma4_dense",
    "SPEC022": "gemma4_moe",
}
"""The spec that an example is a part of, where it is not llama."""


def entries(lines: list[str]) -> dict[str, list[str]]:
    """Lines of one indentation by their key, each with the lines indented below it."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    found: dict[str, list[str]] = {}
    for line in lines:
        if len(line) - len(line.lstrip()) == indent:
            key = line.split(":")[0] if line.split(":")[0] not in found else line  # the same key twice stays two
            found[key] = []
        found[key].append(line)
    return found


def overlay(base: list[str], example: list[str]) -> list[str]:
    """The base with the example's entries in place of its own; lists and one-line entries are replaced whole."""
    merged = entries(base)
    for key, lines in entries(example).items():
        before = merged.get(key, [])
        deeper = len(lines) > 1 and len(before) > 1 and not lines[1].lstrip().startswith(("-", "{"))
        same_key = deeper and not before[1].lstrip().startswith("{") and lines[0].rstrip().endswith(":")
        merged[key] = [lines[0], *overlay(before[1:], lines[1:])] if same_key else lines
    return [line for lines in merged.values() for line in lines]


def verdict(code: str, example: str) -> set[str]:
    text = (root("specs") / f"{BASES.get(code, 'llama')}.yaml").read_text()
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#")]
    whole = example if example.startswith("-") else "\n".join(overlay(lines, example.split("\n")))
    try:
        resolve(parse_spec(whole, "spec.yaml"))
    except SpecError as error:
        return {item.code for item in error.diagnostics}
    return set()


@pytest.mark.parametrize("code", CODES)
def test_the_wrong_example_is_exactly_this_mistake(code):
    assert verdict(code, CODES[code].bad) == {code}


@pytest.mark.parametrize("code", CODES)
def test_the_right_example_passes(code):
    assert verdict(code, CODES[code].good) == set()
