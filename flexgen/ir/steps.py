"""Lowers steps to the lines of a generated function. `flexgen.ir.block` makes one `Lowering` for each layer kind and input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flexgen.ir import architecture as ir
from flexgen.ir.code import Size
from flexgen.ir.kinds import Filled
from flexgen.ir.parts import MIXERS, SECTIONS, Parts
from flexgen.ir.problems import defined
from flexgen.ir.rows import Rows
from flexgen.ir.shared import norm_why
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path

STREAM = "x_TD"


@dataclass
class Value:
    """A variable, and its width."""

    name: str
    width: Size


Lowered = tuple[Value, list[ir.Statement]]
"""A step as code: the variable that the next step reads, and the lines that make it."""


class Lowering:
    """The steps of one layer kind, or of one layer input.

    kind    what fills its slots; `slots` are those of any kind
    view    of a layer input: how many slices it has, and the width of each
    owned   the rows of the weights that steps themselves have, by role; several lowerings can share them
    tables, mixers, routes, inputs   what the lines turned out to use; `roles` of `owned`
    """

    def __init__(
        self,
        parts: Parts,
        make: Rows,
        owned: dict[str, ir.Row],
        *,
        kind: Filled | None = None,
        slots: frozenset[str] = frozenset(),
        view: tuple[Size, Size] | None = None,
    ) -> None:
        self.model, self.scope, self.problems = parts.model, parts.scope, parts.problems
        self.parts, self.make, self.owned = parts, make, owned
        self.kind, self.slots, self._view = kind or Filled("", {}, {}, ()), slots, view
        self.hidden = parts.hidden
        self.stream = Value(STREAM, self.hidden)
        self.tables: list[str] = []
        self.mixers: list[str] = []
        self.routes: list[tuple[str, Size]] = []
        self.inputs: list[str] = []
        self.roles: list[str] = []

    def is_empty(self, steps: list) -> bool:
        """Whether steps call a slot that this kind leaves empty, which takes the whole branch away."""
        return any(self._is_empty(step) for step in steps)

    def _is_empty(self, step: object) -> bool:
        if isinstance(step, models.SumStep):
            return all(self.is_empty(branch) for branch in step.sum)
        return isinstance(step, str) and self.kind.fills.get(step) == ()

    def add(self, part: models.AddPart, path: SpecPath) -> list[ir.Statement]:
        """A branch, and its addition to the stream; a norm that ends the branch is one line with that."""
        value, statements = self.steps(part.add, (*path, "add"), self.stream, "h")
        if value.width != self.hidden:
            message = f"this branch ends with width {shown(value.width)}, and the stream has {shown(self.hidden)}"
            self.problems.add("SPEC017", message, (*path, "add"), key=True, help="end it with a step back to `hidden`")
        if part.in_turn and not isinstance(part.add[-1], models.SumStep):
            message = "`in_turn` has no effect: the branch ends with no `sum`"
            self.problems.add("SPEC010", message, (*path, "in_turn"), key=True, help="remove it")
        last, why = statements[-1] if statements else None, part.why
        if last is not None and last.op == "norm" and not (last.comment and part.why):
            total = replace(last, op="add", out=STREAM, terms=(STREAM,), comment=last.comment or part.why)
            return [*statements[:-1], total]
        terms: tuple[str, ...] = (value.name,)
        has_sum = last is not None and last.op == "add" and not last.norm
        if part.in_turn and has_sum:
            *statements, summed = statements
            terms = summed.terms
            why = "; ".join(filter(None, (summed.comment, why))) or None
        total = ir.Statement("add", STREAM, STREAM, show_path(path), terms=(STREAM, *terms), comment=why)
        return [*statements, total]

    def steps(self, steps: list, path: SpecPath, value: Value, base: str) -> Lowered:
        """Steps in order, each reading the one before; a product after an activation is one line with it."""
        statements: list[ir.Statement] = []
        for index, step in enumerate(steps):
            value, lines = self.step(step, (*path, index), value, base)
            is_product = bool(lines) and lines[0].op == "times"
            last = statements[-1] if statements else None
            if is_product and last is not None and last.op == "act" and not (last.comment or last.value):
                lines[0] = replace(statements.pop(), value=lines[0].value, comment=lines[0].comment)
            statements += lines
        return value, statements

    def step(self, step: object, path: SpecPath, value: Value, base: str) -> Lowered:
        """One step at a path, which reads `value` and assigns variables called `base`."""
        if isinstance(step, str):
            return self._entry(step, path, value, base)
        handlers: dict[type, Callable[..., Lowered]] = {
            models.NormStep: self._norm,
            models.LinearStep: self._linear,
            models.ActStep: self._act,
            models.GainStep: self._gain,
            models.ScaleStep: self._scale,
            models.TimesStep: self._times,
            models.SumStep: self._sum,
            models.EmbeddingStep: self._embedding,
        }
        return handlers[type(step)](step, path, value, base)

    def _out(self, base: str, width: Size) -> Value:
        """The variable a step assigns: its base and the legend's suffix for its shape."""
        letters = "L" if self._view else ""
        return Value(f"{base}_T{letters}{'D' if width == self.hidden else 'I'}", width)

    def _line(self, op: str, path: SpecPath, value: Value, base: str, /, **fields: Any) -> Lowered:
        """One line that makes a value as wide as the one it reads; `fields` are those of `ir.Statement`."""
        out = self._out(base, value.width)
        return out, [ir.Statement(op, out.name, value.name, show_path(path), **fields)]

    def _norm(self, step: models.NormStep, path: SpecPath, value: Value, base: str) -> Lowered:
        gain = self.parts.has_gain(step.norm)
        role = role_of(step.weight or "")
        if gain and step.weight is None:
            message = f"the norm `{step.norm}` has a gain, and this step names no weight"
            help = "add `weight: MODULE`, or name a norm with `gain: none`"
            self.problems.add("SPEC019", message, path, help=help)
        if not gain and step.weight is not None and step.norm in self.model.norms:
            message = f"the norm `{step.norm}` has no gain to use this weight"
            help = "remove it, or name a norm with a gain"
            self.problems.add("SPEC018", message, (*path, "weight"), help=help)
        call = self.parts.norm(step.norm, (*path, "norm"), f"w.{role}")
        if gain and step.weight is not None:
            for row in self.parts.norm_rows(self.make, step.norm, role, value.width, step.weight):
                self._own(row, path)
        return self._line("norm", path, value, base, norm=call, comment=norm_why(step, call))

    def _linear(self, step: models.LinearStep, path: SpecPath, value: Value, base: str) -> Lowered:
        role = role_of(step.linear)
        if self._view:
            layers, width = self._view
            rows = layers * width
            if step.size is not None:
                message = "`size` has no effect here: every slice of a layer input has the input's own `size`"
                self.problems.add("SPEC010", message, (*path, "size"), key=True, help="remove it")
        else:
            if step.size is None:
                self.problems.add("SPEC005", "a linear step needs its `size`", path, help="add `size: DIM`")
            width = rows = self.scope.code(step.size or "0", (*path, "size"))
        row = self.make.linear(role, [(step.linear, rows)], value.width)
        self._own(row, path)
        out, where, weight = self._out(base, width), show_path(path), row.code
        terms = tuple(map(str, self._view or ()))
        return out, [ir.Statement("linear", out.name, value.name, where, weight=weight, terms=terms, comment=step.why)]

    def _act(self, step: models.ActStep, path: SpecPath, value: Value, base: str) -> Lowered:
        return self._line("act", path, value, base, act=step.act, comment=step.why)

    def _gain(self, step: models.GainStep, path: SpecPath, value: Value, base: str) -> Lowered:
        role = role_of(step.gain)
        size = value.width if step.size is None else self.scope.code(step.size, (*path, "size"))
        self._own(self.make.vector(role, size, step.gain), path)
        return self._line("gain", path, value, base, weight=f"w.{role}", comment=step.why)

    def _scale(self, step: models.ScaleStep, path: SpecPath, value: Value, base: str) -> Lowered:
        number = self.scope.code(step.scale, (*path, "scale"), "float")
        return self._line("scale", path, value, base, value=number, comment=step.why)

    def _times(self, step: models.TimesStep, path: SpecPath, value: Value, base: str) -> Lowered:
        entry = self.model.layer_inputs.get(step.times)
        if entry is None:
            known = defined("layer_inputs", self.model.layer_inputs)
            self.problems.unknown("layer input", step.times, known, (*path, "times"))
            return value, []
        size = self.scope.code(entry.size, ("layer_inputs", step.times, "size"))
        if size != value.width:
            message = f"`{step.times}` has width {shown(size)}, and what it multiplies has {shown(value.width)}"
            self.problems.add("SPEC017", message, path)
        if step.times not in self.inputs:
            self.inputs.append(step.times)
        return self._line("times", path, value, base, value=f"{step.times}_TI", comment=step.why)

    def _embedding(self, step: models.EmbeddingStep, path: SpecPath, value: Value, base: str) -> Lowered:
        if not self._view:
            help = "tables indexed by token belong in `layer_inputs` and `embedding`"
            self.problems.add("SPEC025", "an embedding inside the block is not implemented", path, help=help)
            return value, []
        role = role_of(step.embedding)
        vocab = self.scope.code(step.vocab, (*path, "vocab"))
        layers, width = self._view
        self._own(self.make.embedding(role, vocab, layers * width, step.embedding), path)
        out, where, weight = self._out(base, width), show_path(path), f"w.{role}"
        line = ir.Statement("embed", out.name, "ids_T", where, weight=weight, terms=(str(layers), str(width)), comment=step.why)
        if step.scale == "1":
            return out, [line]
        scale: Size | str = self.scope.code(step.scale, (*path, "scale"), "float")
        if step.scale_dtype == "model":
            scale = f"rounded({scale}, {weight}.dtype)"
        return out, [line, ir.Statement("scale", out.name, out.name, where, value=scale)]

    def _sum(self, step: models.SumStep, path: SpecPath, value: Value, base: str) -> Lowered:
        statements: list[ir.Statement] = []
        ends: list[Value] = []
        branches = [(index, branch) for index, branch in enumerate(step.sum) if not self.is_empty(branch)]
        if len(branches) == 1:
            ((index, branch),) = branches
            return self.steps(branch, (*path, "sum", index), value, base)
        for index, branch in branches:
            end, lines = self.steps(branch, (*path, "sum", index), value, self._branch_name(branch, index))
            statements += lines
            ends.append(end)
        for (index, _), end in zip(branches, ends):
            if end.width != ends[0].width:
                message = f"this branch has width {shown(end.width)}, and the first has {shown(ends[0].width)}"
                self.problems.add("SPEC017", message, (*path, "sum", index))
        out = self._out(base, ends[0].width)
        terms = tuple(end.name for end in ends)
        return out, [*statements, ir.Statement("add", out.name, terms[0], show_path(path), terms=terms, comment=step.why)]

    def _branch_name(self, branch: list, index: int) -> str:
        """A branch is named after the slot or entry it calls, or after the first weight it reads."""
        for step in branch:
            if isinstance(step, str):
                return step
        for step in branch:
            for field in ("linear", "embedding", "gain"):
                if hasattr(step, field):
                    return role_of(getattr(step, field))
        return f"branch{index}"

    def _entry(self, name: str, path: SpecPath, value: Value, base: str) -> Lowered:
        """A call of a part: the entry of that name, or what fills the slot of that name."""
        if name not in self.slots:
            return self._call(name, None, path, path, value, base)
        if name not in self.kind.fills:
            return value, []
        entries, place = self.kind.fills[name], self.kind.places[name]
        if len(entries) == 1:
            return self._call(entries[0], name, place, path, value, base)
        statements: list[ir.Statement] = []
        ends: list[str] = []
        for index, entry in enumerate(entries):
            end, lines = self._call(entry, None, (*place, index), path, value, entry)
            statements += lines
            ends.append(end.name)
        out = self._out(base, value.width)
        return out, [*statements, ir.Statement("add", out.name, ends[0], show_path(path), terms=tuple(ends))]

    def _call(self, entry: str, slot: str | None, defined_at: SpecPath, path: SpecPath, value: Value, base: str) -> Lowered:
        """A call of an entry, which fills a slot where one is given."""
        section = next((s for s in SECTIONS if entry in getattr(self.model, s)), None)
        if section is None:
            known: dict[str, SpecPath] = {slot: ("kinds", name, slot) for name, kind in self.model.kinds.items() for slot in kind}
            for section in SECTIONS:
                known |= defined(section, getattr(self.model, section))
            self.problems.unknown("part", entry, known, defined_at)
            return value, []
        if value.width != self.hidden:
            message = f"`{entry}` reads width `hidden`, and gets {shown(value.width)}"
            self.problems.add("SPEC017", message, path)
        part = self.parts.part(section, entry)
        self.tables.append(part.table.function)
        if section == "moe":
            return self._experts(part, path, value, base)
        arguments: tuple[str, ...] = ()
        if section in MIXERS:
            self.mixers.append(entry)
            arguments = ("dims", "step")
        elif section == "mlp":
            arguments = part.arguments
        marker = _cache_marker(section, part)
        return self._line("call", path, value, base, function=part.function, arguments=arguments, slot=slot, comment=marker)

    def _experts(self, moe: ir.Moe, path: SpecPath, value: Value, base: str) -> Lowered:
        """Two lines: where each token goes, and what the experts there make of it."""
        self.routes.append((moe.routed, moe.top_k))
        reads = STREAM if moe.reads_stream else value.name
        routes = "routes" if base in ("h", moe.name) else f"{base}_routes"
        comment = "reads the stream, not the normed input" if moe.reads_stream else None
        where = f"{moe.path}.router"
        route = ir.Statement("route", routes, reads, where, function=moe.route, arguments=("dims",), comment=comment)
        arguments = (f"*{routes}", "dims")
        out, call = self._line("call", path, value, base, function=moe.experts, arguments=arguments)
        return out, [route, *call]

    def _own(self, row: ir.Row, path: SpecPath) -> None:
        if row.role in self.roles:
            help = "a module of the file is one weight: name another, or compute it once and `sum` what reads it"
            self.problems.add("SPEC025", f"`{row.role}` is the weight of two steps of one layer", path, help=help)
        self.roles.append(row.role)
        if self.owned.setdefault(row.role, row) != row:
            self.problems.add("SPEC020", f"two weights would both be called `{row.role}`", path)


def _cache_marker(section: str, part: Any) -> str | None:
    """What a call does to what the layer keeps: capture makes such lines the risky ones."""
    if section == "gdn":
        return "reads and writes its state"
    if section == "attention":
        return "reads the K/V pages of an earlier layer" if part.kv_of else "writes K/V pages"
    return None


def role_of(name: str) -> str:
    """The attribute that a weight of a checkpoint's name becomes."""
    return name.replace(".", "_").replace("*", "x")


def shown(width: Size) -> str:
    """A width as messages name it."""
    return f"`{width.label}`"
