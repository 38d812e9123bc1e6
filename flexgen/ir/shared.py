"""What every part of a layer needs: calls of norms, and the rows of weight tables."""

from __future__ import annotations

from collections.abc import Iterable

from flexgen.ir import architecture as ir
from flexgen.ir.code import dim
from flexgen.ir.problems import Problems, defined
from flexgen.ir.rows import Flag, Rows
from flexgen.ir.scope import Scope
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path

NORMS = {
    ("plain", "after"): "rms_norm",
    ("none", "after"): "rms_norm",
    ("none", "before"): "rms_norm",
    ("plain", "before"): "rms_norm_cast_before",
    ("one_plus", "after"): "rms_norm_one_plus",
}


class Shared:
    """The spec at hand, where its problems go, and what is `used` of its sections."""

    def __init__(self, model: models.SpecModel, scope: Scope, problems: Problems) -> None:
        self.model = model
        self.scope = scope
        self.problems = problems
        self.layers = model.checkpoint.layers + "."
        self.rows = Rows(self.layers, model.checkpoint.fp32)
        self.hidden = dim("hidden")
        self.used: set[tuple[str, str]] = set()

    def table(self, name: str, rows: Iterable[ir.Row], at: SpecPath) -> ir.WeightTable:
        """The weights of an entry."""
        return ir.WeightTable(f"{name}_weights", tuple(rows), show_path(at))

    def norm(self, name: str, path: SpecPath, gain: str) -> ir.NormCall | None:
        """A call of a named norm; `gain` is code for its weight, used where the norm has one."""
        if name == "none":
            return None
        entry = self.model.norms.get(name)
        if entry is None:
            self.problems.unknown("norm", name, defined("norms", self.model.norms), path)
            return None
        at = ("norms", name)
        self.used.add(at)
        function = NORMS.get((entry.gain, entry.cast))
        if function is None:
            message = f"a norm with gain {entry.gain} and cast {entry.cast} is not implemented"
            self.problems.add("SPEC025", message, (*at, "cast"), help="gain one_plus goes with cast after")
            return None
        eps = self.scope.code(entry.eps, (*at, "eps"), "float")
        return ir.NormCall(function, "None" if entry.gain == "none" else gain, eps, entry.why, f"norms.{name}")

    def has_gain(self, name: str) -> bool:
        """Whether a named norm has a weight."""
        entry = self.model.norms.get(name)
        return entry is not None and entry.gain != "none"


def norm_why(step: models.NormStep, norm: ir.NormCall | None) -> str | None:
    """The comment of a norm's line: the step's own, else the norm's."""
    return step.why or (norm.why if norm else None)


def bias(flag: Flag, role: str) -> str | None:
    """The bias argument of a projection: its weight, where there can be one."""
    return None if flag is False else f"w.{role}_bias"
