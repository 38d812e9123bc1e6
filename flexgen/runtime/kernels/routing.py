"""The k best of a token's router scores in Triton, one program a token: torch.topk sorts, which costs two slow launches.

Shape suffixes: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.kernels.launch import CHAIN, await_previous


@triton.jit
def _top_k_kernel(scores, values, ids, stride, COUNT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    await_previous()
    x = tl.load(scores + token * stride + expert, mask=expert < COUNT, other=float("-inf"))
    free = expert < COUNT
    for place in tl.static_range(K):
        best = tl.max(tl.where(free, x.to(tl.float32), float("-inf")), 0)
        at = tl.min(tl.where(free & (x.to(tl.float32) == best), expert, BLOCK), 0)
        at = tl.where(at == BLOCK, tl.min(tl.where(free, expert, BLOCK), 0), at)  # only NaN is left: any free expert
        tl.store(values + token * K + place, tl.sum(tl.where(expert == at, x, 0.0), 0).to(values.dtype.element_ty))
        tl.store(ids + token * K + place, at.to(tl.int64))
        free = free & (expert != at)


def top_k(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What `moe.top_k` promises: values (T, K) in the scores' dtype and experts (T, K) int64; of equals the first."""
    tokens, count = scores_TE.shape
    assert scores_TE.stride(1) == 1
    values_TK = scores_TE.new_empty((tokens, k))
    ids_TK = scores_TE.new_empty((tokens, k), dtype=torch.int64)
    _top_k_kernel[(tokens,)](
        scores_TE, values_TK, ids_TK, scores_TE.stride(0), COUNT=count, K=k, BLOCK=triton.next_power_of_2(count),
        num_warps=1 if count <= 128 else 2, **CHAIN,
    )  # fmt: skip
    return values_TK, ids_TK
