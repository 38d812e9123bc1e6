"""Where each generated line comes from, and what `flexgen explain` makes of it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys

import pytest
from tiny import SOME

from flexgen import explain
from flexgen.assets import root
from flexgen.compiler import UsageError
from flexgen.ir import architecture as ir
from flexgen.render import filters
from flexgen.render.linemap import parse_path, show_path
from flexgen.render.render import read_templates

TEMPLATES = {f"templates/{name}": text.split("\n") for name, text in read_templates(root("templates")).items()}


@pytest.mark.parametrize("spec", SOME)
def test_every_line_has_a_template_line_and_the_text_is_that_of_the_package(spec):
    loaded, found = explain.load_map(spec)
    for file, lines in found.items():
        assert "".join(f"{origin.text}\n" for origin in lines) == (root("generated") / spec / file).read_text()
        for origin in lines:
            assert origin.template
            for place in origin.template:
                name, number = place.split(":")
                assert 1 <= int(number) <= len(TEMPLATES[name])
            for path in origin.spec:
                assert loaded.span(path).line <= len(loaded.document.lines)


@pytest.mark.parametrize("spec", SOME)
def test_what_a_template_line_says_literally_stands_in_its_line(spec):
    """The first line of a definition, which is most of a template's own words, tells whether lines are off by one."""
    _, found = explain.load_map(spec)
    for origin in (origin for lines in found.values() for origin in lines):
        name, number = origin.template[0].split(":")
        written = re.split(r"{{.*?}}|{%.*?%}", TEMPLATES[name][int(number) - 1])
        if origin.text.startswith(("def ", "    # spec", "class ", "from ", "    return F")):
            assert written[0].strip() in origin.text


@pytest.mark.parametrize("spec", SOME)
def test_every_marker_names_the_path_of_its_line(spec):
    _, found = explain.load_map(spec)
    for file, lines in found.items():
        for number, origin in enumerate(lines):
            if (marker := re.match(r" *# spec: ([a-z0-9_.\[\]]+)$", origin.text)) and file != "merge.py":
                wanted = parse_path(marker[1])
                assert any(path == wanted[: len(path)] or path[: len(wanted)] == wanted for path in origin.spec), number


def explained(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "flexgen", "explain", *arguments]
    return subprocess.run(command, cwd=root("specs").parent, capture_output=True, text=True)


def test_a_line_on_the_command_line():
    lines = (root("generated") / "llama" / "attention.py").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "q_TNH = rotate(" in line)
    done = explained(f"generated/llama/attention.py:{number}")
    assert done.returncode == 0
    assert re.search(r"template  templates/attention/attention\.j2:[0-9]+\n  spec      attention\.full\.rope  \(specs/llama", done.stdout)


def test_the_whole_map_is_versioned_json():
    done = explained("--map", "llama")
    content = json.loads(done.stdout)
    assert content["version"] == 1
    for file, lines in content["files"].items():
        assert len(lines) == len((root("generated").parent / file).read_text().splitlines())
        assert all(line["template"] for line in lines)


def test_a_place_of_a_spec():
    text = explain.explain_path("gemma4_e", "attention.full.window")
    assert text.startswith("attention.full.window: Keys visible to a query")
    text = explain.explain_path("gemma4_e", "attention.full.scale")
    assert "1.0 (inherited from attention.sliding)" in text
    assert re.search(r"generated/gemma4_e/attention\.py:[0-9]+: o_TNH = attend\(.*scale=1\.0\)", text)
    assert "and " in explain.explain_path("llama", "dims")
    assert "kinds.full" in explain.explain_spec("llama")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain.explain_path("llama", "attention.fulll"), "did you mean `attention.full`"),
        (lambda: explain.explain_path("llama", "block[7]"), r"`block` has no `7`: there are 0, 1"),
        (lambda: explain.explain_path("lama", "dims"), "no spec `lama`"),
        (lambda: explain.explain_line(root("generated") / "llama" / "walker.py", 100_000), "has lines 1 to"),
        (lambda: explain.explain_line(root("generated") / "llama" / "manifest.json", 1), "comes from no template"),
        (lambda: explain.explain_line(root("generated") / "nothing.py", 1), "no generated file"),
    ],
)
def test_what_is_not_there_is_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_a_file_edited_by_hand_is_not_explained(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    for path in (root("generated") / "llama").glob("*.*"):
        (folder / path.name).write_text(path.read_text())
    assert "templates/walker/" in explain.explain_line(folder / "walker.py", 40)
    assert "templates/walker.py.j2" in explain.explain_line(folder / "walker.py", 20)
    (folder / "walker.py").write_text((folder / "walker.py").read_text().replace("dims.eps", "1e-5"))
    with pytest.raises(UsageError, match=r"is not what specs/llama.yaml makes: undo the edit, or run `flexgen build llama`"):
        explain.explain_line(folder / "walker.py", 20)


@pytest.mark.parametrize("path", ["attention.full.rope", "block[1].add[0].norm", "dims"])
def test_paths_are_read_as_they_are_written(path):
    assert show_path(parse_path(path)) == path


def test_templates_read_every_field_of_the_architecture():
    """A field that no template reads would be worked out for nothing; these are read while it is made, and by the manifest."""
    text = "\n".join("\n".join(lines) for lines in TEMPLATES.values()) + inspect.getsource(filters)
    classes = [item for _, item in inspect.getmembers(ir, inspect.isclass) if dataclasses.is_dataclass(item)]
    fields = {field.name for item in classes for field in dataclasses.fields(item)}
    unread = {name for name in fields if not re.search(rf'\.{name}\b|attribute="{name}"|table\(.*"{name}"', text)}
    assert unread == {"digest", "grouping", "inputs", "reads_stream", "roles", "routed", "routes", "tensors", "transposed", "type"}
