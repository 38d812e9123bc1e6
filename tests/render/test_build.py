"""Every spec builds to what is checked in; builds are atomic, minimal and reproducible."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from project import SPECS as PROJECT_SPECS
from project import Project

from flexgen.assets import root
from flexgen.compiler import check, find_specs
from flexgen.render import render as rendering
from flexgen.render.build import compare, write

SPECS = [path.stem for path in find_specs([])]


def files_of(name: str) -> dict[str, str]:
    checked = check(root("specs") / f"{name}.yaml")
    assert checked.architecture is not None, checked.diagnostics
    return rendering.render(checked.architecture)


SHIPPED = """
apertus bloom cohere2 ernie4_5 ernie4_5_moe falcon falcon_new gemma gemma2 gemma3 gemma4_dense gemma4_e gemma4_moe glm4_moe gpt2
gpt_neox gpt_oss granite granitemoe llama llama4 ministral3 mistral mixtral nemotron olmo2 olmoe opt phi3 phimoe qwen2 qwen2_moe
qwen3 qwen3_5 qwen3_5_moe qwen3_moe smollm3 starcoder2
"""


def test_shipped_specs():
    assert SHIPPED.split() == SPECS


LAST_LINE = "        return {{ logits }}{{ arch.head.why | comment }}\n"
BROKEN = {
    "syntax": ("walker/mlps.j2", "= project({{", "= project[({{", "'[' was never closed"),
    "undefined": ("walker/model.j2", LAST_LINE, LAST_LINE.replace("{{ logits }}", "weight"), "`weight` is not defined"),
    "unused": ("walker/dims.j2", "ABI = ", "import json\nABI = ", "import `json` is unused"),
    "branch": ("walker/layers.j2", "    return {{ step.value(block.result) | trim }}", "    return x_TD or x_TD", "a forward branches"),
    "unclosed": ("walker/layers.j2", "LAYER = ", "LAYER = (", "'(' was never closed"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_template_that_writes_bad_python_is_named_with_its_line(mistake):
    name, good, bad, message = BROKEN[mistake]
    templates = rendering.read_templates(root("templates"))
    line = templates[name][: templates[name].index(good)].count("\n") + 1
    templates[name] = templates[name].replace(good, bad, 1)
    architecture = check(root("specs") / "llama.yaml").architecture
    with pytest.raises(rendering.RenderError) as raised:
        rendering.render(architecture, templates)
    first, made = str(raised.value).split("\n")[:2]
    assert f"templates/{name}:{line}" in first, first
    assert first.endswith(f": {message} (rendering specs/llama.yaml)")
    assert re.match(r"  generated/llama/walker.py:[0-9]+: ", made)


def test_a_template_error_ends_a_build_before_it_writes(project):
    name, good, bad, _ = WRONG["undefined"]
    project.edit(f"templates/{name}", good, bad)
    before = generated(project)
    done = project.flexgen("build")
    assert done.returncode == 3 and done.stderr.startswith(f"error: templates/{name}:")
    assert "'no_such_name' is undefined (rendering specs/llama.yaml)" in done.stderr and "Traceback" not in done.stderr
    assert generated(project) == before
