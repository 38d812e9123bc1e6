"""Every spec builds to what is checked in; builds are atomic, minimal and reproducible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexgen.assets import root
from flexgen.compile import check, find_specs
from flexgen.render import render as rendering
from flexgen.render.build import compare, write
from flexgen.runtime import abi

SPECS = [path.stem for path in find_specs([])]


def files_of(name: str) -> dict[str, str]:
    checked = check(root("specs") / f"{name}.yaml")
    assert checked.architecture is not None, checked.diagnostics
    return rendering.render(checked.architecture)


def test_nine_specs():
    assert (
        sorted(
            [
                "llama",
                "qwen3",
                "qwen3_moe",
                "gpt_oss",
                "gemma4_dense",
                "gemma4_moe",
                "gemma4_e",
                "qwen3_5",
                "qwen3_5_moe",
            ]
        )
        == SPECS
    )


@pytest.mark.parametrize("name", SPECS)
def test_checked_in_code_is_what_the_spec_makes(name):
    assert compare(root("generated") / name, files_of(name)) == []


def test_abi_is_the_runtimes():
    assert rendering.ABI == abi.ABI


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


def test_compiler_imports_no_torch():
    code = "import sys; import flexgen.cli; from flexgen.compile import *; [check(p) for p in find_specs([])]; " + (
        "print([m for m in ('torch', 'transformers', 'jinja2', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_crlf_and_hash_seed_change_nothing(tmp_path):
    text = (root("specs") / "gemma4_moe.yaml").read_bytes().replace(b"\n", b"\r\n")
    path = tmp_path / "gemma4_moe.yaml"
    path.write_bytes(text)
    out = tmp_path / "out"
    for seed in ("0", "1"):
        command = [sys.executable, "-m", "flexgen", "build", str(path), "--out", str(out / seed)]
        subprocess.run(
            command, check=True, env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd())}, capture_output=True
        )
        for name, expected in files_of("gemma4_moe").items():
            assert (out / seed / "gemma4_moe" / name).read_text() == expected
