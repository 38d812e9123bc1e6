"""What every part of a layer needs: calls of norms, and the rows of weight tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexgen.ir import architecture as ir
from flexgen.ir.problems import Problems, defined
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
        self.used: set[tuple[str, str]] = set()

    def table(self, name: str, rows: Iterable[ir.Row], at: SpecPath) -> ir.WeightTable:
        """The weights of an entry."""
        return ir.WeightTable(f"{name}_weights", tuple(rows), show_path(at))

    def module(self, name: str, suffix: str = "weight") -> str:
        """The checkpoint name of a module's tensor in a layer."""
        return f"{self.layers}{name}.{suffix}"

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

    def bias(self, flag: bool | str, code: str) -> str:
        """The bias argument of a linear: its weight where there can be one."""
        return "None" if flag is False else code

    def bias_row(self, flag: bool | str, role: str, parts: Sequence[tuple[str, str]]) -> list[ir.Row]:
        """The weight row of a bias that is there, may be there, or is not."""
        if flag is False:
            return []
        rows = " + ".join(rows for _, rows in parts)
        return [ir.Row(role, (rows,), tuple(parts), present=None if flag is True else flag)]


def norm_why(step: models.NormStep, norm: ir.NormCall | None) -> str | None:
    """The comment of a norm's line: the step's own, else the norm's."""
    return step.why or (norm.why if norm else None)


def double(size: str) -> str:
    """Code for twice a size."""
    return f"2 * {size}" if " " not in size else f"2 * ({size})"
