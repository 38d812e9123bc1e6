"""Runs generated code line by line and holds each product with a weight to the reference's module of that weight.

Generated code carries nothing for this. A tracer stops before each statement, finds the calls in it that take a weight
(`project(x, w.qkv)`), evaluates their input and result, and compares both with what the reference's module took and
gave. A result that differs is that line's fault; an input that differs is the fault of the line that assigned it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from flexgen.contract.abi import Layer
from flexgen.verify.reference import Call

RESHAPES = ("flatten", "unflatten", "float")
MARKER = "# spec: "


@dataclass(frozen=True)
class Place:
    """One line of generated code, the block's line that led to it, and the line before that was still right."""

    file: Path
    line: int
    layer_line: int | None = None
    agreed: int | None = None


@dataclass(frozen=True)
class Fault:
    """A line to blame, what was compared, and by how much it differs."""

    place: Place
    what: str
    error: float


@dataclass
class _Function:
    """State of one running generated function."""

    statement: ast.stmt
    assigned: dict[str, int] = field(default_factory=dict)
    agreed: int | None = None


def error(ours: Tensor, theirs: Tensor) -> float:
    """Greatest difference relative to the reference's greatest value, at least 1; infinite where one is not finite."""
    ours, theirs = ours.detach().float().flatten(), theirs.detach().float().flatten().to(ours.device)
    difference = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


class Tracer:
    """Collects the faults of generated code while `watching()`, in order.

    expected  (index of the layer or None, role) -> the calls of the reference's modules that hold the weight
    """

    def __init__(
        self,
        folder: Path,
        owners: Mapping[int, int | None],
        expected: Callable[[int | None, str], list[Call]],
        tolerance: float,
    ) -> None:
        self.folder, self.owners, self.expected = str(folder), owners, expected
        self.tolerance = tolerance
        self.faults: list[Fault] = []
        self.compared: set[tuple[str, int, int | None]] = set()
        self.last_return: Place | None = None
        self._running: dict[FrameType, _Function] = {}
        self._statements: dict[str, dict[int, ast.stmt]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Trace this thread; whatever traced it before goes on afterwards."""
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._event if self._is_generated(frame.f_code) else None

    def _event(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            statement = self._statements_of(frame.f_code.co_filename).get(frame.f_lineno)
            running = self._running.get(frame)
            if statement is not None and (running is None or running.statement is not statement):
                self._enter(frame, statement)
        elif event == "return":
            running = self._running.get(frame)
            value = running.statement.value if running is not None and isinstance(running.statement, ast.Return) else None
            if value is not None and not self._is_handed_on(frame, value):
                self.last_return = self._blame(frame, value)
            self._running.pop(frame, None)
        return self._event

    def _enter(self, frame: FrameType, statement: ast.stmt) -> None:
        running = self._running.setdefault(frame, _Function(statement))
        _note(running.assigned, running.statement)
        running.statement = statement
        innermost_first = reversed(list(ast.walk(statement)))
        for call in (node for node in innermost_first if isinstance(node, ast.Call)):
            self._compare(frame, call)

    def _compare(self, frame: FrameType, call: ast.Call) -> None:
        weights = frame.f_locals.get("w")
        role = next((role for role in map(_role, call.args) if role is not None), None)
        if role is None or not isinstance(weights, Layer):
            return
        layer = self.owners[id(weights)]
        expected = self.expected(layer, role)
        if not expected:
            return
        given = expected[0].input
        value = _evaluate(call.args[0], frame)
        if given is not None and isinstance(value, Tensor) and value.numel() == given.numel():
            self._hold(value, given, f"the input of w.{role}", lambda: self._blame(frame, call.args[0]))
            if self.faults and self.faults[-1].what == f"the input of w.{role}":
                return  # what it makes of another input cannot be told
        outputs = [one.output for one in expected]
        if all(isinstance(output, Tensor) for output in outputs):
            theirs = torch.cat([output.flatten(0, -2) for output in outputs], dim=-1)
            ours = _evaluate(call, frame)
            if isinstance(ours, Tensor) and ours.numel() == theirs.numel() and not _is_scaled_embedding(call):
                self.compared.add((frame.f_code.co_filename, frame.f_lineno, layer))
                self._hold(ours, theirs, f"the product with w.{role}", lambda: self._place(frame, frame.f_lineno))
                if not self.faults:
                    self._running[frame].agreed = frame.f_lineno

    def _hold(self, ours: Tensor, theirs: Tensor, what: str, place: Callable[[], Place]) -> None:
        difference = error(ours, theirs)
        if difference > self.tolerance:
            self.faults.append(Fault(place(), what, difference))

    def _blame(self, frame: FrameType, expression: ast.expr) -> Place:
        """The line that made the value of an expression in a running function."""
        running = self._running[frame]
        name = _root_name(expression)
        if name in running.assigned:
            return self._place(frame, running.assigned[name])
        caller = frame.f_back
        if name is not None and caller is not None and caller in self._running:
            position = frame.f_code.co_varnames.index(name)
            for call in (n for n in ast.walk(self._running[caller].statement) if isinstance(n, ast.Call)):
                if _called(caller, call.func) is frame.f_code:
                    if any(isinstance(arg, ast.Starred) for arg in call.args[: position + 1]):
                        return self._place(caller, caller.f_lineno)
                    if not self._is_handed_on(caller, call):
                        return self._blame(caller, call.args[position])
        return self._place(frame, running.statement.lineno)

    def _is_handed_on(self, frame: FrameType, value: ast.expr) -> bool:
        """Whether a function returns what another generated one makes of its own arguments, as a kind's layer does."""
        is_returned = isinstance(self._running[frame].statement, ast.Return)
        code = _called(frame, value.func) if isinstance(value, ast.Call) else None
        return is_returned and code is not None and self._is_generated(code)

    def _place(self, frame: FrameType, line: int) -> Place:
        at: FrameType | None = frame
        layer_line: int | None = None
        while at is not None and layer_line is None:
            if self._is_generated(at.f_code):
                own = line if at is frame else self._running[at].statement.lineno
                layer_line = own if (marker(Path(at.f_code.co_filename), own) or "").startswith("block[") else None
            at = at.f_back
        return Place(Path(frame.f_code.co_filename), line, layer_line, self._running[frame].agreed)

    def _is_generated(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self.folder)

    def _statements_of(self, file: str) -> dict[int, ast.stmt]:
        if file not in self._statements:
            tree = ast.parse(Path(file).read_text())
            simple = (ast.Assign, ast.Return, ast.Expr)
            self._statements[file] = {n.lineno: n for n in ast.walk(tree) if isinstance(n, simple)}
        return self._statements[file]


def marker(file: Path, line: int) -> str | None:
    """The spec path that the nearest marker above a line names."""
    for text in reversed(file.read_text().splitlines()[:line]):
        if text.startswith(("def ", "    def ")):
            return None
        if MARKER in text:
            return text.split(MARKER)[1].strip()
    return None


def _note(assigned: dict[str, int], statement: ast.stmt) -> None:
    if isinstance(statement, ast.Assign):
        for node in (node for target in statement.targets for node in ast.walk(target)):
            if isinstance(node, ast.Name):
                assigned[node.id] = statement.lineno


def _called(frame: FrameType, function: ast.expr) -> CodeType | None:
    """The code of the function that a name stands for in a running function: a slot's filling is an argument."""
    name = function.id if isinstance(function, ast.Name) else ""
    return getattr(frame.f_locals.get(name, frame.f_globals.get(name)), "__code__", None)


def _role(node: ast.expr) -> str | None:
    """role of `w.role` and `w.role.t()`; None for anything else."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "t":
        node = node.func.value
    is_weight = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "w"
    return node.attr if is_weight else None  # type: ignore[attr-defined]


def _is_scaled_embedding(call: ast.Call) -> bool:
    """The reference's embedding module scales its rows; generated code does so outside of the call."""
    return ast.unparse(call.func) in ("embed", "F.embedding")


def _root_name(expression: ast.expr) -> str | None:
    """x of `x`, `x.flatten(1)` and the like; None for what computes."""
    while isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        if expression.func.attr not in RESHAPES:
            return None
        expression = expression.func.value
    return expression.id if isinstance(expression, ast.Name) else None


def _evaluate(expression: ast.expr, frame: FrameType) -> Any:
    """The value of an expression of a statement about to run. What takes a weight writes nothing, so this is safe."""
    code = compile(ast.Expression(expression), frame.f_code.co_filename, "eval")
    return eval(code, frame.f_globals, frame.f_locals)
