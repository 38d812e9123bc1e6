"""What a spec reads of config.json: which fields, as what, and where the spec says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flexgen.contract.configs import merged
from flexgen.ir.architecture import Dim
from flexgen.ir.problems import Problems
from flexgen.ir.scope import Scope
from flexgen.spec.checkpoint import AtLeast, Checkpoint
from flexgen.spec.diagnostics import SpecPath
from flexgen.spec.expressions import Name, Or, parse
from flexgen.spec.load import Spec

TINY: SpecPath = ("tiny",)
DEFAULTS: SpecPath = ("checkpoint", "defaults")
REQUIRE: SpecPath = ("checkpoint", "require")
CODES = {TINY: "SPEC024", DEFAULTS: "SPEC023"}


@dataclass(frozen=True)
class Read:
    """A field of config.json that the spec reads: as what, and where the spec says so."""

    want: str
    path: SpecPath


class Tiny:
    """A spec's `tiny` while it is checked.

    config    `tiny` over the defaults
    reads     by field, every place that reads it; `ropes` and `require` are fields that have another form
    misspelt  fields whose misspelling is reported, so that nothing else says that they are absent
    """

    def __init__(self, spec: Spec, scope: Scope, dims: tuple[Dim, ...], problems: Problems) -> None:
        self.model, self.scope, self.problems = spec.model, scope, problems
        self.types = {dim.name: dim.type for dim in dims}
        self.ropes = {entry.parameters: name for name, entry in self.model.ropes.items()}
        self.require = fences(self.model.checkpoint)
        self.config = merged(self.model.tiny, self.model.checkpoint.defaults)
        self.reads: dict[str, list[Read]] = {}
        for field, read in (*self._dim_reads(), *self._schedule_reads()):
            self.reads.setdefault(field, []).append(read)
        self.misspelt: set[str] = set()

    def _dim_reads(self) -> Iterator[tuple[str, Read]]:
        for name, expr in self.scope.exprs.items():
            want = self.types[name] if isinstance(expr, Name | Or) else "number"
            for field in self.fields_of(name):
                yield field, Read(want, ("dims", name))
        if self.model.ropes:
            yield "max_position_embeddings", Read("int", ("ropes",))
            yield "original_max_position_embeddings", Read("int", ("ropes",))

    def fields_of(self, dim: str) -> list[str]:
        """The config fields that a dim reads: its names that are no earlier dims."""
        earlier = list(self.scope.exprs)[: list(self.scope.exprs).index(dim)]
        return [name.dotted for name in self.scope.exprs[dim].names() if name.dotted not in earlier]

    def _schedule_reads(self) -> Iterator[tuple[str, Read]]:
        for at, rule in self.model.rules:
            for field, want in (("when", "number"), ("at", "indices"), ("by", "values")):
                if getattr(rule, field) is not None:
                    yield getattr(rule, field), Read(want, (*at, field))
            for field in ("every", "first", "last", "from"):
                text = rule.given(field)
                if text is not None and isinstance(expr := parse(text), Name) and expr.dotted not in self.types:
                    yield expr.dotted, Read("int", (*at, field))


def fences(checkpoint: Checkpoint) -> dict[str, Any]:
    """`require` as plain data, as generated code holds it."""
    return {
        field: {"min": wanted.min} if isinstance(wanted, AtLeast) else wanted
        for field, wanted in checkpoint.require.items()
    }
