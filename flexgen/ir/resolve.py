"""Spec -> Architecture: names settled, numbers turned into code, weights listed, every rule of meaning checked."""

from __future__ import annotations

from dataclasses import replace

from flexgen.contract.heads import MULTIPLES
from flexgen.ir import architecture as ir
from flexgen.ir.attention import rope_field
from flexgen.ir.block import layer_input, layers
from flexgen.ir.code import Size, dim
from flexgen.ir.idle import check_checkpoint, check_tensors
from flexgen.ir.imports import imports
from flexgen.ir.names import check_generated_names, check_names
from flexgen.ir.parts import Parts
from flexgen.ir.problems import Problems
from flexgen.ir.rows import Rows
from flexgen.ir.schedule import schedules
from flexgen.ir.scope import Scope
from flexgen.ir.shared import bias, norm_why
from flexgen.ir.tiny import check_tiny, fences
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath
from flexgen.spec.load import Spec


def resolve(spec: Spec) -> ir.Architecture:
    """The architecture of a spec. Raises SpecError with every problem of meaning."""
    return _Resolver(spec).architecture()


class _Resolver:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.model = spec.model
        self.problems = Problems(spec)
        self.scope = Scope(self.problems, self.model.dims)
        self.parts = Parts(self.model, self.scope, self.problems)
        self.rows = Rows(fp32=self.model.checkpoint.fp32, transposed=self.model.checkpoint.transposed)

    def architecture(self) -> ir.Architecture:
        model, parts = self.model, self.parts
        check_names(model, self.problems)
        blocks, kinds, block_tables = layers(parts)
        inputs, input_rows = [], []
        for name, entry in model.layer_inputs.items():
            made, rows = layer_input(parts, name, entry)
            inputs.append(made)
            input_rows += rows
        embedding, embedding_rows = self._embedding()
        head, head_rows = self._head(embedding_rows[0])
        rules = schedules(model, self.scope, self.problems)
        ropes = self._ropes()
        self._check_unused(kinds)
        tables = tuple(self._tables(block_tables, (*embedding_rows, *input_rows, *head_rows)))
        dims = self.scope.dims()
        self.problems.raise_if_any()
        check_tiny(self.spec, self.scope, dims, self.problems)
        architecture = ir.Architecture(
            name=model.name,
            summary=model.summary,
            source=f"specs/{model.name}.yaml",
            digest=self.spec.digest,
            checkpoint=self._checkpoint(),
            dims=dims,
            ropes=ropes,
            divisions=self._divisions(),
            widths=tuple(a for a in self.parts.built("attention") if a.value_dim),
            groupings=tuple(moe.grouping for moe in parts.built("moe") if moe.grouping),
            attentions=tuple(parts.built("attention")),
            gdns=tuple(parts.built("gdn")),
            mlps=tuple(parts.built("mlp")),
            moes=tuple(parts.built("moe")),
            layer_inputs=tuple(inputs),
            blocks=blocks,
            kinds=kinds,
            schedules=rules,
            embedding=embedding,
            head=head,
            tables=tables,
            merges=_merges(tables),
            layer=model.checkpoint.layers,
        )
        check_generated_names(architecture, self.problems)
        self.problems.raise_if_any()
        return replace(architecture, imports=imports(architecture))

    def _embedding(self) -> tuple[tuple[ir.Statement, ...], list[ir.Row]]:
        entry = self.model.embedding
        role = entry.weight.replace(".", "_")
        row = self.rows.embedding(role, dim("vocab"), dim("hidden"), entry.weight)
        scale: Size | str | None = None
        if entry.scale != "1":
            scale = self.scope.code(entry.scale, ("embedding", "scale"), "float")
            scale = f"rounded({scale}, w.{role}.dtype)" if entry.scale_dtype == "model" else scale
        elif entry.scale_dtype == "model":
            help = "remove it, or give a `scale`"
            self.problems.add(
                "SPEC010",
                "`scale_dtype` has no effect without a scale",
                ("embedding", "scale_dtype"),
                key=True,
                help=help,
            )
        line = ir.Statement("embed", "x_TD", "ids_T", "embedding", weight=f"w.{role}", value=scale, comment=entry.why)
        lines, rows = self._after_embedding(entry)
        return (line, *lines), [row, *rows]

    def _after_embedding(self, entry: models.Embedding) -> tuple[list[ir.Statement], list[ir.Row]]:
        """Learned positions, and the norm of the embedded tokens."""
        lines: list[ir.Statement] = []
        rows: list[ir.Row] = []
        if entry.positions is not None:
            at, module = ("embedding", "positions"), entry.positions.weight
            length = self.scope.code(entry.positions.length, (*at, "length"))
            offset = self.scope.code(entry.positions.offset, (*at, "offset"))
            role = module.replace(".", "_")
            rows.append(self.rows.positions(role, length + offset if entry.positions.offset != "0" else length, dim("hidden"), module))
            shift = offset if entry.positions.offset != "0" else None
            lines.append(ir.Statement("positions", "x_TD", "x_TD", "embedding", weight=f"w.{role}", value=shift))
        if entry.norm is not None:
            call, norm_rows = self._end_norm(entry.norm, ("embedding", "norm"))
            lines.append(ir.Statement("norm", "x_TD", "x_TD", "embedding", norm=call, comment=norm_why(entry.norm, call)))
            rows += norm_rows
        return lines, rows

    def _end_norm(self, entry: models.NormStep, at: SpecPath) -> tuple[ir.NormCall, list[ir.Row]]:
        """A norm outside of the layers, and its weights."""
        role = (entry.weight or "").replace(".", "_")
        call = self.parts.norm(entry.norm, (*at, "norm"), f"w.{role}")
        if self.parts.has_gain(entry.norm):
            if entry.weight is None:
                message = f"the norm `{entry.norm}` has a gain, and this step names no weight"
                self.problems.add("SPEC019", message, at, key=True)
        elif entry.weight is not None and entry.norm in self.model.norms:
            message = f"the norm `{entry.norm}` has no gain to use this weight"
            help = "remove it, or name a norm with a gain"
            self.problems.add("SPEC018", message, (*at, "weight"), help=help)
        rows = list(self.parts.norm_rows(self.rows, entry.norm, role, dim("hidden"), entry.weight or ""))
        return call or ir.NormCall("rms_norm", "None", "0", None, "norms"), rows

    def _head(self, embedding: ir.Row) -> tuple[ir.Head, list[ir.Row]]:
        entry = self.model.head
        call, rows = self._end_norm(entry.norm, ("head", "norm"))
        role = entry.weight.replace(".", "_")
        tied = self.scope.flag(entry.tied, ("head", "tied"))
        rows.append(self.rows.head(role, dim("vocab"), dim("hidden"), entry.weight, tied, embedding.role))
        has_bias = self.scope.flag(entry.bias, ("head", "bias"))
        if has_bias is not False:
            rows.append(self.rows.bias(f"{role}_bias", (dim("vocab"),), f"{entry.weight}.bias", ("vocab",), has_bias))
        scale = None if entry.scale == "1" else self.scope.code(entry.scale, ("head", "scale"), "float")
        softcap = self.scope.optional(entry.softcap, ("head", "softcap"))
        call = replace(call, why=norm_why(entry.norm, call))
        is_fp32 = entry.dtype == "fp32"
        return ir.Head(call, f"w.{role}", bias(has_bias, role), is_fp32, scale, softcap, entry.why), rows

    def _ropes(self) -> tuple[ir.Rope, ...]:
        found = []
        for name, entry in self.model.ropes.items():
            users = [a for a in self.parts.built("attention") if a.rope == rope_field(name)]
            widths = {a.head_dim for a in users}
            if len(widths) > 1:
                message = f"rope `{name}` serves heads of different widths"
                self.problems.add("SPEC017", message, ("ropes", name), key=True, help="define one rope a width")
            if users:
                turned = entry.turned and self.scope.code(entry.turned, ("ropes", name, "turned"))
                types, is_fp32 = tuple(entry.types), entry.compute == "fp32"
                if entry.tables == "model" and not is_fp32:
                    message = "`tables` has no effect: they have the dtype of `compute`"
                    self.problems.add("SPEC010", message, ("ropes", name, "tables"), key=True, help="remove it")
                made = (rope_field(name), entry.parameters, types, users[0].head_dim, turned or None, is_fp32, entry.tables == "model")
                found.append(ir.Rope(*made, f"ropes.{name}", entry.why))
        return tuple(found)

    def _divisions(self) -> tuple[ir.Division, ...]:
        """Heads that key/value heads must divide, and value heads that key heads must; settled ones left out."""
        found: dict[tuple[str, str], ir.Division] = {}
        for section, many, few in MULTIPLES:
            for part in self.parts.built(section):
                codes = (getattr(part, many).own, getattr(part, few).own)
                if codes[0] != codes[1] and not all(code.isdigit() for code in codes):
                    found.setdefault(codes, ir.Division(part.path, many, codes[0], few, codes[1]))
        return tuple(found.values())

    def _checkpoint(self) -> ir.Checkpoint:
        entry = self.model.checkpoint
        entries = [self.model.attention[a.name] for a in self.parts.built("attention")]
        skip = [*entry.skip, *(f"{self.parts.layers}{name}" for a in entries for name in a.skip)]
        by = next((rule.by for _, rule in self.model.rules if rule.by), None)
        return ir.Checkpoint(
            tuple(entry.model_types),
            entry.text_config,
            tuple(entry.prefix),
            tuple(dict.fromkeys(skip)),
            entry.defaults,
            fences(entry),
            tuple(entry.ignore),
            by,
        )

    def _tables(self, block_tables: tuple[ir.WeightTable, ...], model_rows: tuple[ir.Row, ...]) -> list[ir.WeightTable]:
        parts = [part.table for section in ("attention", "gdn", "mlp", "moe") for part in self.parts.built(section)]
        check_tensors(parts, self.problems)
        tables = [
            ir.WeightTable("model_weights", model_rows, "embedding, head"),
            *block_tables,
            *parts,
        ]
        checkpoint = self.model.checkpoint
        check_checkpoint(checkpoint, [row for table in tables for row in table.rows], self.problems)
        return tables

    def _check_unused(self, kinds: tuple[ir.Kind, ...]) -> None:
        for section in ("norms", "ropes", "attention", "gdn", "mlp", "moe"):
            for name in getattr(self.model, section):
                if (section, name) not in self.parts.used and (section, name) not in self.problems.meant:
                    message = f"`{name}` is used by nothing in {self.model.name}"
                    self.problems.add("SPEC010", message, (section, name), key=True, help="use it or remove it")
        inputs = {name for kind in kinds for name in kind.inputs}
        for name in self.model.layer_inputs:
            if name not in inputs and ("layer_inputs", name) not in self.problems.meant:
                message = f"`{name}` is used by nothing in {self.model.name}"
                self.problems.add(
                    "SPEC010", message, ("layer_inputs", name), key=True, help="multiply by it: `{times: …}`"
                )


def _merges(tables: tuple[ir.WeightTable, ...]) -> tuple[ir.Merge, ...]:
    """The weights that adapters may change, each once: kinds that pack a module differently have it in several."""
    found: dict[str, ir.Merge] = {}
    for table in tables:
        for row in table.rows:
            if row.merge:
                found.setdefault(row.role, ir.Merge(row.role, row.merge, table.path))
    return tuple(found.values())
