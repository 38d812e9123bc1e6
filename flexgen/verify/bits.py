"""Whether generated code rounds where transformers does: every layer in 16 bits, on the reference's own input, bit for bit.

fp32 cannot tell `cast: before` from `after`: both give the same within rounding. In 16 bits they part in a third of the
elements, and so do rollouts' logprobs. On a host generated code takes the operations in transformers' order, so that where a
spec says the right casts there is no difference at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexgen.runtime.loading.model import Model
from flexgen.spec.load import Spec
from flexgen.verify.layers import LayerRun
from flexgen.verify.report import Report, Row

_VALUES = {"cast": {"before", "after"}, "softmax": {"fp32", "model"}, "compute": {"fp32", "model"}, "dtype": {"fp32", "model"},
           "scale_dtype": {"fp32", "model"}, "tables": {"model"}}  # fmt: skip
"""Fields of a spec that say where a value is rounded."""


def compare_bits(package: str, what: str, model: Model, oracle: Any, tokens: Sequence[int]) -> Report:
    """Each layer and the logits of one prompt against `oracle`, transformers' model of the same weights and dtype."""
    run = LayerRun(model, oracle, tokens, tolerance=0.0)
    report = Report(package, f"{what}, in {str(model.dtype).removeprefix('torch.')}", lines_compared=run.lines)
    report.first_difference, report.unaligned = run.difference, run.unaligned
    found = run.difference.error if run.difference else max(run.errors, default=float("nan"))
    report.rows.append(Row("every layer and the logits, bit for bit", found, 0.0))
    return report


def told_by_rounding(spec: Spec) -> list[str]:
    """Places of a spec that fp32 cannot hold to the reference."""
    return [path for path in _places(spec.data) if not path.startswith("tiny.")]


def _places(node: Any, path: str = "") -> Iterator[str]:
    items: Any = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        place = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".removeprefix(".")
        if isinstance(value, str) and value in _VALUES.get(str(key), ()):
            yield place
        yield from _places(value, place)
