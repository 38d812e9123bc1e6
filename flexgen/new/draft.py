"""The draft of a spec: another spec's text with its name changed and every decision marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from flexgen.diff.changes import flow, label
from flexgen.new.text import MARK, Text
from flexgen.spec.diagnostics import SpecPath
from flexgen.spec.load import Spec

DECISIONS: dict[str, str] = {
    "summary": "one sentence; it becomes the generated docstring",
    "checkpoint.prefix": "these and all weight names below: compare them with the names in the safetensors files",
    "checkpoint.defaults": "what the config class fills in where config.json is silent",
    "checkpoint.require": "every field whose other values would change the computation",
    "norms.*": "is the gain w or 1 + w, and is its product taken before or after the cast to the model's dtype?",
    "ropes.*": "which rope types does the family use, and does rope turn the halves of a head?",
    "attention.*": "scale, norms of q, k and v and whether they come before rope, gates, sinks, the softmax's dtype",
    "gdn.*": "is this the gated delta rule, with these projections?",
    "mlp.*": "gate and up projections, and the activation on the gate?",
    "moe.*": "the expert's activation, its clamps and biases",
    "moe.*.router": "score before or after the choice, normalised or not, in which dtype?",
    "moe.*.gate_up": "which of these forms do the files have?",
    "layer_inputs.*": "how is it computed from the embedded tokens?",
    "kinds": "which kinds of layer are there?",
    "schedule": "which layer has which kind, also where config.json is silent?",
    "block": "norms before, after or on both sides of each branch; branches in sequence or in parallel?",
    "embedding": "is it scaled?",
    "head": "is there a soft cap or a factor on the logits?",
    "tiny": "the smallest config that shows every feature",
}
"""What no config.json settles: spec paths, `*` for any name, and the question to answer there."""


@dataclass(frozen=True)
class Draft:
    """The text of a new spec, and what there is to tell about it."""

    text: str
    decisions: int
    unsupported: tuple[str, ...]


def from_spec(spec: Spec, name: str) -> Draft:
    """A copy of a spec for another family: every decision that the copy took over is marked."""
    text = Text(spec.document)
    rename(text, spec, name, [name])
    text.mark(("checkpoint", "model_types"), f"the values of `model_type` in {name}'s config.json")
    mark_decisions(text, spec)
    return finished(text, [f"# Drafted by `flexgen new {name} --from {spec.path}`."], ())


def finished(text: Text, head: list[str], unsupported: tuple[str, ...]) -> Draft:
    """The draft with comments at its head."""
    written = text.written(head)
    return Draft(written, written.count(MARK), unsupported)


def rename(text: Text, spec: Spec, name: str, types: list[str]) -> None:
    """Another name, and the values of `model_type` that go with it."""
    text.replace(("name",), name)
    text.replace(("checkpoint", "model_types"), flow(types))
    if "model_type" in spec.model.tiny:
        text.replace(("tiny", "model_type"), flow(types[0]))


def mark_decisions(text: Text, spec: Spec) -> None:
    """Mark all that no config.json settles."""
    for path in _paths(spec.document.data):
        question = next((q for pattern, q in DECISIONS.items() if _matches(label(path), pattern)), None)
        if question is not None:
            text.mark(path, question)


def _paths(data: Any, path: SpecPath = ()) -> Iterator[SpecPath]:
    if isinstance(data, Mapping) and len(path) < 3:
        for key, value in data.items():
            yield (*path, key)
            yield from _paths(value, (*path, key))


def _matches(path: str, pattern: str) -> bool:
    return path.count(".") == pattern.count(".") and fnmatchcase(path, pattern)
