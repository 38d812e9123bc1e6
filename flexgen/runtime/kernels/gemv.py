"""One token times a weight matrix in Triton: rows of the weight stream through registers, each read once.

A matrix product for one token is a tile of which all but one row is idle, and what cuBLAS chooses for it reads matrices of
some ten megabytes at half of the bandwidth.

Shape suffixes: O output features, D input features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.kernels.launch import processors

_TILE = 8192
"""Weights a program holds at once: all its loads are under way together, with nothing to wait for between them."""


@triton.jit
def _gemv_kernel(  # noqa: ANN202
    x, weight, bias, out, features, row_stride,  # noqa: ANN001
    WIDTH: tl.constexpr, BIAS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    live = rows < features
    sums = tl.zeros((BLOCK_O, BLOCK_D), tl.float32)
    for at in tl.static_range(0, WIDTH, BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (d < WIDTH)[None, :]
        w_od = tl.load(weight + rows[:, None] * row_stride + d[None, :], mask=mask, other=0.0)
        sums += w_od.to(tl.float32) * tl.load(x + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(sums, 1)
    if BIAS:
        y += tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=live)


def blocks(rows: int, width: int, device: torch.device, tile: int = _TILE) -> dict[str, int]:
    """BLOCK_O weight rows and BLOCK_D features of a program: a tile, or less where two a multiprocessor need work."""
    block_d = min(tile, triton.next_power_of_2(width))
    enough = triton.next_power_of_2(rows // (2 * processors(device)) + 1) // 2
    return {"BLOCK_O": max(1, min(tile // block_d, enough)), "BLOCK_D": block_d}


def linear(x_1D: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear` of one token, (1, O) in x's dtype, summed in fp32. The weight's rows must be contiguous."""
    features, width = weight_OD.shape
    assert x_1D.shape[0] == 1 and x_1D.stride(1) == 1 and weight_OD.stride(1) == 1
    out = x_1D.new_empty((1, features))
    sizes = blocks(features, width, x_1D.device)
    _gemv_kernel[(triton.cdiv(features, sizes["BLOCK_O"]),)](
        x_1D, weight_OD, weight_OD if bias_O is None else bias_O, out, features, weight_OD.stride(0),
        WIDTH=width, BIAS=bias_O is not None, **sizes, num_warps=4,
    )  # fmt: skip
    return out
