"""Low-rank updates added to weights in Triton: a program reads a tile of the base, adds scale B A, rounds once and writes it.

Shape suffixes as in `ops.merge`: E experts, O output features, I input features, R rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.launch import processors

_LONG, _SHORT = 128, 64
"""Sides of a tile of a weight, the long one along its contiguous numbers."""

_WAVES = 8
"""Programs a multiprocessor, at least, before a program takes more than one tile: they share a tile of B."""


@triton.jit
def _merge_kernel(  # noqa: ANN202
    out, base, b, a, scale, EXPERTS, FEATURES, WIDTH, RANK,  # noqa: ANN001
    out_e, out_o, out_i, base_e, base_o, base_i, b_e, b_o, b_r, a_e, a_r, a_i,  # noqa: ANN001
    TILES: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out (E, O, I): TILES tiles beside each other of one expert. HALF: A and B are multiplied as they are, else in fp32."""
    expert = (tl.program_id(0) % EXPERTS).to(tl.int64)
    o = (tl.program_id(0) // EXPERTS) * BLOCK_O + tl.arange(0, BLOCK_O)
    o_64, ranks = o.to(tl.int64)[:, None], tl.arange(0, BLOCK_R)
    for tile in range(TILES):
        i = (tl.program_id(1) * TILES + tile) * BLOCK_I + tl.arange(0, BLOCK_I)
        i_64 = i.to(tl.int64)[None, :]
        mask = (o < FEATURES)[:, None] & (i < WIDTH)[None, :]
        base_oi = tl.load(base + expert * base_e + o_64 * base_o + i_64 * base_i, mask=mask, other=0.0)
        sums = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
        for first in range(0, RANK, BLOCK_R):
            r = first + ranks
            b_or = tl.load(b + expert * b_e + o_64 * b_o + r[None, :] * b_r,
                           mask=(o < FEATURES)[:, None] & (r < RANK)[None, :], other=0.0)  # fmt: skip
            a_ri = tl.load(a + expert * a_e + r[:, None] * a_r + i_64 * a_i,
                           mask=(r < RANK)[:, None] & (i < WIDTH)[None, :], other=0.0)  # fmt: skip
            if not HALF:
                b_or, a_ri = b_or.to(tl.float32), a_ri.to(tl.float32)
            sums = tl.dot(b_or, a_ri, sums, input_precision=PRECISION)
        total = base_oi.to(tl.float32) + scale * sums
        tl.store(out + expert * out_e + o_64 * out_o + i_64 * out_i, total.to(out.dtype.element_ty), mask=mask)


def merge_fused(out_EOI: Tensor, base_EOI: Tensor, scale: float, b_EOR: Tensor, a_ERI: Tensor) -> None:
    """`ops.merge.merge_plain` of one update, each weight read and written once."""
    experts, features, width = base_EOI.shape
    rank = a_ERI.shape[1]
    turned = base_EOI.stride(1) == 1 and base_EOI.stride(2) != 1
    block_o, block_i = (_LONG, _SHORT) if turned else (_SHORT, _LONG)
    rows, columns = experts * triton.cdiv(features, block_o), triton.cdiv(width, block_i)
    tiles = triton.next_power_of_2(max(1, min(columns, rows * columns // (_WAVES * processors(base_EOI.device)))))
    half = a_ERI.dtype == b_EOR.dtype and a_ERI.dtype != torch.float32
    rounded = out_EOI.dtype != torch.float32
    _merge_kernel[(rows, triton.cdiv(columns, tiles))](
        out_EOI, base_EOI, b_EOR, a_ERI, scale, experts, features, width, rank,
        *out_EOI.stride(), *base_EOI.stride(), *b_EOR.stride(), *a_ERI.stride(),
        TILES=tiles, BLOCK_O=block_o, BLOCK_I=block_i, BLOCK_R=16 if rank <= 16 else 32,
        HALF=half, PRECISION="tf32x3" if rounded else "ieee", num_warps=8,
    )  # fmt: skip
