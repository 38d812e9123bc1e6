"""Low-rank updates of few rows in Triton: each row reads the A and B of its own entry, all parts of a weight in one launch.

Shape suffixes as in `ops.lora`: M rows, I input features, O output features, P parts, R rank, N entries; Q = P R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096
"""Numbers that a program loads at once."""


@triton.jit
def _shrink_kernel(  # noqa: ANN202
    x, a, index, hidden, x_t, WIDTH: tl.constexpr, RANKS: tl.constexpr, CHOICES: tl.constexpr,  # noqa: ANN001
    BLOCK_Q: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """hidden (M, Q) fp32: the row of x times A of its entry."""
    m, first = tl.program_id(0), tl.program_id(1) * BLOCK_Q
    entry = tl.load(index + m)
    if entry < 0:
        return
    q = first + tl.arange(0, BLOCK_Q)
    x += (m // CHOICES).to(tl.int64) * x_t
    a += entry * RANKS * WIDTH
    sums = tl.zeros((BLOCK_Q, BLOCK_I), tl.float32)
    for at in range(0, WIDTH, BLOCK_I):
        i = at + tl.arange(0, BLOCK_I)
        mask = (q < RANKS)[:, None] & (i < WIDTH)[None, :]
        a_qi = tl.load(a + q[:, None] * WIDTH + i[None, :], mask=mask, other=0.0).to(tl.float32)
        sums += a_qi * tl.load(x + i, mask=i < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(hidden + m * RANKS + q, tl.sum(sums, 1), mask=q < RANKS)


@triton.jit
def _expand_kernel(  # noqa: ANN202
    hidden, b, index, part_of, out, FEATURES: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,  # noqa: ANN001
    BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """out (M, O): the hidden numbers of each feature's part times B of the row's entry; zeros where it has none."""
    m, o = tl.program_id(0), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    live = o < FEATURES
    entry = tl.load(index + m)
    r = tl.arange(0, BLOCK_R)
    mask = live[:, None] & (r < tl.where(entry >= 0, RANK, 0))[None, :]
    part = tl.load(part_of + o, mask=live, other=0)
    b_or = tl.load(b + entry * FEATURES * RANK + o[:, None] * RANK + r[None, :], mask=mask, other=0.0).to(tl.float32)
    h_or = tl.load(hidden + m * RANKS + part[:, None] * RANK + r[None, :], mask=mask, other=0.0)
    y_o = tl.sum(b_or * h_or, 1)
    tl.store(out + m.to(tl.int64) * FEATURES + o, y_o.to(out.dtype.element_ty), mask=live)


def lora_gathered(
    x_TI: Tensor, a_NQI: Tensor, b_NOR: Tensor, index_M: Tensor, rows: Sequence[int], choices: int
) -> Tensor:
    """(M, O) in x's dtype, as `ops.lora.lora_loop` computes it, with fp32 between the products."""
    count, width, ranks = len(index_M), a_NQI.shape[2], a_NQI.shape[1]
    features, rank = b_NOR.shape[1:]
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    hidden_MQ = torch.empty((count, ranks), dtype=torch.float32, device=x_TI.device)
    out_MO = x_TI.new_empty((count, features))
    block_i = min(triton.next_power_of_2(width), 512)
    block_q = min(triton.next_power_of_2(ranks), _TILE // block_i)
    _shrink_kernel[(count, triton.cdiv(ranks, block_q))](
        x_TI, a_NQI, index_M, hidden_MQ, x_TI.stride(0), WIDTH=width, RANKS=ranks, CHOICES=choices,
        BLOCK_Q=block_q, BLOCK_I=block_i, num_warps=4,
    )  # fmt: skip
    block_r = triton.next_power_of_2(rank)
    block_o = max(1, min(triton.next_power_of_2(features), _TILE // block_r))
    _expand_kernel[(count, triton.cdiv(features, block_o))](
        hidden_MQ, b_NOR, index_M, _parts(tuple(rows), x_TI.device), out_MO, FEATURES=features, RANK=rank, RANKS=ranks,
        BLOCK_O=block_o, BLOCK_R=block_r, num_warps=4,
    )  # fmt: skip
    return out_MO


_PARTS: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _parts(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """(O,) int32: the part of each feature. Made once; the first step of every shape runs before it is captured."""
    if (rows, device) not in _PARTS:
        counts = torch.tensor(rows)
        _PARTS[rows, device] = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(counts).to(device)
    return _PARTS[rows, device]
