"""Names of a spec beside the names that generated code has already."""

from __future__ import annotations

import ast
import builtins
import dataclasses

import pytest

from flexgen.assets import root
from flexgen.compiler import check, find_specs
from flexgen.ir import names
from flexgen.ir.resolve import resolve
from flexgen.render.render import render
from flexgen.spec.diagnostics import SpecError
from flexgen.spec.load import parse_spec

LLAMA = (root("specs") / "llama.yaml").read_text()


def renamed(section: str, old: str, new: str) -> str:
    """llama with one entry of another name, everywhere."""
    text = LLAMA.replace(f"{section}:\n  {old}:", f"{section}:\n  {new}:")
    return {
        "attention": text.replace("{attention: full}", f"{{attention: {new}}}"),
        "mlp": text.replace("layernorm}, mlp]", f"layernorm}}, {new}]"),
        "kinds": text.replace("kind: full}", f"kind: {new}}}"),
    }[section]


@pytest.mark.parametrize(
    ("section", "old", "new", "generated"),
    [
        ("attention", "full", "block", "block_weights"),
        ("attention", "full", "model", "model_weights"),
        ("mlp", "mlp", "w", "w"),
        ("mlp", "mlp", "rms_norm", "rms_norm"),
        ("mlp", "mlp", "zip", "zip"),
    ],
)
def test_a_name_that_generated_code_has_already_is_refused(section, old, new, generated):
    with pytest.raises(SpecError, match=rf"SPEC020.*would be called `{generated}`"):
        resolve(parse_spec(renamed(section, old, new), "spec.yaml"))


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(SpecError, match="`mlp` names an entry of `attention` and one of `mlp`"):
        resolve(parse_spec(renamed("attention", "full", "mlp"), "spec.yaml"))


def test_names_of_every_generated_module_are_the_specs_or_known():
    """What a template defines, imports or calls a variable is a name that no entry may take."""
    for path in find_specs([]):
        checked = check(path)
        files = render(checked.architecture)
        own = {item["name"] for item in _named(dataclasses.asdict(checked.architecture))}
        own |= {name for block in checked.architecture.blocks for name in (block.function, *block.slots)}
        for name in ("walker.py", "attention.py"):
            for used in module_names(ast.parse(files[name])) | arguments(ast.parse(files[name])):
                stem = used.removesuffix("_TI")
                claimed = any(stem == mine or stem.startswith(f"{mine}_") for mine in own)
                assert claimed or used in names.MODULE or not used.islower(), (path.stem, name, used)


def _named(node):
    if isinstance(node, dict):
        if "name" in node:
            yield node
        for value in node.values():
            yield from _named(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _named(value)


def module_names(tree: ast.Module) -> set[str]:
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def arguments(tree: ast.Module) -> set[str]:
    """Of functions that call other parts by name: what they call their own arguments hides a part of that name."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    forwards = [each for each in functions if each.args.args and each.args.args[0].arg == "w"]
    return {argument.arg for function in forwards for argument in function.args.args}


def test_names_of_the_constructor_of_dims_are_known():
    tree = ast.parse(render(check(find_specs(["llama"])[0]).architecture)["walker.py"])
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} | {a.arg for a in function.args.args}
    dims = {dim.name for dim in check(find_specs(["llama"])[0]).architecture.dims} | {"rope"}
    assert {name for name in used - dims if name.islower()} - set(dir(builtins)) <= names.DIMS
