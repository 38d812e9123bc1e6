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
    assert set(SHIPPED.split()) <= set(SPECS), "a spec that was shipped is gone"


@pytest.mark.parametrize("name", SPECS)
def test_checked_in_code_is_what_the_spec_makes(name):
    assert compare(root("generated") / name, files_of(name)) == []


def test_write_touches_only_what_changed(tmp_path):
    files = files_of("llama")
    folder = tmp_path / "llama"
    assert len(write(folder, files)) == len(files)
    assert write(folder, files) == []
    (folder / "mine.txt").write_text("kept")
    changed = {**files, "walker.py": files["walker.py"] + "\n"}
    assert [path.name for path in write(folder, changed)] == ["walker.py"]
    assert (folder / "mine.txt").read_text() == "kept"


def test_orphans_of_the_manifest_are_removed(tmp_path):
    files = files_of("llama")
    folder = tmp_path / "llama"
    write(folder, files)
    fewer = {name: text for name, text in files.items() if name != "merge.py"}
    write(folder, fewer)
    assert not (folder / "merge.py").exists()


def test_differences_are_named(tmp_path):
    files = files_of("llama")
    folder = tmp_path / "llama"
    write(folder, files)
    (folder / "walker.py").write_text("# edited\n")
    (folder / "merge.py").unlink()
    (folder / "stray.py").write_text("")
    found = {difference.path.name: difference.change for difference in compare(folder, files)}
    assert found == {"walker.py": "HAND-EDITED", "merge.py": "MISSING", "stray.py": "EXTRA"}


IMPORTED = "print(*sorted({'torch', 'transformers', 'jinja2', 'numpy'} & sys.modules.keys()))"


def imported_by(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}\n{IMPORTED}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_check_imports_neither_torch_nor_jinja():
    assert imported_by("from flexgen.cli import app\napp(['check'], standalone_mode=False)") == []


def test_build_imports_no_torch(tmp_path):
    code = f"from flexgen.cli import app\napp(['build', '--out', {str(tmp_path)!r}], standalone_mode=False)"
    assert imported_by(code) == ["jinja2"]


# ---------------------------------------------------------------- the same bytes everywhere


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "project")


@pytest.fixture
def whole(tmp_path):
    return Project(tmp_path / "project", tuple(SPECS))


def generated(project: Project) -> dict[str, bytes]:
    folder = project.folder / "generated"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.glob("*/*.*"))}


@pytest.mark.parametrize("seed", ["0", "1", "4294967295"])
def test_hash_seeds_and_working_directories_change_nothing(seed, whole, tmp_path):
    """One seed a directory: the project, a folder in it, and one elsewhere."""
    before = generated(whole)
    shutil.rmtree(whole.folder / "generated")
    where = {"0": whole.folder, "1": whole.folder / "specs", "4294967295": tmp_path}[seed]
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(whole.folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "flexgen", "build", *(["--out", str(whole.folder / "generated")] if where == tmp_path else [])]
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert generated(whole) == before and len(before) == 4 * len(SPECS)


def test_a_checkout_with_crlf_changes_nothing(whole):
    before = generated(whole)
    for path in [*whole.folder.glob("specs/*"), *whole.folder.glob("templates/**/*.j2")]:
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    shutil.rmtree(whole.folder / "generated")
    assert whole.flexgen("build").returncode == 0
    assert generated(whole) == before


def test_a_crlf_checkout_of_generated_code_is_no_drift(project):
    for path in project.folder.glob("generated/*/*.*"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert project.flexgen("build", "--check").returncode == 0


# ---------------------------------------------------------------- drift


def spec_change(project: Project) -> None:
    project.edit("specs/llama.yaml", "cast: before", "cast: after")


def template_change(project: Project) -> None:
    project.edit("templates/merge.py.j2", "Where adapters of", "Where the adapters of")


def edit_of_code(project: Project) -> None:
    project.edit("generated/qwen3/walker.py", "dims.eps", "1e-3")


def missing_file(project: Project) -> None:
    (project.folder / "generated/llama/merge.py").unlink()


def several(project: Project) -> None:
    """Each where the others are not."""
    spec_change(project)
    edit_of_code(project)
    (project.folder / "generated/qwen3_moe/stray.py").write_text("")
    shutil.copytree(project.folder / "generated/llama", project.folder / "generated/older")


DRIFT = {
    template_change: {f"CHANGED generated/{name}/merge.py: flexgen build specs/{name}.yaml" for name in PROJECT_SPECS},
    missing_file: {"MISSING generated/llama/merge.py: flexgen build specs/llama.yaml"},
    several: {
        "CHANGED generated/llama/walker.py: flexgen build specs/llama.yaml",
        "HAND-EDITED generated/qwen3/walker.py: flexgen build specs/qwen3.yaml",
        "EXTRA generated/qwen3_moe/stray.py: remove generated/qwen3_moe/stray.py",
        "EXTRA generated/older: no spec makes it; remove the folder",
    },
}


@pytest.mark.parametrize("drift", DRIFT, ids=lambda drift: drift.__name__)
def test_drift_is_named_with_the_command_that_ends_it(drift, project):
    drift(project)
    before = generated(project)
    done = project.flexgen("build", "--check")
    assert done.returncode == 1
    lines = {line.replace(f"{project.folder}/", "") for line in done.stdout.splitlines() if "manifest.json" not in line}
    assert lines == DRIFT[drift]
    assert generated(project) == before


def test_a_dry_run_lists_the_same_and_writes_nothing(project):
    several(project)
    before = generated(project)
    dry = project.flexgen("build", "--dry-run")
    assert dry.returncode == 0 and dry.stdout == project.flexgen("build", "--check").stdout
    assert generated(project) == before


# ---------------------------------------------------------------- templates that are wrong

WRONG = {
    "undefined": ("walker/layers.j2", "LAYER = ", "LAYER = {{ no_such_name }}", "'no_such_name' is undefined"),
    "attribute": ("walker/layers.j2", "{{ kind.name }}", "{{ kind.nome }}", "no attribute 'nome'"),
    "syntax": ("walker/layers.j2", "{% for kind in arch.kinds %}", "{% for kind arch.kinds %}", "expected token 'in', got 'arch'"),
    "filter": ("walker/dims.j2", "| tuple }}", "| tupel }}", "No filter named 'tupel'."),
    "type": ("attention.py.j2", "{{ arch.name }}", "{{ arch.name + 1 }}", "can only concatenate str"),
    "include": ("walker.py.j2", "partials/head.j2", "partials/hat.j2", "partials/hat.j2"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_template_error_names_template_line_spec_and_variable(mistake):
    name, good, bad, message = WRONG[mistake]
    templates = rendering.read_templates(root("templates"))
    line = templates[name][: templates[name].index(good)].count("\n") + 1
    templates[name] = templates[name].replace(good, bad, 1)
    architecture = check(root("specs") / "llama.yaml").architecture
    with pytest.raises(rendering.RenderError) as raised:
        rendering.render(architecture, templates)
    text = str(raised.value)
    assert text.startswith(f"templates/{name}:{line}: ") and text.endswith("(rendering specs/llama.yaml)")
    assert message in text and "jinja" not in text.lower()


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
