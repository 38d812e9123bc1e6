"""The k best of a token's router scores in Triton, one program a token: torch.topk sorts, which costs two slow launches.

What of a router runs here, and what in the compiled code around it:

    top-k of raw, softmaxed or sigmoid scores, biased or not     here
    top-k of scores that groups left out, which are -inf         here: below every other score
    rank of groups, by their best or their best two              here: a row is a group of a token
    scores, selection bias, gather of the weights, sums, factors, sparsemixer    compiled

Shape suffixes: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.launch import CHAIN, await_previous


@triton.jit
def _top_k_kernel(scores, values, ids, stride, COUNT: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    """Each score and its expert are one number that compares as the score does and then the other way round as the expert."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    await_previous()
    x = tl.load(scores + token * stride + expert, mask=expert < COUNT, other=0.0).to(tl.float32) + 0.0  # -0 becomes 0
    x = tl.where(x != x, float("nan"), x)  # of either sign
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered.to(tl.int64) << 32) | (BLOCK - 1 - expert)
    keys = tl.where(expert < COUNT, keys, -(2**63))
    for place in tl.static_range(K):
        best = tl.max(keys, 0)
        bits = (best >> 32).to(tl.int32)
        value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
        tl.store(values + token * K + place, value.to(values.dtype.element_ty))
        tl.store(ids + token * K + place, BLOCK - 1 - (best & 0xFFFFFFFF))
        keys = tl.where(keys == best, -(2**63), keys)


def top_k(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What `moe.top_k` promises: values (T, K) in the scores' dtype and experts (T, K) int64; of equals the first; NaN is above all."""
    tokens, count = scores_TE.shape
    assert scores_TE.stride(1) == 1
    values_TK = scores_TE.new_empty((tokens, k))
    ids_TK = scores_TE.new_empty((tokens, k), dtype=torch.int64)
    _top_k_kernel[(tokens,)](
        scores_TE, values_TK, ids_TK, scores_TE.stride(0), COUNT=count, K=k, BLOCK=triton.next_power_of_2(count),
        num_warps=1, **CHAIN,
    )  # fmt: skip
    return values_TK, ids_TK
