"""What must hold of every generated file before it is written: it compiles, defines what it uses, uses what it imports,
and its forwards are straight lines."""

from __future__ import annotations

import ast
import builtins
from typing import NamedTuple

_BRANCHES = (ast.If, ast.IfExp, ast.BoolOp, ast.While, ast.Match, ast.Try, ast.Assert, ast.With)
"""A forward has none of these: the spec and the load have settled everything before it runs."""

_FORWARDS = ("forward", "logits")


class Problem(NamedTuple):
    """What is wrong with a line."""

    line: int
    message: str


def lint(text: str) -> list[Problem]:
    """Problems of a module's source: syntax, undefined names, unused imports, branches in a forward."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [Problem(error.lineno or 1, error.msg)]
    imports, functions = _imports(tree), _functions(tree)
    bodies = {function: list(ast.walk(function)) for function in functions}
    outside = [node for statement in tree.body for node in _without_functions(statement)]
    used = {node.id for nodes in (outside, *bodies.values()) for node in _names(nodes, ast.Load)}
    problems = [Problem(line, f"import `{name}` is unused") for name, line in imports.items() if name not in used]
    defined = {*dir(builtins), *imports, *(node.id for node in _names(outside, ast.Store))}
    defined |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for function, nodes in bodies.items():
        problems += _undefined(nodes, defined)
        if _is_forward(function):
            problems += [Problem(node.lineno, "a forward branches") for node in nodes if isinstance(node, _BRANCHES)]
    return problems


def _names(nodes: list[ast.AST], context: type[ast.expr_context]) -> list[ast.Name]:
    return [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)]


def _imports(tree: ast.Module) -> dict[str, int]:
    """The names that are imported, each with its line."""
    statements = [*tree.body, *(inner for node in tree.body if isinstance(node, ast.If) for inner in node.body)]
    return {
        alias.asname or alias.name.split(".")[0]: node.lineno
        for node in statements
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__"
        for alias in node.names
    }


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    members = [node for owner in tree.body if isinstance(owner, ast.ClassDef) for node in owner.body]
    return [node for node in (*tree.body, *members) if isinstance(node, ast.FunctionDef)]


def _without_functions(node: ast.AST) -> list[ast.AST]:
    """A statement's nodes, those of the functions in it left out."""
    if isinstance(node, ast.FunctionDef):
        return []
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _without_functions(child))]


def _undefined(nodes: list[ast.AST], defined: set[str]) -> list[Problem]:
    local = {node.arg for node in nodes if isinstance(node, ast.arg)} | {n.id for n in _names(nodes, ast.Store)}
    loads = _names(nodes, ast.Load)
    return [Problem(node.lineno, f"`{node.id}` is not defined") for node in loads if node.id not in local | defined]


def _is_forward(function: ast.FunctionDef) -> bool:
    """Functions of a layer's weights `w: Layer`, and the model's own."""
    first = function.args.args[0] if function.args.args else None
    is_layers = first is not None and isinstance(first.annotation, ast.Name) and first.annotation.id == "Layer"
    return is_layers or function.name in _FORWARDS
