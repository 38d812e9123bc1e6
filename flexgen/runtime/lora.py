"""Low-rank updates and their merge from a pristine weight. Source: Hu et al. 2021; tensor layouts as PEFT saves them.

I in, O out, r rank, E experts. Sums are taken in fp32 and rounded once, so merging twice from the base equals once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.runtime.errors import FlexgenError


class AdapterError(FlexgenError):
    """An adapter that does not fit the model: which module, which shapes, what was expected."""


@dataclass(frozen=True)
class LowRank:
    """`scale * B @ A` for one linear module. a (r, I), b (O, r)."""

    a: Tensor
    b: Tensor
    scale: float

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

    def delta(self) -> Tensor:
        """(E, O, I) in fp32."""
        rank = self.a.shape[0] // self.experts
        a = self.a.float().view(self.experts, rank, -1)
        b = self.b.float().view(self.b.shape[0], rank, self.experts)
        return self.scale * torch.einsum("ore,eri->eoi", b, a)


Deltas = Mapping[str, Sequence[LowRank | ExpertLowRank]]
"""Module name, below the layer, to the updates of every adapter on it."""


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
                total = total + _fitting(update.delta(), part, module)
            out[start : start + count] = total.to(out.dtype)
            changed += 1
        start += count
    return changed


@torch.no_grad()
def merge_experts(out: Tensor, base: Tensor, updates: Sequence[LowRank | ExpertLowRank], *, transposed: bool) -> int:
    """Write base + the sum of expert updates to `out`, (E, O, I), or (E, I, O) where `transposed`. -> 1 if changed.

    Updates are those of the stored parameter, as PEFT trains it: an interleaved parameter has interleaved updates.
    Raises AdapterError where an update's shape is not the tensor's.
    """
    out.copy_(base)
    if not updates:
        return 0
    total = base.float()
    for update in updates:
        delta = update.delta()
        total = total + _fitting(delta.transpose(1, 2) if transposed else delta, base, "experts")
    out.copy_(total.to(out.dtype))
    return 1


def _fitting(delta: Tensor, target: Tensor, module: str) -> Tensor:
    if delta.shape != target.shape:
        raise AdapterError(
            f"the adapter's update of {module} has shape {tuple(delta.shape)}, and the weight has {tuple(target.shape)}: "
            "it was trained on another model or orientation"
        )
    return delta
