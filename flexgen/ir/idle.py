"""Fields that say something which no generated line can depend on: each is reported, none is ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from flexgen.ir import architecture as ir
from flexgen.ir.problems import Problems
from flexgen.spec import models
from flexgen.spec.checkpoint import Checkpoint
from flexgen.spec.diagnostics import SpecPath

CHECKPOINT: SpecPath = ("checkpoint",)
KEYS_AND_VALUES = ("k", "v", "k_norm", "k_norm_weight", "v_norm", "v_norm_weight", "value")
"""Fields of an attention about the keys and values that it makes itself."""


def check_attention(
    entry: models.Attention, at: SpecPath, has_gain: Callable[[str], bool], problems: Problems
) -> None:
    """Report the fields of an attention that its other fields leave without effect."""
    _check_unique(entry.skip, (*at, "skip"), problems)
    for field, reason in _idle(entry, has_gain):
        default = models.Attention.model_fields[field].default
        if getattr(entry, field) == default:
            continue
        here = (*at, field)
        inherited = problems.spec.origin(here) != here
        help = f"it is inherited: set `{field}: {default}`" if inherited else "remove it"
        place = (*at, "like") if inherited else here
        problems.add("SPEC010", f"`{field}` has no effect: {reason}", place, key=not inherited, help=help)


def _idle(entry: models.Attention, has_gain: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    shared = entry.kv_of != "none"
    if shared:
        yield from ((field, f"keys and values are those that `{entry.kv_of}` made") for field in KEYS_AND_VALUES)
    elif entry.value == "from_key":
        yield "v", "the value is the key"
    for letter in "q" if shared else "qkv":
        norm = getattr(entry, f"{letter}_norm")
        if not has_gain(norm):
            yield f"{letter}_norm_weight", "there is no norm" if norm == "none" else f"the norm `{norm}` has no gain"


def check_checkpoint(checkpoint: Checkpoint, rows: Iterable[ir.Row], problems: Problems) -> None:
    """Report what `checkpoint` lists twice, tensors kept in fp32 that no weight has, and a bad name of the layers."""
    for field in ("model_types", "prefix", "skip", "fp32", "ignore"):
        _check_unique(getattr(checkpoint, field), (*CHECKPOINT, field), problems)
    if checkpoint.layers.count("*") != 1:
        message = "`layers` needs one `*`, the index of the layer"
        problems.add("SPEC021", message, (*CHECKPOINT, "layers"), help="as in `layers.*`")
    names = {name for row in rows for name in row.tensors}
    for index, name in enumerate(checkpoint.fp32):
        if name not in names:
            at = (*CHECKPOINT, "fp32", index)
            help = f"names are written below the prefix, as in `{sorted(names)[0]}`"
            problems.add("SPEC010", f"`{name}` has no effect: no weight is filled from it", at, help=help)


def _check_unique(items: Sequence[str], at: SpecPath, problems: Problems) -> None:
    first: dict[str, int] = {}
    for index, name in enumerate(items):
        if first.setdefault(name, index) < index:
            note = ("listed first here", (*at, first[name]))
            problems.add("SPEC010", f"`{name}` is listed twice", (*at, index), help="remove one", note=note)
