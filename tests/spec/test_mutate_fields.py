"""Every field of every spec: what is wrong is refused at its line, and what is changed changes the generated code."""

from __future__ import annotations

from typing import Any

import mutations
import pytest
from mutations import Text, edited
from tiny import SOME

from flexgen.assets import root
from flexgen.contract.ignored import NO_EFFECT
from flexgen.ir.architecture import Architecture
from flexgen.ir.resolve import resolve
from flexgen.render.render import render
from flexgen.spec.diagnostics import Diagnostic, SpecError, SpecPath
from flexgen.spec.load import parse_spec, shape
from flexgen.spec.source import Document


def read(spec: str) -> Text:
    return Text((root("specs") / f"{spec}.yaml").read_text())


def diagnostics(text: str) -> tuple[Diagnostic, ...]:
    try:
        resolve(parse_spec(text, "spec.yaml"))
    except SpecError as error:
        return error.diagnostics
    return ()


def marked(found: tuple[Diagnostic, ...]) -> set[int]:
    """The lines with carets."""
    return {span.line for item in found for span in (item.span, *(note.span for note in item.notes if note.span))}


@pytest.mark.parametrize("spec", SOME)
def test_a_mistake_is_refused_at_its_line(spec):
    text = read(spec)
    missed = []
    for path in mutations.paths(text.document.data):
        if path[0] == "tiny" and {*path[1:2]} & {*NO_EFFECT, *text.document.data["checkpoint"].get("ignore", ())}:
            continue  # it may hold anything
        broken = [(text.retyped(path, mutations.other_type(text.document.data_at(path))), text.lines(path))]
        if isinstance(path[-1], str):
            broken.append((text.misspelt(path), text.lines(path)))
            if mutations.required(text.document, path):
                broken.append((text.deleted(path), text.lines(path[:-1]) if path[:-1] else range(1, 2)))
        missed += [(path, lines) for wrong, lines in broken if not marked(diagnostics(wrong)) & set(lines)]
    assert missed == []


@pytest.mark.parametrize("spec", SOME)
def test_a_field_twice_is_refused_at_both_places(spec):
    text = read(spec)
    for path in mutations.paths(text.document.data):
        if isinstance(path[-1], str):
            with pytest.raises(SpecError) as error:
                parse_spec(text.duplicated(path), "spec.yaml")
            (found,) = [item for item in error.value.diagnostics if item.message == f"`{path[-1]}` is defined twice"]
            assert found.code == "SPEC003"
            assert found.notes[0].span == text.document.key_span(path)


def architecture(document: Document) -> Architecture | None:
    try:
        return resolve(shape(document))
    except SpecError:
        return None


class Before:
    """A spec as it is, to compare edits of it with."""

    def __init__(self, spec: str) -> None:
        self.document = read(spec).document
        self.architecture = architecture(self.document)
        self.code = code(self.architecture)

    def silent(self, path: SpecPath, values: list[Any], enough: int) -> list[Any]:
        """Values that are accepted and change nothing, among the first `enough` that are accepted at all."""
        accepted = []
        for value in values:
            found = architecture(edited(self.document, path, value))
            if found is not None:
                accepted.append(value if self.equals(found, path) else None)
                if len(accepted) == enough:
                    break
        return [value for value in accepted if value is not None]

    def equals(self, found: Architecture, path: SpecPath) -> bool:
        if path[0] == "tiny":  # code does not hold it, the manifest's digest stands for it
            return found.digest == self.architecture.digest
        return code(found) == self.code


def code(found: Architecture) -> dict[str, str]:
    return {name: text for name, text in render(found).items() if name.endswith(".py")}


@pytest.mark.parametrize("spec", SOME)
def test_another_value_makes_other_code(spec):
    before = Before(spec)
    changes = {path: mutations.others(before.document, path) for path in mutations.paths(before.document.data)}
    silent = {path: before.silent(path, values, enough=2) for path, values in changes.items()}
    assert {path: values for path, values in silent.items() if values} == {}


@pytest.mark.parametrize("spec", SOME)
def test_a_field_that_was_left_out_makes_other_code(spec):
    before = Before(spec)
    additions = mutations.absent(before.document, shape(before.document).data)
    silent = {path: before.silent(path, values, enough=1) for path, values in additions}
    assert {path: values for path, values in silent.items() if values} == {}
