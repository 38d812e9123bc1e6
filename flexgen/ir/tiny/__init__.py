"""Loads `tiny` at build time: every field of it is read and has the right type, the fences hold, every kind occurs.

The same rules hold for `checkpoint.defaults` as far as they can: a default that nothing reads would be lost in silence.
`flexgen.ir.resolve` calls it once the spec itself has no other mistake.
"""

from __future__ import annotations

from flexgen.ir.architecture import Dim
from flexgen.ir.problems import Problems
from flexgen.ir.scope import Scope
from flexgen.ir.tiny.fields import check_fields, check_ignored, check_model_type
from flexgen.ir.tiny.numbers import (
    check_fences,
    check_groups,
    check_head_counts,
    check_null_defaults,
    check_value_widths,
    evaluate_dims,
)
from flexgen.ir.tiny.reads import DEFAULTS, TINY, Tiny, fences
from flexgen.ir.tiny.ropes import check_ropes, check_rotations
from flexgen.ir.tiny.schedule import check_schedule
from flexgen.spec.load import Spec

__all__ = ["check_tiny", "fences"]


def check_tiny(spec: Spec, scope: Scope, dims: tuple[Dim, ...], problems: Problems) -> None:
    """Report what would keep the spec from loading its own `tiny`. Expects a spec without other problems."""
    tiny = Tiny(spec, scope, dims, problems)
    check_model_type(tiny)
    check_ignored(tiny)
    for place, node in ((TINY, tiny.model.tiny), (DEFAULTS, tiny.model.checkpoint.defaults)):
        check_fields(tiny, node, "", place, place)
    check_fences(tiny)
    check_ropes(tiny)
    check_null_defaults(tiny)
    values = evaluate_dims(tiny)
    problems.raise_if_any()
    check_head_counts(tiny, values)
    check_value_widths(tiny, values)
    check_groups(tiny, values)
    check_rotations(tiny, values)
    check_schedule(tiny, values)
