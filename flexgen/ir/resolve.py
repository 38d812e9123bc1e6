"""Spec -> Architecture: names settled, numbers turned into code, weights listed, every rule of meaning checked."""

from __future__ import annotations

from dataclasses import replace

from flexgen.contract.heads import MULTIPLES
from flexgen.ir import architecture as ir
from flexgen.ir.attention import rope_field
from flexgen.ir.block import layer_input, layers
from flexgen.ir.code import Size, dim
from flexgen.ir.idle import check_checkpoint
from flexgen.ir.imports import imports
from flexgen.ir.names import check_generated_names, check_names
from flexgen.ir.parts import Parts
from flexgen.ir.problems import Problems
from flexgen.ir.rows import Rows
from flexgen.ir.schedule import schedules
from flexgen.ir.scope import Scope
from flexgen.ir.shared import norm_why
from flexgen.ir.tiny import check_tiny, fences
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
        self.rows = Rows(fp32=self.model.checkpoint.fp32)

    def architecture(self) -> ir.Architecture:
        model, parts = self.model, self.parts
        check_names(model, self.problems)
        blocks, kinds, block_tables = layers(parts)
        inputs, input_rows = [], []
        for name, entry in model.layer_inputs.items():
            made, rows = layer_input(parts, name, entry)
            inputs.append(made)
            input_rows += rows
        embedding, embedding_row = self._embedding()
        head, head_rows = self._head(embedding_row)
        rules = schedules(model, self.scope, self.problems)
        ropes = self._ropes()
        self._check_unused(kinds)
        tables = tuple(self._tables(block_tables, (embedding_row, *input_rows, *head_rows)))
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

    def _embedding(self) -> tuple[ir.Statement, ir.Row]:
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
        return ir.Statement(
            "embed", "x_TD", "ids_T", "embedding", weight=f"w.{role}", value=scale, comment=entry.why
        ), row

    def _head(self, embedding: ir.Row) -> tuple[ir.Head, list[ir.Row]]:
        entry = self.model.head
        rows = []
        norm_role = (entry.norm.weight or "").replace(".", "_")
        call = self.parts.norm(entry.norm.norm, ("head", "norm", "norm"), f"w.{norm_role}")
        if self.parts.has_gain(entry.norm.norm):
            if entry.norm.weight is None:
                message = f"the norm `{entry.norm.norm}` has a gain, and this step names no weight"
                self.problems.add("SPEC019", message, ("head", "norm"), key=True)
            rows.append(self.rows.norm(norm_role, dim("hidden"), entry.norm.weight or ""))
        elif entry.norm.weight is not None and entry.norm.norm in self.model.norms:
            message = f"the norm `{entry.norm.norm}` has no gain to use this weight"
            help = "remove it, or name a norm with a gain"
            self.problems.add("SPEC018", message, ("head", "norm", "weight"), help=help)
        role = entry.weight.replace(".", "_")
        tied = self.scope.flag(entry.tied, ("head", "tied"))
        rows.append(self.rows.head(role, dim("vocab"), dim("hidden"), entry.weight, tied, embedding.role))
        softcap = self.scope.optional(entry.softcap, ("head", "softcap"))
        call = call or ir.NormCall("rms_norm", "None", "0", None, "norms")
        call = replace(call, why=norm_why(entry.norm, call))
        return ir.Head(call, f"w.{role}", softcap, entry.why), rows

    def _ropes(self) -> tuple[ir.Rope, ...]:
        found = []
        for name, entry in self.model.ropes.items():
            users = [a for a in self.parts.built("attention") if a.rope == rope_field(name)]
            widths = {a.head_dim for a in users}
            if len(widths) > 1:
                message = f"rope `{name}` serves heads of different widths"
                self.problems.add("SPEC017", message, ("ropes", name), key=True, help="define one rope a width")
            if users:
                width = users[0].head_dim
                path = f"ropes.{name}"
                found.append(ir.Rope(rope_field(name), entry.parameters, tuple(entry.types), width, path, entry.why))
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
