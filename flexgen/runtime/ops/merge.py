"""Low-rank updates added to weights: out = base + the sum of scale B A, in fp32, rounded once to what `out` holds.

Shape suffixes: E experts (1 for a matrix that is none), O output features, I input features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Factors = tuple[float, Tensor, Tensor]
"""scale, B (E, O, R), A (E, R, I), in any floating dtype."""

_AT_ONCE = 2**26
"""Numbers of experts that are summed at once in fp32: 256 MiB beside the weights."""


@torch.no_grad()
def merge_low_rank(out_EOI: Tensor, base_EOI: Tensor, updates: Sequence[Factors]) -> None:
    """Write base + the sum of updates to `out`. Weights stored (E, I, O) come as transposed views.

    On a CUDA device one kernel reads and writes each weight once. It takes the same sums in another order: what it rounds
    may differ from the plain form by one unit in the last place of `out`'s dtype.
    """
    if base_EOI.is_cuda:
        from flexgen.runtime.ops.kernels.merge import merge_fused  # Triton is there where CUDA is

        merge_fused(out_EOI, base_EOI, *together(updates))
    else:
        merge_plain(out_EOI, base_EOI, updates)


def merge_plain(out_EOI: Tensor, base_EOI: Tensor, updates: Sequence[Factors]) -> None:
    """The reference: some experts at a time."""
    step = max(1, _AT_ONCE // base_EOI[0].numel())
    for first in range(0, len(base_EOI), step):
        some = slice(first, first + step)
        total_EOI = base_EOI[some].to(torch.float32, copy=True)
        for scale, b_EOR, a_ERI in updates:
            total_EOI.baddbmm_(b_EOR[some].float(), a_ERI[some].float(), alpha=scale)
        out_EOI[some] = total_EOI.to(out_EOI.dtype)


def together(updates: Sequence[Factors]) -> Factors:
    """Several updates as one, their ranks end to end, each B scaled in fp32."""
    if len(updates) == 1:
        return updates[0]
    b_EOR = torch.cat([scale * b.float() for scale, b, _ in updates], dim=2)
    return 1.0, b_EOR, torch.cat([a.float() for _, _, a in updates], dim=1)
