"""Fields that say something which no generated line can depend on: each is reported, none is ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from flexgen.ir import architecture as ir
from flexgen.ir.problems import Problems
from flexgen.spec import models
from flexgen.spec.checkpoint import Checkpoint
from flexgen.spec.diagnostics import SpecPath

CHECKPOINT: SpecPath = ("checkpoint",)
KEYS_AND_VALUES = ("k", "v", "k_bias", "v_bias", "k_norm", "k_norm_weight", "v_norm", "v_norm_weight", "value", "value_scale")
"""Fields of an attention about the keys and values that it makes itself."""


def check_attention(
    entry: models.Attention, at: SpecPath, has_gain: Callable[[str], bool], problems: Problems
) -> None:
    """Report the fields of an attention that its other fields leave without effect."""
    _check_unique(entry.skip, (*at, "skip"), problems)
    _check_idle(entry, _idle(entry, has_gain), at, problems)


def check_mlp(entry: models.Mlp, at: SpecPath, has_gain: Callable[[str], bool], problems: Problems) -> None:
    """Report the fields of an MLP that its other fields leave without effect."""
    _check_idle(entry, _idle_mlp(entry, has_gain), at, problems)


def _idle_mlp(entry: models.Mlp, has_gain: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    if entry.down_bias == entry.bias:
        yield "down_bias", "it is what `bias` says"
    if not entry.gated:
        yield from ((field, "there is no gate") for field in ("gate", "gate_up"))
    if entry.gate_up != "none":
        yield from ((field, f"`{entry.gate_up}` holds gate and up") for field in ("gate", "up"))
    if not has_gain(entry.inner_norm):
        yield "inner_norm_weight", "no norm has that weight"


def _check_idle(entry: models.Entry, idle: Iterator[tuple[str, str]], at: SpecPath, problems: Problems) -> None:
    for field, reason in idle:
        default = type(entry).model_fields[field].default
        if getattr(entry, field) == default:
            continue
        here = (*at, field)
        inherited = problems.spec.origin(here) != here
        help = f"it is inherited: set `{field}: {default}`" if inherited else "remove it"
        place = (*at, "like") if inherited else here
        problems.add("SPEC010", f"`{field}` has no effect: {reason}", place, key=not inherited, help=help)


def _idle(entry: models.Attention, has_gain: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    shared = entry.kv_of != "none"
    if entry.packed == "none":
        yield "qkv", "q, k and v are modules of their own"
    else:
        yield from ((field, f"`{entry.qkv}` holds q, k and v") for field in ("q", "k", "v"))
    for field in ("q_bias", "k_bias", "v_bias", "o_bias"):
        if getattr(entry, field) == entry.bias:
            yield field, "it is what `bias` says"
    if entry.value_dim == entry.head_dim:
        yield "value_dim", "it is `head_dim`"
    if (entry.q_norm, entry.k_norm) == ("none", "none"):
        yield from ((field, "there is no norm of q or k") for field in ("qk_norm_over", "qk_norm_when"))
    if entry.rope == "none":
        yield "qk_norm_when", "there is no rope"
    if shared:
        yield from ((field, f"keys and values are those that `{entry.kv_of}` made") for field in KEYS_AND_VALUES)
    elif entry.value == "from_key":
        yield from ((field, "the value is the key") for field in ("v", "v_bias", "value_dim"))
    if entry.clip == "none":
        yield "clip_when", "nothing is clamped"
    if (entry.q_norm, entry.k_norm, entry.v_norm) == ("none", "none", "none"):
        yield "clip_when", "there is no norm of q, k or v"
    for letter in "q" if shared else "qkv":
        norm = getattr(entry, f"{letter}_norm")
        if not has_gain(norm):
            yield f"{letter}_norm_weight", "there is no norm" if norm == "none" else f"the norm `{norm}` has no gain"


def check_checkpoint(checkpoint: Checkpoint, rows: Iterable[ir.Row], problems: Problems) -> None:
    """Report what `checkpoint` lists twice, tensors kept in fp32 that no weight has, and a bad name of the layers."""
    for field in ("model_types", "prefix", "skip", "fp32", "transposed", "ignore"):
        _check_unique(getattr(checkpoint, field), (*CHECKPOINT, field), problems)
    if checkpoint.layers.count("*") != 1:
        message = "`layers` needs one `*`, the index of the layer"
        problems.add("SPEC021", message, (*CHECKPOINT, "layers"), help="as in `layers.*`")
    rows = list(rows)
    names = {name for row in rows for name in row.tensors}
    linear = sorted({name.removesuffix(".weight") for row in rows if row.make in ("linear", "router") for name in row.tensors})
    for index, name in enumerate(checkpoint.transposed):
        if name not in linear:
            help = f"names are written below the prefix, as in `{linear[0]}`" if linear else "no weight is a linear module"
            message = f"`{name}` has no effect: it is no linear module"
            problems.add("SPEC010", message, (*CHECKPOINT, "transposed", index), help=help)
    for row in rows:
        if row.transposed and len(row.rows) > 1:
            message = f"modules in (in, out) layout cannot lie end to end: {', '.join(name for name, _ in row.rows)}"
            problems.add("SPEC025", message, (*CHECKPOINT, "transposed"), key=True, help="only a module that is a weight of its own")
    for index, name in enumerate(checkpoint.fp32):
        if name not in names:
            at = (*CHECKPOINT, "fp32", index)
            help = f"names are written below the prefix, as in `{sorted(names)[0]}`"
            problems.add("SPEC010", f"`{name}` has no effect: no weight is filled from it", at, help=help)


def check_tensors(parts: Iterable[ir.WeightTable], problems: Problems) -> None:
    """Report a module of the file that two weights of one entry would be filled from."""
    for table in parts:
        names = [name for row in table.rows for name in row.tensors if not name.endswith(".bias")]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            message = f"`{name}` is the file's tensor of two weights of `{table.path}`"
            help = "a module of the file is one weight: name another"
            problems.add("SPEC025", message, tuple(table.path.split(".")), key=True, help=help)


def _check_unique(items: Sequence[str], at: SpecPath, problems: Problems) -> None:
    first: dict[str, int] = {}
    for index, name in enumerate(items):
        if first.setdefault(name, index) < index:
            note = ("listed first here", (*at, first[name]))
            problems.add("SPEC010", f"`{name}` is listed twice", (*at, index), help="remove one", note=note)
