"""Lowers the block, the sum that one layer is, to the lines of a generated function: once for each layer kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flexgen.ir import architecture as ir
from flexgen.ir.parts import Parts
from flexgen.ir.problems import Problems, defined
from flexgen.ir.scope import Scope
from flexgen.ir.shared import norm_why
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path

MIXERS = ("attention", "gdn")
PART_SECTIONS = (*MIXERS, "mlp", "moe")
STREAM = "x_TD"
HIDDEN = "dims.hidden"


@dataclass
class Value:
    """A variable, and the code of its width."""

    name: str
    width: str


Lowered = tuple[Value, list[ir.Statement]]
"""A step as code: the variable that the next step reads, and the lines that make it."""


class Block:
    """The block of a spec. `layer(kind)` lowers it; `rows` then holds the weights that the steps themselves own."""

    def __init__(self, model: models.SpecModel, parts: Parts, scope: Scope, problems: Problems) -> None:
        self.model = model
        self.parts = parts
        self.scope = scope
        self.problems = problems
        self.rows: dict[str, ir.Row] = {}
        self.prefix = parts.layers
        self.slots = {slot for kind in model.kinds.values() for slot in kind}
        # of the kind at hand: what fills its slots, and what it uses
        self._slots: dict[str, str] = {}
        self._tables: list[str] = []
        self._mixers: list[str] = []
        self._routes: list[tuple[str, str]] = []
        self._inputs: list[str] = []
        # of a layer input: how many slices it has, and the width of each
        self._view: tuple[str, str] | None = None

    def layer(self, name: str) -> ir.Kind:
        """One layer kind: its parts in order, the tables of its weights and the entries that keep state."""
        self._slots = self.model.kinds[name]
        self._tables, self._mixers, self._routes, self._inputs = ["block_weights"], [], [], []
        parts = []
        for index, part in enumerate(self.model.block):
            path: SpecPath = ("block", index)
            if isinstance(part, models.AddPart):
                statements = self._add(part, path)
            else:
                value, statements = self._step(part, path, Value(STREAM, HIDDEN), "x")
                assert value.name == STREAM
            parts.append(ir.Part(f"block[{index}]", tuple(statements)))
        self._check_slots(name)
        parts, result = _returned(parts)
        return ir.Kind(
            name=name,
            function=f"{name}_layer",
            parts=tuple(parts),
            result=result,
            mixers=tuple(self._mixers),
            routes=tuple(self._routes),
            tables=tuple(self._tables),
            inputs=tuple(self._inputs),
            path=f"kinds.{name}",
        )

    def layer_input(self, name: str, entry: models.LayerInput) -> ir.LayerInput:
        """A value made once from the embedded tokens; its steps see one layer's slice in the last dimension."""
        at = ("layer_inputs", name)
        size = self.scope.code(entry.size, (*at, "size"))
        self.prefix, self.rows = "", {}
        self._view = ("dims.layers", size)
        value, statements = self._steps(entry.steps, (*at, "steps"), Value(STREAM, HIDDEN), name)
        if value.width != size:
            message = f"`{name}` ends with width {_shown(value.width)}, and its `size` is {_shown(size)}"
            self.problems.add("SPEC017", message, (*at, "size"))
        self._view = None
        return ir.LayerInput(name, value.name, tuple(statements), ".".join(at), entry.why)

    # ------------------------------------------------------------ branches

    def _add(self, part: models.AddPart, path: SpecPath) -> list[ir.Statement]:
        """A branch, and its addition to the stream; a norm that ends the branch is one line with that."""
        value, statements = self._steps(part.add, (*path, "add"), Value(STREAM, HIDDEN), "h")
        if value.width != HIDDEN:
            message = f"this branch ends with width {_shown(value.width)}, and the stream has {_shown(HIDDEN)}"
            self.problems.add("SPEC017", message, (*path, "add"), key=True, help="end it with a step back to `hidden`")
        last = statements[-1] if statements else None
        if last is not None and last.op == "norm" and not (last.comment and part.why):
            total = replace(last, op="add", out=STREAM, terms=(STREAM,), comment=last.comment or part.why)
            return [*statements[:-1], total]
        total = ir.Statement("add", STREAM, STREAM, show_path(path), terms=(STREAM, value.name), comment=part.why)
        return [*statements, total]

    def _steps(self, steps: list, path: SpecPath, value: Value, base: str) -> Lowered:
        """Steps in order, each reading the one before; a product after an activation is one line with it."""
        statements: list[ir.Statement] = []
        for index, step in enumerate(steps):
            value, lines = self._step(step, (*path, index), value, base)
            is_product = bool(lines) and lines[0].op == "times"
            last = statements[-1] if statements else None
            if is_product and last is not None and last.op == "act" and not (last.comment or last.value):
                lines[0] = replace(statements.pop(), value=lines[0].value, comment=lines[0].comment)
            statements += lines
        return value, statements

    def _step(self, step: object, path: SpecPath, value: Value, base: str) -> Lowered:
        """One step at a path, which reads `value` and assigns variables called `base`."""
        if isinstance(step, str):
            return self._entry(step, path, value, base)
        handler = {
            models.NormStep: self._norm,
            models.LinearStep: self._linear,
            models.ActStep: self._act,
            models.GainStep: self._gain,
            models.ScaleStep: self._scale,
            models.TimesStep: self._times,
            models.SumStep: self._sum,
            models.EmbeddingStep: self._embedding,
        }[type(step)]
        return handler(step, path, value, base)

    def _out(self, base: str, width: str) -> Value:
        """The variable a step assigns: its base and the legend's suffix for its shape."""
        letters = "L" if self._view else ""
        return Value(f"{base}_T{letters}{'D' if width == HIDDEN else 'I'}", width)

    def _line(self, op: str, path: SpecPath, value: Value, base: str, /, **fields: Any) -> Lowered:
        """One line that makes a value as wide as the one it reads; `fields` are those of `ir.Statement`."""
        out = self._out(base, value.width)
        return out, [ir.Statement(op, out.name, value.name, show_path(path), **fields)]

    # ------------------------------------------------------------ one step each

    def _norm(self, step: models.NormStep, path: SpecPath, value: Value, base: str) -> Lowered:
        gain = self.parts.has_gain(step.norm)
        role = _role(step.weight or "")
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
            self._own(role, (_d(value.width),), ((f"{self.prefix}{step.weight}.weight", _d(value.width)),), path)
        return self._line("norm", path, value, base, norm=call, comment=norm_why(step, call))

    def _linear(self, step: models.LinearStep, path: SpecPath, value: Value, base: str) -> Lowered:
        role = _role(step.linear)
        if self._view:
            layers, width = self._view
            rows = f"{layers} * {width}"
            if step.size is not None:
                message = "`size` has no effect here: every slice of a layer input has the input's own `size`"
                self.problems.add("SPEC010", message, (*path, "size"), key=True, help="remove it")
        else:
            if step.size is None:
                self.problems.add("SPEC005", "a linear step needs its `size`", path, help="add `size: DIM`")
            width = rows = self.scope.code(step.size or "0", (*path, "size"))
        shape = (_d(rows), _d(value.width))
        self._own(role, shape, ((f"{self.prefix}{step.linear}.weight", _d(rows)),), path)
        out, where, weight = self._out(base, width), show_path(path), f"w.{role}"
        terms = self._view or ()
        return out, [ir.Statement("linear", out.name, value.name, where, weight=weight, terms=terms, comment=step.why)]

    def _act(self, step: models.ActStep, path: SpecPath, value: Value, base: str) -> Lowered:
        return self._line("act", path, value, base, act=step.act, comment=step.why)

    def _gain(self, step: models.GainStep, path: SpecPath, value: Value, base: str) -> Lowered:
        role = _role(step.gain)
        size = _d(value.width) if step.size is None else self.scope.code(step.size, (*path, "size"), prefix="d")
        self._own(role, (size,), ((f"{self.prefix}{step.gain}", size),), path)
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
            message = f"`{step.times}` has width {_shown(size)}, and what it multiplies has {_shown(value.width)}"
            self.problems.add("SPEC017", message, path)
        if step.times not in self._inputs:
            self._inputs.append(step.times)
        return self._line("times", path, value, base, value=f"{step.times}_TI", comment=step.why)

    def _embedding(self, step: models.EmbeddingStep, path: SpecPath, value: Value, base: str) -> Lowered:
        if not self._view:
            help = "tables indexed by token belong in `layer_inputs` and `embedding`"
            self.problems.add("SPEC025", "an embedding inside the block is not implemented", path, help=help)
            return value, []
        role = _role(step.embedding)
        vocab = self.scope.code(step.vocab, (*path, "vocab"), prefix="d")
        layers, width = self._view
        self._own(role, (vocab, f"{_d(layers)} * {_d(width)}"), ((f"{step.embedding}.weight", vocab),), path)
        out, where, weight = self._out(base, width), show_path(path), f"w.{role}"
        line = ir.Statement("embed", out.name, "ids_T", where, weight=weight, terms=self._view, comment=step.why)
        if step.scale == "1":
            return out, [line]
        scale = self.scope.code(step.scale, (*path, "scale"), "float")
        if step.scale_dtype == "model":
            scale = f"rounded({scale}, {weight}.dtype)"
        return out, [line, ir.Statement("scale", out.name, out.name, where, value=scale)]

    def _sum(self, step: models.SumStep, path: SpecPath, value: Value, base: str) -> Lowered:
        statements: list[ir.Statement] = []
        ends: list[Value] = []
        for index, branch in enumerate(step.sum):
            here = (*path, "sum", index)
            end, lines = self._steps(branch, here, value, self._branch_name(branch, index))
            statements += lines
            ends.append(end)
        for index, end in enumerate(ends):
            if end.width != ends[0].width:
                message = f"this branch has width {_shown(end.width)}, and the first has {_shown(ends[0].width)}"
                self.problems.add("SPEC017", message, (*path, "sum", index))
        out = self._out(base, ends[0].width)
        terms = tuple(end.name for end in ends)
        return out, [*statements, ir.Statement("add", out.name, terms[0], show_path(path), terms=terms, comment=step.why)]

    def _branch_name(self, branch: list, index: int) -> str:
        """A branch is named after the entry it calls, or after the first weight it reads."""
        for step in branch:
            if isinstance(step, str):
                return self._slots.get(step, step)
        for step in branch:
            for field in ("linear", "embedding", "gain"):
                if hasattr(step, field):
                    return _role(getattr(step, field))
        return f"branch{index}"

    # ------------------------------------------------------------ entries

    def _entry(self, name: str, path: SpecPath, value: Value, base: str) -> Lowered:
        if name in self.slots:
            entry = self._slots.get(name)
            if entry is None:
                return value, []
            defined_at: SpecPath = ("kinds", _kind_of(self.model, self._slots), name)
        else:
            entry, defined_at = name, path
        section = next((s for s in PART_SECTIONS if entry in getattr(self.model, s)), None)
        if section is None:
            known = {slot: ("kinds", name, slot) for name, kind in self.model.kinds.items() for slot in kind}
            for section in PART_SECTIONS:
                known |= defined(section, getattr(self.model, section))
            self.problems.unknown("part", entry, known, defined_at)
            return value, []
        if value.width != HIDDEN:
            message = f"`{entry}` reads width `hidden`, and gets {_shown(value.width)}"
            self.problems.add("SPEC017", message, path)
        part = getattr(self.parts, section)(entry)
        self._tables.append(part.table.function)
        if section == "moe":
            return self._experts(part, path, value, base)
        arguments: tuple[str, ...] = ()
        if section in MIXERS:
            self._mixers.append(entry)
            arguments = ("dims", "step")
        comment = part.why or _effects(section, part)
        return self._line("call", path, value, base, function=part.function, arguments=arguments, comment=comment)

    def _experts(self, moe: ir.Moe, path: SpecPath, value: Value, base: str) -> Lowered:
        """Two lines: where each token goes, and what the experts there make of it."""
        self._routes.append((moe.routed, moe.top_k))
        reads = STREAM if moe.reads_stream else value.name
        routes = "routes" if base in ("h", moe.name) else f"{base}_routes"
        comment = moe.router_why or ("reads the stream, not the normed input" if moe.reads_stream else None)
        where = f"{moe.path}.router"
        route = ir.Statement("route", routes, reads, where, function=moe.route, arguments=("dims",), comment=comment)
        arguments = (f"*{routes}", "dims")
        out, call = self._line("call", path, value, base, function=moe.experts, arguments=arguments, comment=moe.why)
        return out, [route, *call]

    # ------------------------------------------------------------ bookkeeping

    def _own(self, role: str, shape: tuple[str, ...], parts: tuple[tuple[str, str], ...], path: SpecPath) -> None:
        row = ir.Row(role, shape, parts)
        before = self.rows.setdefault(role, row)
        if before != row:
            self.problems.add("SPEC020", f"two weights would both be called `{role}`", path)

    def _check_slots(self, name: str) -> None:
        steps: dict[str, SpecPath] = {}
        for index, part in enumerate(self.model.block):
            if isinstance(part, models.AddPart):
                steps |= _named(part.add, ("block", index, "add"))
        for slot in self._slots:
            if slot not in steps:
                self.problems.unknown("slot", slot, steps, ("kinds", name, slot), key=True)
        for step in sorted(steps.keys() & self.slots):
            if step not in self._slots:
                message = f"kind `{name}` does not fill the slot `{step}`"
                self.problems.add("SPEC005", message, ("kinds", name), key=True, help=f"add `{step}: ENTRY`")


def _named(steps: list, path: SpecPath) -> dict[str, SpecPath]:
    """The steps that are names, of slots or entries, and where they stand."""
    found: dict[str, SpecPath] = {}
    for index, step in enumerate(steps):
        if isinstance(step, str):
            found[step] = (*path, index)
        elif isinstance(step, models.SumStep):
            for number, branch in enumerate(step.sum):
                found |= _named(branch, (*path, index, "sum", number))
    return found


def _kind_of(model: models.SpecModel, slots: dict[str, str]) -> str:
    return next(name for name, kind in model.kinds.items() if kind is slots)


def _effects(section: str, part: object) -> str | None:
    if section == "gdn":
        return "reads and writes its state"
    if section == "attention":
        return "reads the K/V pages of an earlier layer" if part.kv_of else "writes K/V pages"  # type: ignore[attr-defined]
    return None


def _returned(parts: list[ir.Part]) -> tuple[list[ir.Part], ir.Statement]:
    """What the function returns: the last part's gain or scale itself, else the stream."""
    *before, last = parts
    if len(last.statements) == 1 and last.statements[0].op in ("gain", "scale"):
        return [*before, replace(last, statements=())], last.statements[0]
    return parts, ir.Statement("name", STREAM, STREAM, last.path)


def _role(name: str) -> str:
    return name.replace(".", "_").replace("*", "x")


def _d(code: str) -> str:
    return code.replace("dims.", "d.")


def _shown(width: str) -> str:
    return f"`{width.replace('dims.', '')}`"
