"""Low-rank updates and their merge from a pristine weight. Source: Hu et al. 2021; tensor layouts as PEFT saves them.

I in, O out, r rank, E experts. Sums are taken in fp32 and rounded once, so merging twice from the base equals once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.contract.weights import Weight
from flexgen.errors import FlexgenError


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

    def delta(self) -> Tensor:
        """(O, I) in fp32."""
        return self.scale * (self.b.float() @ self.a.float())


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
        """b (E, O, r) and a (E, r, I) in fp32, whose product times `scale` is the update."""
        rank = self.a.shape[0] // self.experts
        b = self.b.float().view(self.b.shape[0], rank, self.experts)
        return b.permute(2, 0, 1).contiguous(), self.a.float().view(self.experts, rank, -1)


Deltas = Mapping[str, Sequence[LowRank | ExpertLowRank]]
"""Module name, below the layer, to the updates of every adapter on it. Adapters of older PEFT name each expert's modules,
`mlp.experts.3.gate_proj`."""


_AT_ONCE = 2**26
"""Numbers of experts that are summed at once in fp32: 256 MiB beside the weights."""

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
    out.copy_(base)
    changed = start = 0
    for module, count in rows.items():
        updates = deltas.get(module, ())
        if updates:
            part = base[start : start + count]
            total = part.float()
            for update in updates:
                _check_fits(update, part.shape, module)
                assert isinstance(update, LowRank)  # what fits a matrix is one
                total = total + update.delta()
            out[start : start + count] = total.to(out.dtype)
            changed += 1
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
    parts = [_expert_updates(name, base.shape[0], deltas) for name in per_expert]
    whole = deltas.get(stacked, ())
    if not whole and not any(parts):
        out.copy_(base)
        return 0
    shape_EOI = base.transpose(1, 2).shape if transposed else base.shape
    for update in whole:
        _check_fits(update, shape_EOI, stacked)
    factors = [(update.scale, *update.factors()) for update in whole if isinstance(update, ExpertLowRank)]
    assert len(factors) == len(whole)  # what fits all experts is for all of them
    step = max(1, _AT_ONCE // base[0].numel())
    for first in range(0, base.shape[0], step):
        total = base[first : first + step].to(torch.float32, copy=True)
        for scale, b, a in factors:
            b, a = b[first : first + step], a[first : first + step]
            total.baddbmm_(*((a.mT, b.mT) if transposed else (b, a)), alpha=scale)
        total_EOI = total.transpose(1, 2) if transposed else total
        for index, (name, updates) in enumerate(zip(per_expert, parts)):
            some = [(expert - first, update) for expert, update in updates if first <= expert < first + step]
            _add_per_expert(total_EOI.chunk(len(parts), dim=1)[index], some, name, first)
        out[first : first + step] = total.to(out.dtype)
    return bool(whole) + len({(name, expert) for name, updates in zip(per_expert, parts) for expert, _ in updates})


def _expert_updates(name: str, experts: int, deltas: Deltas) -> list[tuple[int, LowRank | ExpertLowRank]]:
    """(expert, update) of every module that `name` stands for."""
    return [(expert, update) for expert in range(experts) for update in deltas.get(name.replace("*", str(expert)), ())]


def _add_per_expert(target_EOI: Tensor, updates: Sequence[tuple[int, LowRank | ExpertLowRank]], name: str, first: int) -> None:
    """Add updates to their experts' matrices, all of one rank in one batched product. `first`: what the model calls expert 0."""
    by_rank: dict[int, list[tuple[int, LowRank]]] = {}
    for expert, update in updates:
        _check_fits(update, target_EOI.shape[1:], name.replace("*", str(first + expert)))
        assert isinstance(update, LowRank)  # what fits a matrix is one
        by_rank.setdefault(update.a.shape[0], []).append((expert, update))
    for same in by_rank.values():
        a = torch.stack([update.a.float() for _, update in same])
        b = torch.stack([update.scale * update.b.float() for _, update in same])
        experts = torch.tensor([expert for expert, _ in same], device=target_EOI.device)
        target_EOI.index_add_(0, experts, b @ a)


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
