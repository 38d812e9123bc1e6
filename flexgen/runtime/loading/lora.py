"""Low-rank updates and their merge from a pristine weight. Source: Hu et al. 2021; tensor layouts as PEFT saves them.

I in, O out, r rank, E experts. Sums are taken in fp32 and rounded once, so merging twice from the base equals once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.contract.weights import Weight
from flexgen.errors import FlexgenError
from flexgen.runtime.ops.merge import Factors, merge_low_rank


class AdapterError(FlexgenError):
    """An adapter that does not fit the model: which module, which shapes, what was expected."""


@dataclass(frozen=True)
class LowRank:
    """`scale * B @ A` for one linear module. a (r, I), b (O, r)."""

    a: Tensor
    b: Tensor
    scale: float

    def __post_init__(self) -> None:
        _check_rank(self.a, self.b)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.b.shape[0], self.a.shape[1]

    def factors(self) -> tuple[Tensor, Tensor]:
        """b (1, O, r) and a (1, r, I), whose product times `scale` is the update."""
        return self.b[None], self.a[None]


@dataclass(frozen=True)
class ExpertLowRank:
    """One low-rank update an expert, as PEFT stores `target_parameters`: a (E * r, I) with the expert slowest,
    b (O, r * E) with the expert fastest. O and I are those of each expert's matrix as PEFT multiplies it."""

    a: Tensor
    b: Tensor
    scale: float
    experts: int

    def __post_init__(self) -> None:
        _check_rank(self.a, self.b, self.experts)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, O, I)."""
        return self.experts, self.b.shape[0], self.a.shape[1]

    def factors(self) -> tuple[Tensor, Tensor]:
        """b (E, O, r) and a (E, r, I), whose product times `scale` is the update."""
        rank = self.a.shape[0] // self.experts
        b = self.b.reshape(self.b.shape[0], rank, self.experts)
        return b.permute(2, 0, 1).contiguous(), self.a.reshape(self.experts, rank, -1)


Deltas = Mapping[str, Sequence[LowRank | ExpertLowRank]]
"""Module name, below the layer, to the updates of every adapter on it. Adapters of older PEFT name each expert's modules,
`mlp.experts.3.gate_proj`."""


Merge = Callable[[Tensor, Tensor, Weight, Deltas], int]
"""Writes base + the sum of updates to `out`: (out, base, the weight's row, deltas) -> how many modules changed."""


def merge_linear(out: Tensor, base: Tensor, weight: Weight, deltas: Deltas) -> int:
    """A `Merge` of linear modules end to end, or of one that lies transposed."""
    if weight.transposed:
        return merge_rows(out.mT, base.mT, {weight.modules[0]: weight.shape[1]}, deltas)
    counts = (part.rows for part in weight.parts)
    return merge_rows(out, base, dict(zip(weight.modules, counts, strict=True)), deltas)


def merge_stacked(out: Tensor, base: Tensor, weight: Weight, deltas: Deltas) -> int:
    """A `Merge` of the experts' matrices."""
    stacked, *per_expert = weight.modules
    return merge_experts(out, base, stacked, per_expert, deltas, transposed=weight.transposed)


def targets(table: Iterable[Weight], merges: Container[str]) -> dict[str, tuple[str, ...]]:
    """The modules that adapters may change, each with the weights of a table that hold it; `merges` are those they reach."""
    found: dict[str, tuple[str, ...]] = {}
    for weight in table:
        for module in weight.modules if weight.role in merges else ():
            found[module] = (*found.get(module, ()), weight.role)
    return found


@torch.no_grad()
def merge_rows(out: Tensor, base: Tensor, rows: Mapping[str, int], deltas: Deltas) -> int:
    """Write base + the sum of updates to `out`, module after module along dim 0. -> how many modules changed.

    Raises AdapterError where an update's shape is not its module's.
    """
    changed = start = 0
    for module, count in rows.items():
        updates, part = deltas.get(module, ()), slice(start, start + count)
        for update in updates:
            _check_fits(update, base[part].shape, module)
        if updates:
            merge_low_rank(out[part][None], base[part][None], [(each.scale, *each.factors()) for each in updates])
            changed += 1
        else:
            out[part].copy_(base[part])
        start += count
    return changed


@torch.no_grad()
def merge_experts(
    out: Tensor, base: Tensor, stacked: str, per_expert: Sequence[str], deltas: Deltas, *, transposed: bool
) -> int:
    """Write base + the sum of expert updates to `out`, (E, O, I), or (E, I, O) where `transposed`. -> modules that changed.

    Updates of the module `stacked` are those of the whole parameter, as PEFT trains it: an interleaved parameter has
    interleaved updates. Updates of `per_expert` modules, `*` the expert, belong to one expert's rows, module after module.
    Raises AdapterError where an update's shape is not its target's.
    """
    whole, parts = deltas.get(stacked, ()), [_expert_updates(name, deltas) for name in per_expert]
    out_EOI, base_EOI = (out.transpose(1, 2), base.transpose(1, 2)) if transposed else (out, base)
    for update in whole:
        _check_fits(update, base_EOI.shape, stacked)
    updates = [(update.scale, *update.factors()) for update in whole]
    for place, (name, some) in enumerate(zip(per_expert, parts)):
        updates += _of_experts(some, name, place, len(parts), base_EOI)
    if updates:
        merge_low_rank(out_EOI, base_EOI, updates)
    else:
        out.copy_(base)
    return bool(whole) + sum(len({expert for expert, _ in some}) for some in parts)


def _expert_updates(name: str, deltas: Deltas) -> list[tuple[int, LowRank | ExpertLowRank]]:
    """(expert, update) of every module that `name` stands for, `*` being the expert."""
    pattern = re.compile(re.escape(name).replace(r"\*", r"(\d+)"))
    found = ((pattern.fullmatch(module), updates) for module, updates in deltas.items())
    return [(int(match[1]), update) for match, updates in found if match for update in updates]


def _of_experts(
    updates: Sequence[tuple[int, LowRank | ExpertLowRank]], name: str, place: int, parts: int, base_EOI: Tensor
) -> list[Factors]:
    """Updates of single experts' modules as ones of all experts: zeros for those that have none, and for other modules' rows."""
    experts, features, width = base_EOI.shape
    rows, turns = features // parts, Counter[int]()
    layers: dict[tuple[int, int], list[tuple[int, LowRank | ExpertLowRank]]] = {}
    for expert, update in updates:
        _check_fits(update, (rows, width), name.replace("*", str(expert)))
        layers.setdefault((turns[expert], update.a.shape[0]), []).append((expert, update))
        turns[expert] += 1
    made = []
    for (_, rank), same in layers.items():
        which = torch.tensor([expert for expert, _ in same], device=base_EOI.device)
        b_EOR = base_EOI.new_zeros((experts, features, rank), dtype=torch.float32)
        a_ERI = base_EOI.new_zeros((experts, rank, width), dtype=torch.float32)
        b_EOR[which, place * rows : (place + 1) * rows] = torch.stack([update.scale * update.b.float() for _, update in same])
        a_ERI[which] = torch.stack([update.a.float() for _, update in same])
        made.append((1.0, b_EOR, a_ERI))
    return made


def _check_rank(a: Tensor, b: Tensor, experts: int = 1) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or a.shape[0] % experts:
        raise AdapterError(
            f"an adapter's A has shape {tuple(a.shape)} and its B {tuple(b.shape)}: both are matrices, and A has as many rows "
            "as B has columns" + (f", a multiple of the {experts} experts" if experts > 1 else "")
        )


def _check_fits(update: LowRank | ExpertLowRank, wanted: Sequence[int], module: str) -> None:
    if update.shape != tuple(wanted):
        raise AdapterError(
            f"the adapter's update of {module} has shape {update.shape}, and the weight has {tuple(wanted)}: "
            "it was trained on another model or orientation"
        )
