"""A user's first hour: the wheel in an environment of its own, an empty directory, every command once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tiny import tiny_config

from flexgen.verify import reference

CODE = """
from flexgen import LLM, SamplingParams
llm = LLM("model", spec="mine", dtype="float32", skip_tokenizer_init=True)
print(llm.model.package.folder)
print(llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory, wheel):
    """An environment with flexgen as installed, whose other packages are those of this one, and a checkpoint beside it."""
    folder = tmp_path_factory.mktemp("hour")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", folder / "env/bin/python", "install", "--no-deps", "-q", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    reference.save(reference.tiny(tiny_config("llama")), folder / "work" / "model")
    return folder


def files(folder):
    """What lies below a folder, by content; bytecode comes and goes."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_the_first_hour(home):
    work = home / "work"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    installed = home / "env"
    before = files(installed)

    def flexgen(*arguments, code=0):
        command = [installed / "bin" / "flexgen", *arguments]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    assert flexgen("--version").startswith("flexgen 0.")
    flexgen("init")
    assert {path.name for path in work.iterdir()} == {"model", "specs", "generated", "schema"}
    drafted = flexgen("new", "mine", "--config", "model")
    assert "wrote specs/mine.yaml" in drafted
    spec = work / "specs" / "mine.yaml"
    modeline = spec.read_text().splitlines()[0]
    assert (spec.parent / modeline.partition("=")[2]).resolve() == (work / "schema" / "flexgen.schema.json").resolve()
    lines = [line for line in spec.read_text().splitlines(True) if "# TODO decide:" not in line]
    spec.write_text("".join(lines))
    assert flexgen("check") == "ok mine\n"
    assert flexgen("check", "specs/mine.yaml", "mine", "gemma4_moe") == "ok mine\nok gemma4_moe\n"
    built = flexgen("build")
    assert "wrote generated/mine/walker.py" in built
    assert flexgen("build", "--check") == ""
    for way in ("mine", "specs/mine.yaml", "generated/mine"):
        assert "mine" in flexgen("verify", way)
    flexgen("diff")
    flexgen("diff", "generated/mine")
    walker = (work / "generated/mine/walker.py").read_text().splitlines()
    line = next(number for number, line in enumerate(walker, 1) if "eps" in line)
    assert "specs/mine.yaml:" in flexgen("explain", f"generated/mine/walker.py:{line}")
    for step in (["init", "-q"], ["add", "specs", "generated"], ["commit", "-q", "-m", "mine"]):
        subprocess.run(["git", "-c", "user.name=me", "-c", "user.email=me@example.com", *step], cwd=work, check=True)
    spec.write_text(spec.read_text().replace("cast: before", "cast: after"))
    assert "norms.rms.cast" in flexgen("diff", code=1)
    flexgen("build", "--check", code=1)
    flexgen("build", "specs/mine.yaml")
    flexgen("diff")
    done = subprocess.run([installed / "bin" / "python", "-c", CODE], cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    served, answer = done.stdout.splitlines()
    assert Path(served) == (work / "generated" / "mine").resolve() and len(json.loads(answer)) == 4
    assert files(installed) == before
