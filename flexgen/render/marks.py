"""Marks in rendered text: an invisible one before each template line says where what follows it comes from.

Jinja's tree is changed before it is compiled: each output of a template line is preceded by a call that leaves a mark. The
marks never meet the text of a spec, which holds no control characters, and taking them out gives the plain rendering.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

MARK = re.compile("\x01([0-9]+)\x02")
_CALL = "leave_mark"
_STOP = "end_marks"


@dataclass
class Mark:
    """A template line that wrote something, and the spec paths it read while it did: of its entry first."""

    template: str
    line: int
    reads: list[str] = field(default_factory=list)


class Recorder:
    """Hands out marks while a template renders, and notes what each reads of the architecture."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self._open: Mark | None = None

    def note(self, path: str) -> None:
        """The architecture was read at a path."""
        if self._open is not None:
            self._open.reads.append(path)

    def leave(self, template: str, line: int, entry: Any = None, *conditions: str) -> str:
        """Text that marks what follows as written by a template line, about an entry, because fields of it are set."""
        path = object.__getattribute__(entry, "_path") if isinstance(entry, Watched) else None
        self._open = Mark(template, line, [path, *(f"{path}.{name}" for name in conditions)] if path else [])
        self.marks.append(self._open)
        return f"\x01{len(self.marks) - 1}\x02"

    def end(self) -> str:
        """What is read from here on is no longer part of a line."""
        self._open = None
        return ""


class Watched:
    """A node of the architecture that notes each field that is read of it."""

    def __init__(self, node: Any, path: str, recorder: Recorder) -> None:
        self._node, self._path, self._recorder = node, path, recorder

    def __getattr__(self, name: str) -> Any:
        value, path = getattr(self._node, name), f"{self._path}.{name}".lstrip(".")
        self._recorder.note(path)
        return watch(value, path, self._recorder)


def watch(value: Any, path: str, recorder: Recorder) -> Any:
    """A node as `Watched`, nodes in a tuple likewise; a node that names its own spec path has that one."""
    if dataclasses.is_dataclass(value):
        return Watched(value, getattr(value, "path", path), recorder)
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        return tuple(watch(item, path, recorder) for item in value)
    return value


class MarkedEnvironment(Environment):
    """An environment whose templates leave marks with its `recorder`, a new one for each rendering."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recorder = Recorder()
        self.globals[_CALL] = lambda *arguments: self.recorder.leave(*arguments)
        self.globals[_STOP] = lambda: self.recorder.end()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Marking(name or "").visit(super()._parse(source, name, filename))


class _Marking(NodeTransformer):
    def __init__(self, template: str) -> None:
        self.template = template
        self.entries: list[str] = []
        self.conditions: list[str] = []

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._within(node.target, node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._within(node.args[0] if node.args else None, node)

    def _within(self, entry: nodes.Node | None, node: Any) -> Any:
        """Visit what is inside a loop or a macro: its lines belong to the entry that it is about."""
        name = entry.name if isinstance(entry, nodes.Name) else self.entries[-1] if self.entries else ""
        conditions, self.conditions = self.conditions, []
        self.entries.append(name)
        visited = self.generic_visit(node)
        self.entries.pop()
        self.conditions = conditions
        return visited

    def visit_If(self, node: nodes.If) -> nodes.If:
        """What stands behind `{% if entry.field %}` is there because of that field."""
        test = node.test
        owner = test.node if isinstance(test, nodes.Getattr) else None
        field = test.attr if isinstance(test, nodes.Getattr) and isinstance(owner, nodes.Name) else None
        if field and self.entries and isinstance(owner, nodes.Name) and owner.name == self.entries[-1]:
            self.conditions.append(field)
            node.body = [self.visit(child) for child in node.body]
            self.conditions.pop()
        else:
            node.body = [self.visit(child) for child in node.body]
        node.elif_ = [self.visit(child) for child in node.elif_]
        node.else_ = [self.visit(child) for child in node.else_]
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        node.nodes = [*self._marked(node), _call(_STOP, [], node.lineno)]
        return node

    def _marked(self, node: nodes.Output) -> Iterator[nodes.Expr]:
        at_start = True
        for child in node.nodes:
            if not isinstance(child, nodes.TemplateData):
                if at_start:
                    yield self._mark(child.lineno)
                at_start = False
                yield child
                continue
            pieces = child.data.split("\n")
            for number, piece in enumerate(pieces):
                is_last = number == len(pieces) - 1
                if (at_start or number) and (piece or not is_last):
                    yield self._mark(child.lineno + number)
                yield nodes.TemplateData(piece if is_last else f"{piece}\n", lineno=child.lineno + number)
                at_start = is_last and not piece

    def _mark(self, line: int) -> nodes.Expr:
        entry = [nodes.Name(self.entries[-1], "load")] if self.entries and self.entries[-1] else []
        conditions = [nodes.Const(name) for name in self.conditions] if entry else []
        return _call(_CALL, [nodes.Const(self.template), nodes.Const(line), *entry, *conditions], line)


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Expr:
    call = nodes.Call(nodes.Name(name, "load"), arguments, [], None, None, lineno=line)
    for inner in call.find_all(nodes.Node):
        inner.lineno = line
    return call
