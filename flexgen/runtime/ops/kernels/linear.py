"""One token, or a few, times a weight matrix in Triton: the weight streams through once, and its first part is already on
its way while the kernel before still runs.

What cuBLAS chooses for them begins only when everything before has ended, and reads most weights at half to three quarters
of the bandwidth. One token is a sum of products in registers; more are a matrix product whose programs all run at once and
have equal work.

Shape suffixes: T tokens, O output features, D input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.launch import (
    CHAIN,
    LINE,
    arrivals,
    await_previous,
    lines,
    prefetch,
    processors,
    shared_memory,
)

_MOST_TOKENS = 64
_MOST_WEIGHTS = 2**21
"""For more than one token cuBLAS is as fast from here on; routers and the like are smaller (benchmarks/KERNELS.md)."""

_TILE = 4096
"""Weights that a program for one token holds at once: all its loads are under way together."""


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


@triton.jit(do_not_specialize=["tokens", "rows"])
def _linear_few_kernel(  # noqa: ANN202
    x, weight, bias, out, parts, counts, tokens, features, width, rows, span, token_stride, row_stride,  # noqa: ANN001
    WHOLE: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`rows` of the weight, of BLOCK_O that a tile holds, over one of SPLITS spans of the width.

    The last program to arrive at a tile adds the spans' sums, in their order. WHOLE: BLOCK_D divides every span.
    AHEAD: weights of each row to ask for before the kernel before has ended.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK_O)
    o = tile * rows + i
    live = (i < rows) & (o < features)
    begin = tl.multiple_of(split * span, BLOCK_D)  # so that loads are of 16 bytes
    of_row = weight + tl.minimum(o, features - 1).to(tl.int64)[:, None] * row_stride + begin
    if AHEAD > 0:
        prefetch(of_row + LINE * tl.arange(0, AHEAD // LINE)[None, :])
    await_previous()
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    of_token = x + tl.minimum(t, tokens - 1)[None, :] * token_stride + begin
    sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for at in range(0, tl.minimum(span, width - begin), BLOCK_D):
        if WHOLE:
            w_od = tl.load(of_row + at + d[None, :], mask=live[:, None], other=0.0)
            x_dt = tl.load(of_token + at + d[:, None])
        else:
            inside = begin + at + d < width
            w_od = tl.load(of_row + at + d[None, :], mask=live[:, None] & inside[None, :], other=0.0)
            x_dt = tl.load(of_token + at + d[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(w_od, x_dt, sums, input_precision="ieee")
    mask = live[:, None] & (t < tokens)[None, :]
    at_out = t[None, :].to(tl.int64) * features + o[:, None]
    if SPLITS > 1:
        size = tokens.to(tl.int64) * features
        tl.store(parts + split * size + at_out, sums, mask=mask)
        tl.debug_barrier()  # all of this program's sums are written before it says so
        if tl.atomic_add(counts + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counts + tile, 0)
        sums = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
        for part in tl.static_range(SPLITS):
            sums += tl.load(parts + part * size + at_out, mask=mask, other=0.0, cache_modifier=".cg")
    if BIAS:
        sums += tl.load(bias + o, mask=live, other=0.0).to(tl.float32)[:, None]
    tl.store(out + at_out, sums.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Launch:
    """Sizes of a call of `_linear_few_kernel`."""

    rows: int
    splits: int
    block_t: int
    block_o: int
    block_d: int
    ahead: int
    warps: int
    stages: int

    @classmethod
    def of(
        cls, tokens: int, features: int, width: int, device: torch.device, splits: int | None = None, block_d: int = 128
    ) -> Launch:
        """From shapes alone: a program a multiprocessor, all with equal work, and spans of 512 or more of a long width."""
        splits = splits or max(1, min(4, width // 512))
        tiles = max(1, processors(device) // splits)
        rows = min(128, triton.cdiv(triton.cdiv(features, tiles), 8) * 8)
        block_t, block_o = 16 if tokens <= 16 else _MOST_TOKENS, max(16, triton.next_power_of_2(rows))
        room = min(_SHARED, shared_memory(device) or _SHARED) - _RESERVED
        stages = min(8, max(2, triton.cdiv(width, splits * block_d)), room // (2 * block_d * (block_o + block_t)))
        return cls(rows, splits, block_t, block_o, block_d, lines(width // splits, 256), 4, stages)


_SHARED = 224 * 1024
_RESERVED = 4096
"""Bytes of shared memory: at most so many, and what a program needs besides its tiles of 16-bit numbers."""


def serves(x_TD: Tensor, weight_OD: Tensor) -> bool:
    """Whether `linear` is the faster choice: for one token, and for a few and small 16-bit weights."""
    tokens, is_half = x_TD.shape[0], x_TD.element_size() == 2
    few = is_half and 0 < tokens <= _MOST_TOKENS and weight_OD.numel() <= _MOST_WEIGHTS
    return (tokens == 1 or few) and weight_OD.stride(1) == 1


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear`, (T, O) in x's dtype, summed in fp32. The weight's rows must be contiguous."""
    assert weight_OD.stride(1) == 1
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    return (linear_one if x_TD.shape[0] == 1 else linear_few)(x_TD, weight_OD, bias_O)


def linear_one(x_1D: Tensor, weight_OD: Tensor, bias_O: Tensor | None, sizes: tuple[int, int, int] | None = None) -> Tensor:
    """`linear` for one token. `sizes` overrides BLOCK_O, BLOCK_D and warps, for tuning."""
    features, width = weight_OD.shape
    if sizes is None:
        block_o = 4 if features >= 8 * processors(x_1D.device) else 1
        sizes = block_o, min(_TILE // block_o, triton.next_power_of_2(width)), 2
    block_o, block_d, warps = sizes
    out = x_1D.new_empty((1, features))
    _linear_one_kernel[(triton.cdiv(features, block_o),)](
        x_1D, weight_OD, weight_OD if bias_O is None else bias_O, out, features, weight_OD.stride(0),
        WIDTH=width, BIAS=bias_O is not None, BLOCK_O=block_o, BLOCK_D=block_d, num_warps=warps, **CHAIN,
    )  # fmt: skip
    return out


def linear_few(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, launch: Launch | None = None) -> Tensor:
    """`linear` for up to `launch.block_t` tokens. `launch` overrides the sizes, for tuning."""
    tokens, (features, width), device = x_TD.shape[0], weight_OD.shape, x_TD.device
    launch = launch or Launch.of(tokens, features, width, device)
    assert tokens <= launch.block_t and launch.stages >= 2
    tiles, splits = triton.cdiv(features, launch.rows), launch.splits
    span = triton.cdiv(triton.cdiv(width, launch.block_d), splits) * launch.block_d
    out, counts = x_TD.new_empty((tokens, features)), arrivals(device)
    assert splits == 1 or tiles <= len(counts)
    parts = x_TD.new_empty((splits, tokens, features), dtype=torch.float32) if splits > 1 else out
    _linear_few_kernel[(tiles, splits)](
        x_TD, weight_OD, weight_OD if bias_O is None else bias_O, out, parts, counts,
        tokens, features, width, launch.rows, span, x_TD.stride(0), weight_OD.stride(0),
        WHOLE=width % launch.block_d == 0, BIAS=bias_O is not None, SPLITS=splits, AHEAD=launch.ahead,
        BLOCK_T=launch.block_t, BLOCK_O=launch.block_o, BLOCK_D=launch.block_d,
        num_warps=launch.warps, num_stages=launch.stages, **CHAIN,
    )  # fmt: skip
    return out
