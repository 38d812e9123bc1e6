"""What `check` accepts as a spec's `tiny` is what the generated package loads."""

from __future__ import annotations

import copy
from typing import Any

import mutations
import pytest
from tiny import SOME

from flexgen.assets import root
from flexgen.contract.configs import normalise
from flexgen.errors import ConfigError
from flexgen.ir.resolve import resolve
from flexgen.runtime.loading.package import find_packages, load_package
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.load import shape
from flexgen.spec.source import Document, load


def accepted(document: Document) -> bool:
    try:
        resolve(shape(document))
    except SpecError as error:
        assert {item.code for item in error.diagnostics} <= {"SPEC024"}, error
        return False
    return True


def variants(document: Document) -> list[dict[str, Any]]:
    """`tiny` with one field gone, of another value, or of another type."""
    found = []
    for path in mutations.paths(document.data["tiny"]):
        *parents, last = path
        values = [*mutations._other_plain(document.data_at(("tiny", *path))), "text", 7, -1, 0, None, True, [], {}]
        for value in values:
            config = copy.deepcopy(document.data["tiny"])
            node = config
            for step in parents:
                node = node[step]
            node[last] = value
            found.append(config)
        if isinstance(last, str):
            config = copy.deepcopy(config)
            node = config
            for step in parents:
                node = node[step]
            del node[last]
            found.append(config)
    return found


@pytest.mark.parametrize("spec", SOME)
def test_a_tiny_that_passes_loads(spec):
    document = load((root("specs") / f"{spec}.yaml").read_bytes(), f"{spec}.yaml")
    walker = load_package(find_packages()[spec]).walker
    refused, passed = [], 0
    for config in variants(document):
        if accepted(mutations.edited(document, ("tiny",), config)):
            passed += 1
            try:
                walker.Dims.from_config(normalise(config, walker.TEXT_CONFIG))
            except (ConfigError, ZeroDivisionError, ValueError) as error:
                refused.append((config, error))
    assert [str(error) for _, error in refused] == []
    assert passed >= min(21, 2 * len(document.data["tiny"]))


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_do_not_divide_are_refused_at_load(heads):
    walker = load_package(find_packages()["llama"]).walker
    config = load((root("specs") / "llama.yaml").read_bytes(), "llama.yaml").data["tiny"] | {"num_key_value_heads": heads}
    with pytest.raises(ConfigError, match=f"attention.full gets 4 heads, no multiple of its {heads} kv_heads"):
        walker.Dims.from_config(normalise(config, None))
