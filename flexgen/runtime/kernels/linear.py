"""A few tokens times a weight matrix in Triton: the weight streams through once, and its first part is already on its way
while the kernel before still runs.

What cuBLAS chooses for so few tokens reads matrices of some ten megabytes at half of the bandwidth, and begins only when
everything before has ended. One token is a sum of products in registers; more are a matrix product of BLOCK_T rows.

Shape suffixes: T tokens, O output features, D input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.kernels.launch import CHAIN, await_previous, prefetch, processors

_MOST_TOKENS = 64
_MOST_WEIGHTS = 2**25
"""Larger weights reach 4.1 of 4.15 TB/s in cuBLAS; the smaller they are, the less."""

_TILE = 8192
"""Weights that a program for one token holds at once: all its loads are under way together."""

_LINE = tl.constexpr(64)
"""Weights in a line of the cache: 128 bytes of 16-bit numbers, and half of that many more requests than fp32 needs."""


@triton.jit
def _linear_one_kernel(  # noqa: ANN202
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
        if at == 0:
            await_previous()
        sums += w_od.to(tl.float32) * tl.load(x + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(sums, 1)
    if BIAS:
        y += tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=live)


@triton.jit
def _linear_few_kernel(  # noqa: ANN202
    x, weight, bias, out, tokens, features, width, token_stride, row_stride,  # noqa: ANN001
    WHOLE: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """AHEAD: weights of each row to ask for before the kernel before has ended. WHOLE: BLOCK_D divides the width."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    rows = weight + tl.minimum(o, features - 1).to(tl.int64)[:, None] * row_stride
    if AHEAD > 0:
        prefetch(rows + _LINE * tl.arange(0, AHEAD // _LINE)[None, :])
    await_previous()
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    of_token = x + tl.minimum(t, tokens - 1).to(tl.int64)[:, None] * token_stride
    d = tl.arange(0, BLOCK_D)
    sums = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for at in range(0, width, BLOCK_D):
        if WHOLE:
            x_td = tl.load(of_token + at + d[None, :])
            w_od = tl.load(rows + at + d[None, :])
        else:
            live = (at + d < width)[None, :]
            x_td = tl.load(of_token + at + d[None, :], mask=live, other=0.0)
            w_od = tl.load(rows + at + d[None, :], mask=live, other=0.0)
        sums = tl.dot(x_td, tl.trans(w_od), sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + o, mask=o < features, other=0.0).to(tl.float32)[None, :]
    to = out + t[:, None].to(tl.int64) * features + o[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (o < features)[None, :])


@dataclass(frozen=True)
class Launch:
    """Block sizes of a call of `_linear_few_kernel`."""

    block_t: int
    block_o: int
    block_d: int
    ahead: int
    warps: int
    stages: int

    @staticmethod
    def of(tokens: int, features: int, width: int, device: torch.device) -> Launch:
        """From shapes alone."""
        block_t = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
        block_o = 16 if features <= 16 * 4 * processors(device) else 32
        return Launch(block_t, block_o, 256 if block_t < 64 else 128, min(2048, 2 ** (width.bit_length() - 1)), 4, 4)


def serves(x_TD: Tensor, weight_OD: Tensor) -> bool:
    """Whether `linear` is the faster choice; cuBLAS is for many tokens and for the largest weights."""
    most = _MOST_TOKENS if x_TD.element_size() == 2 else 1
    return x_TD.shape[0] <= most and weight_OD.numel() <= _MOST_WEIGHTS and weight_OD.stride(1) == 1


def blocks(rows: int, width: int, device: torch.device, tile: int = _TILE) -> dict[str, int]:
    """BLOCK_O weight rows and BLOCK_D features of a program: a tile, or less where two a multiprocessor need work."""
    block_d = min(tile, triton.next_power_of_2(width))
    enough = triton.next_power_of_2(rows // (2 * processors(device)) + 1) // 2
    return {"BLOCK_O": max(1, min(tile // block_d, enough)), "BLOCK_D": block_d}


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, launch: Launch | None = None) -> Tensor:
    """`F.linear`, (T, O) in x's dtype, summed in fp32. The weight's rows must be contiguous."""
    tokens, (features, width) = x_TD.shape[0], weight_OD.shape
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    assert weight_OD.stride(1) == 1
    out = x_TD.new_empty((tokens, features))
    bias, biased = (weight_OD, False) if bias_O is None else (bias_O, True)
    if tokens == 1 and launch is None:
        sizes = blocks(features, width, x_TD.device)
        _linear_one_kernel[(triton.cdiv(features, sizes["BLOCK_O"]),)](
            x_TD, weight_OD, bias, out, features, weight_OD.stride(0),
            WIDTH=width, BIAS=biased, **sizes, num_warps=4, **CHAIN,
        )  # fmt: skip
        return out
    launch = launch or Launch.of(tokens, features, width, x_TD.device)
    _linear_few_kernel[(triton.cdiv(features, launch.block_o), triton.cdiv(tokens, launch.block_t))](
        x_TD, weight_OD, bias, out, tokens, features, width, x_TD.stride(0), weight_OD.stride(0),
        WHOLE=width % launch.block_d == 0, BIAS=biased, AHEAD=launch.ahead,
        BLOCK_T=launch.block_t, BLOCK_O=launch.block_o, BLOCK_D=launch.block_d,
        num_warps=launch.warps, num_stages=launch.stages, **CHAIN,
    )  # fmt: skip
    return out
