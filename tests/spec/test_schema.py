"""The editor's schema: in step with the models, and of one mind with `flexgen check` about shapes."""

from __future__ import annotations

import json

import jsonschema
import pytest

from flexgen.assets import root
from flexgen.runtime.surface import page
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.load import parse_spec
from flexgen.spec.reference import diagnostics_catalogue, spec_reference
from flexgen.spec.schema import json_schema
from flexgen.spec.source import load

SPECS = sorted(root("specs").glob("*.yaml"))
BREAKS = [
    ("heads: heads, ", "haeds: heads, "),
    ("{kind: rms,", "{kind: rmsnorm,"),
    ("flexgen: 1", "flexgen: 2"),
    ("size: size, act: silu", "size: size, act: swish"),
    ("attention: full}", "attention: 3}"),
    ("eps: eps}", "}"),
    ("model_types: [llama]", "model_types: llama"),
    ("weight: input_layernorm", "weight: 'a b'"),
    ("- add: [", "- ad: ["),
]


def test_schema_is_checked_in():
    assert (root("schema") / "flexgen.schema.json").read_text() == json_schema()


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_specs_satisfy_the_schema(path):
    validator = jsonschema.Draft7Validator(json.loads(json_schema()))
    assert [error.message for error in validator.iter_errors(load(path.read_bytes(), path.name).data)] == []


@pytest.mark.parametrize(("good", "bad"), BREAKS)
def test_editor_and_check_agree_on_broken_shapes(good, bad):
    text = (root("specs") / "llama.yaml").read_text()
    assert good in text
    broken = text.replace(good, bad, 1)
    validator = jsonschema.Draft7Validator(json.loads(json_schema()))
    assert not validator.is_valid(load(broken, "x.yaml").data)
    with pytest.raises(SpecError):
        parse_spec(broken, "x.yaml")


def test_reference_pages_are_checked_in():
    assert (root("docs") / "spec.md").read_text() == spec_reference()
    assert (root("docs") / "diagnostics.md").read_text() == diagnostics_catalogue()
    assert (root("docs") / "vllm.md").read_text() == page()
