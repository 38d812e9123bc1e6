"""What `verify` found, as text and JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Row:
    """One comparison: the greatest absolute error, and the most that counts as equal."""

    mode: str
    max_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """False for NaN too."""
        return self.max_error <= self.tolerance


@dataclass(frozen=True)
class Difference:
    """The first place where generated code and transformers part.

    layer  index, or None outside of the layers        block  the layer function's part, such as block[1]
    spec   spec path behind the line                    file, line, code  the generated line
    agreed last line of that function before it that was seen to be right, or None: the mistake is after it
    what   what was compared there                      error  greatest difference relative to the reference's size
    """

    layer: int | None
    kind: str | None
    block: str | None
    spec: str | None
    file: str
    line: int
    agreed: int | None
    code: str
    what: str
    error: float


@dataclass
class Report:
    """All comparisons of one package with one model. `lines_compared` counts generated lines held to a module each.

    `unaligned` are lines that differ from their module although what their layer makes of them agrees; `untold` are places
    of the spec that fp32 cannot hold.
    """

    package: str
    model: str
    rows: list[Row] = field(default_factory=list)
    lines_compared: int = 0
    first_difference: Difference | None = None
    unaligned: list[Difference] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows) and self.first_difference is None

    def to_json(self) -> str:
        """Everything here and `ok`; an error that is no number is null."""
        rows = [{**asdict(row), "max_error": _number(row.max_error), "ok": row.ok} for row in self.rows]
        first = self.first_difference and {
            **asdict(self.first_difference),
            "error": _number(self.first_difference.error),
        }
        unaligned = [{**asdict(each), "error": _number(each.error)} for each in self.unaligned]
        whole = {**asdict(self), "ok": self.ok, "rows": rows, "first_difference": first, "unaligned": unaligned}
        return json.dumps(whole, indent=2)

    def to_text(self) -> str:
        width = max(len(row.mode) for row in self.rows)
        lines = [f"{self.package} against transformers, {self.model}"]
        for row in self.rows:
            verdict = "ok" if row.ok else "DIFFERS"
            lines.append(f"  {row.mode:{width}}  max error {row.max_error:.1e} (limit {row.tolerance:.0e})  {verdict}")
        lines.append(f"  {self.lines_compared} generated lines held to a module of the reference")
        for code, count in Counter((one.file, one.line, one.code, one.what) for one in self.unaligned).items():
            file, line, text, what = code
            lines += [
                f"  {file}:{line}: {text}",
                f"    {what} could not be aligned with the reference's module in {count} place{'s' if count > 1 else ''}, "
                "whose layers give what the reference's do",
            ]
        if self.untold:
            listed = ", ".join(self.untold)
            lines.append(f"  fp32 cannot tell where values are rounded ({listed}): --dtype bfloat16 holds them bit for bit")
        found = self.first_difference
        if found is not None:
            layer = f"layer {found.layer} ({found.kind}), {found.block}"
            where = "outside of the layers" if found.layer is None else layer
            lines += [
                f"first difference: {where}",
                f"  {found.file}:{found.line}: {found.code}",
                *([] if found.agreed is None else [f"  line {found.agreed} still agrees"]),
                f"  {found.what}: relative error {found.error:.1e}; spec: {found.spec or 'the whole model'}",
            ]
        return "\n".join(lines)


def _number(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
