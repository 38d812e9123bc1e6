"""What must hold of every generated file before it is written: it compiles, defines what it uses and uses what it imports."""

from __future__ import annotations

import ast
import builtins


def lint(text: str) -> list[str]:
    """Problems of a module's source, one line each: syntax, undefined names, unused imports and parameters."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    defined = _module_names(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    problems = [f"import `{name}` is unused" for name in _imports(tree) if name not in used]
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        problems += _lint_function(function, defined)
    return problems


def _imports(tree: ast.Module) -> list[str]:
    return [
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__"
        for alias in node.names
    ]


def _module_names(tree: ast.Module) -> set[str]:
    names = set(dir(builtins)) | set(_imports(tree))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names


def _lint_function(function: ast.FunctionDef, defined: set[str]) -> list[str]:
    local = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    local |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local |= {a.arg for n in ast.walk(function) if isinstance(n, ast.Lambda) for a in n.args.args}
    loads = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return [f"line {node.lineno}: `{node.id}` is not defined" for node in loads if node.id not in local | defined]
