"""What every part of a layer needs: calls of norms, and the rows of weight tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flexgen.ir import architecture as ir
from flexgen.ir.code import Size, dim
from flexgen.ir.problems import Problems, defined
from flexgen.ir.rows import Flag, Rows
from flexgen.ir.scope import Scope
from flexgen.spec import models
from flexgen.spec.diagnostics import SpecPath, show_path

NORMS = {
    ("rms", "plain", "after"): "rms_norm",
    ("rms", "none", "after"): "rms_norm",
    ("rms", "none", "before"): "rms_norm",
    ("rms", "plain", "before"): "rms_norm_cast_before",
    ("rms", "one_plus", "after"): "rms_norm_one_plus",
    ("layer", "plain", "after"): "layer_norm",
    ("layer", "none", "after"): "layer_norm",
    ("layer", "one_plus", "after"): "layer_norm_one_plus",
    ("l2", "plain", "after"): "l2_norm",
    ("l2", "none", "after"): "l2_norm",
}
"""The runtime's function by kind, gain and cast."""


class Shared:
    """The spec at hand, where its problems go, and what is `used` of its sections."""

    def __init__(self, model: models.SpecModel, scope: Scope, problems: Problems) -> None:
        self.model = model
        self.scope = scope
        self.problems = problems
        self.layers = model.checkpoint.layers + "."
        self.rows = Rows(self.layers, model.checkpoint.fp32, model.checkpoint.transposed)
        self.hidden = dim("hidden")
        self.used: set[tuple[str, str]] = set()

    def table(self, name: str, rows: Iterable[ir.Row], at: SpecPath) -> ir.WeightTable:
        """The weights of an entry."""
        return ir.WeightTable(f"{name}_weights", tuple(rows), show_path(at))

    def norm(self, name: str, path: SpecPath, gain: str, whole: bool = False) -> ir.NormCall | None:
        """A call of a named norm; `gain` is code for its weight, used where the norm has one."""
        if name == "none":
            return None
        entry = self.model.norms.get(name)
        if entry is None:
            self.problems.unknown("norm", name, defined("norms", self.model.norms), path)
            return None
        at = ("norms", name)
        self.used.add(at)
        function = NORMS.get((entry.kind, entry.gain, entry.cast))
        if function is None:
            message = f"a norm of kind {entry.kind} with gain {entry.gain} and cast {entry.cast} is not implemented"
            field = "cast" if (entry.kind, entry.gain, "after") in NORMS else "gain"
            help = "kind rms with gain plain or none takes cast before; l2 takes gain plain or none"
            self.problems.add("SPEC025", message, (*at, field), help=help)
            return None
        bias = self._norm_bias(entry, at)
        bias_code = (f"{gain}_bias" if bias is not False else "None") if entry.kind == "layer" else None
        eps = self.scope.code(entry.eps, (*at, "eps"), "float")
        gain = "None" if entry.gain == "none" else gain
        return ir.NormCall(function, gain, eps, entry.why, f"norms.{name}", bias_code, whole)

    def _norm_bias(self, entry: models.Norm, at: SpecPath) -> Flag:
        flag = self.scope.flag(entry.bias, (*at, "bias"))
        if flag is not False and (entry.kind != "layer" or entry.gain == "none"):
            reason = "its norm has no weights" if entry.kind == "layer" else f"norms of kind {entry.kind} have none"
            self.problems.add("SPEC010", f"`bias` has no effect: {reason}", (*at, "bias"), help="remove it")
            return False
        return flag

    def norm_rows(
        self, make: Rows, name: str, role: str, size: Size, module: str, of: str = ""
    ) -> Iterator[ir.Row]:
        """The weights of a named norm: none, its gain, its gain and bias."""
        entry = self.model.norms.get(name)
        if entry is None or entry.gain == "none":
            return
        yield make.norm(role, size, module, of)
        if entry.kind == "layer" and entry.bias != "false":
            flag = self.scope.flag(entry.bias, ("norms", name, "bias"))
            yield make.bias(f"{role}_bias", (size,), f"{module}.bias", (of,), flag)

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
