"""What holds of every generated file, and how far a change of a spec reaches into it."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flexgen.assets import root
from flexgen.ir.resolve import resolve
from flexgen.render.lint import lint
from flexgen.render.render import render
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.load import parse_spec
from flexgen.spec.source import load

SPECS = sorted(path.stem for path in root("specs").glob("*.yaml"))
FILES = sorted(root("generated").glob("*/*.py"))
MAX_LINES = {"walker.py": 256, "attention.py": 160, "merge.py": 15}
"""Of the longest package, and little more."""


def made(text: str) -> dict[str, str]:
    return render(resolve(parse_spec(text, "spec.yaml")))


def source(spec: str) -> str:
    return (root("specs") / f"{spec}.yaml").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_generated_file_is_sound_and_short(path):
    text = path.read_text()
    compile(text, str(path), "exec")
    assert lint(text) == []
    assert len(text.splitlines()) <= MAX_LINES[path.name]
    assert max(map(len, text.splitlines())) <= 140


def test_ruff_finds_nothing_wrong():
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F,E9", str(root("generated"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "branch",
    [
        "if dims.window:\n        x_TD = x_TD + 1",
        "x_TD = x_TD if dims.window else x_TD + 1",
        "x_TD = dims.window and x_TD",
        "assert dims.window",
        "while dims.window:\n        x_TD = x_TD + 1",
    ],
)
@pytest.mark.parametrize("head", ["def mlp(w: Layer, x_TD, dims)", "def forward(self, x_TD, dims)"])
def test_a_forward_that_branches_is_refused(head, branch):
    text = f"from flexgen.contract.abi import Layer\n\n\n{head}:\n    {branch}\n    return x_TD\n"
    assert any("a forward branches" in problem.message for problem in lint(text))
    elsewhere = text.replace("w: Layer", "d: Dims").replace("forward", "state")
    assert not any("branches" in problem.message for problem in lint(elsewhere))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import math\n", (1, "import `math` is unused")),
        ("def f():\n    return g()\n", (2, "`g` is not defined")),
        ("def f():\n    x = 1\n    return x\n\n\ndef g():\n    return x\n", (7, "`x` is not defined")),
        ("def f(:\n", (1, "invalid syntax")),
    ],
)
def test_what_a_broken_module_is_refused_for(text, problem):
    assert lint(text) == [problem]


# ---------------------------------------------------------------- how far a change reaches


def moved(before: str, after: str) -> list[str]:
    """Lines that a diff shows, of both sides the greater number."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    removed, added = ([line for line in lines if line.startswith(sign)] for sign in "-+")
    return max(removed, added, key=len)


def grown_number(number: str) -> str:
    return "7" if number == "0" else number.replace("e-", "5e-") if "e-" in number else number + "7"


def numbers(text: str) -> Iterator[tuple[str, str]]:
    """The text with one number of `checkpoint` and of the language's own fields changed, for each; tiny aside."""
    document = load(text, "spec.yaml")
    lines = text.split("\n")

    def walk(node, path):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            here = (*path, key)
            if isinstance(value, int | float) and not isinstance(value, bool) and here[0] not in ("tiny", "flexgen"):
                span = document.value_span(here)
                line = lines[span.line - 1]
                other = line[: span.column - 1] + grown_number(document.source(here)) + line[span.end_column - 1 :]
                yield ".".join(map(str, here)), "\n".join([*lines[: span.line - 1], other, *lines[span.line :]])
            yield from walk(value, here)

    yield from walk(document.data, ())


@pytest.mark.parametrize("spec", SPECS)
def test_a_changed_number_moves_at_most_two_lines(spec):
    text = source(spec)
    before, seen = made(text), 0
    for path, changed in numbers(text):
        try:
            after = made(changed)
        except SpecError:  # another number there makes `tiny` a config that the spec refuses
            continue
        lines = [line for name in before if name.endswith(".py") for line in moved(before[name], after[name])]
        heirs = text.count("{like: ") if path.startswith("attention.") else 0  # each entry states what it inherits
        assert 1 <= len(lines) <= max(2, 1 + heirs), (path, lines)
        seen += 1
    assert seen


def functions(text: str) -> dict[str, str]:
    return {part.split("(")[0]: part for part in text.split("\ndef ")[1:]}


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        ("gpt_oss", ("sliding: {like: full, window: window}", "sliding: {like: full, window: window, %s}")),
        ("llama", ("rope: rope, bias: attention_bias}", "rope: rope, bias: attention_bias, %s}")),
        ("gemma4_moe", ("v_norm: bare}", "v_norm: bare, %s}")),
    ],
)
@pytest.mark.parametrize("norm", ["q", "k"])
def test_a_head_norm_of_one_kind_moves_at_most_eight_lines_and_no_other_kind(spec, change, norm):
    text = source(spec).replace(f"{norm}_norm: rms, ", "")
    good, bad = change
    assert good in text
    before, after = made(text), made(text.replace(good, bad % f"{norm}_norm: rms", 1))
    lines = [line for name in before if name.endswith(".py") for line in moved(before[name], after[name])]
    kinds = 2 if spec == "gemma4_moe" else 1  # there the full attention inherits it
    assert 1 <= len(lines) <= 8 * kinds, lines
    if spec == "gpt_oss":
        for name in ("walker.py", "attention.py"):
            old, new = functions(before[name]), functions(after[name])
            changed = {function for function in new if old.get(function) != new[function]}
            assert all("sliding" in function for function in changed), changed
