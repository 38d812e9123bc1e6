"""Exit codes: 0 fine, 1 differs, 2 usage, 3 invalid input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flexgen.assets import root


def run(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "flexgen", *arguments], capture_output=True, text=True).returncode


@pytest.fixture
def broken(tmp_path) -> Path:
    path = tmp_path / "llama.yaml"
    path.write_text((root("specs") / "llama.yaml").read_text().replace("cast: before", "cast: befor"))
    return path


def test_exit_codes(broken, tmp_path):
    assert run("check", "llama") == 0
    assert run("check", str(broken)) == 3
    assert run("check", str(broken), "--format", "json") == 3
    assert run("build", str(broken), "--out", str(tmp_path)) == 3
    assert run("build", "llama", "--out", str(tmp_path), "--check") == 1
    assert run("build", "llama", "--out", str(tmp_path)) == 0
    assert run("build", "llama", "--out", str(tmp_path), "--check") == 0
    assert run("check", "nope") == 2
    assert run("build", "--nonsense") == 2
    assert run("explain", "SPEC004") == 0
    assert run("explain", "SPEC999") == 2
