"""Mistakes of shape are reported first, all in one run; those of meaning wait until the shape is right. None causes another."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest
from mutations import Text
from tiny import SOME

from flexgen.assets import root
from flexgen.compiler import check
from flexgen.spec.diagnostics import Diagnostic, SpecPath


def shape_mistakes(text: Text) -> list[tuple[SpecPath, str]]:
    """Fields and entries, each with the text of the spec where it is misspelt, missing or of a wrong type."""
    found = []
    for path in mutations.paths(text.document.data):
        free = any(path[: len(place)] == place for place in mutations.FREE)
        if free or (path[-1] in ("why", "like", "embedding", "kinds") and len(path) > 1) or path[:-1][:1] == ("kinds",):
            continue
        if isinstance(path[-1], str) and (len(path) == 1 or mutations.model_at(path[:-1], text.document.data)):
            found.append((path, text.misspelt(path)))
            if mutations.required(text.document, path) and text.is_flow(path):
                found.append((path, text.deleted(path)))
        if len(path) > 1:
            found.append((path, text.retyped(path, mutations.other_type(text.document.data_at(path)))))
    return found


def verdict(text: str, folder: Path) -> tuple[Diagnostic, ...]:
    file = folder / "spec.yaml"
    file.write_text(text, "utf-8")
    return check(file).diagnostics


@pytest.mark.parametrize("spec", SOME)
def test_a_mistake_of_shape_alone_is_one_message(spec, tmp_path):
    text = Text((root("specs") / f"{spec}.yaml").read_text("utf-8"))
    wrong = []
    for path, broken in shape_mistakes(text):
        found = verdict(broken, tmp_path)
        if len(found) != 1:
            wrong.append((path, [f"{item.span.line}: {item.message}" for item in found]))
    assert not wrong


MEANT: dict[str, tuple[SpecPath, str]] = {
    "unknown norm": (("head", "norm", "norm"), "nowhere"),
    "unknown dim": (("head", "tied"), "nowhere"),
    "listed twice": (("checkpoint", "prefix"), "[model, model]"),
    "tiny": (("tiny", "model_type"), "nowhere"),
}
SAMPLE = 11


@pytest.mark.parametrize("meant", MEANT)
@pytest.mark.parametrize("spec", SOME)
def test_a_mistake_of_meaning_waits_for_the_shape(spec, meant, tmp_path):
    """With one of shape beside it that one alone is reported; without, that of meaning, alone as well."""
    where, value = MEANT[meant]
    original = (root("specs") / f"{spec}.yaml").read_text("utf-8")
    text = Text(Text(original).retyped(where, value))
    (meaning,) = verdict(text.text, tmp_path)
    wrong = []
    for path, broken in shape_mistakes(text)[len(meant) % SAMPLE :: SAMPLE]:
        found = verdict(broken, tmp_path)
        if len(found) != 1 or found[0].message == meaning.message:
            wrong.append((path, [f"{item.span.line}: {item.message}" for item in found]))
    assert not wrong


@pytest.mark.parametrize("spec", SOME)
def test_two_mistakes_of_shape_are_two_messages(spec, tmp_path):
    """The first one does not hide what is wrong elsewhere, not even where a misspelt field holds it."""
    original = Text((root("specs") / f"{spec}.yaml").read_text("utf-8"))
    text = Text(original.retyped(("head", "tied"), "[]"))
    (known,) = verdict(text.text, tmp_path)
    wrong = []
    for path, broken in shape_mistakes(text)[::SAMPLE]:
        if path[0] == "head":
            continue
        found = verdict(broken, tmp_path)
        if len(found) != 2 or known.message not in {item.message for item in found}:
            wrong.append((path, [f"{item.span.line}: {item.message}" for item in found]))
    assert not wrong
