"""What follows each of torch's two grouped products, in Triton, for many tokens: the gate, and rows back in their places.

`expert_backends.grouped` calls both.

Shape suffixes: D model width, I inner width of an expert, J = 2 I, M routes, sorted by expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.activations import gate_constants
from flexgen.runtime.ops.kernels.activations import gated as gated_numbers
from flexgen.runtime.ops.kernels.launch import CHAIN, await_previous

if TYPE_CHECKING:
    from flexgen.runtime.ops.expert_backends import ExpertWeights, Gate

_ROWS = 4
"""Rows of a program that moves them."""


@triton.jit(do_not_specialize=["rows"])
def _gate_kernel(  # noqa: ANN202
    h, bias, experts, out, rows, bias_e,  # noqa: ANN001
    INNER: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    await_previous()
    live, route = m < rows, m.to(tl.int64)[:, None]
    mask, both = live[:, None] & (n < INNER)[None, :], live[:, None] & (pair < 2 * INNER)[None, :]
    expert = tl.load(experts + m, mask=live & BIAS, other=0).to(tl.int64)[:, None]
    if INTERLEAVED:
        h_mj = tl.load(h + route * 2 * INNER + pair[None, :], mask=both, other=0.0).to(tl.float32)
        if BIAS:
            h_mj += tl.load(bias + expert * bias_e + pair[None, :], mask=both, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(h_mj, (BLOCK_M, BLOCK_N, 2)))
    else:
        of_gate = h + route * 2 * INNER + n[None, :]
        gate = tl.load(of_gate, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(of_gate + INNER, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            of_gate = bias + expert * bias_e + n[None, :]
            gate += tl.load(of_gate, mask=mask, other=0.0).to(tl.float32)
            up += tl.load(of_gate + INNER, mask=mask, other=0.0).to(tl.float32)
    h_mn = gated_numbers(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
    tl.store(out + route * INNER + n[None, :], h_mn.to(out.dtype.element_ty), mask=mask)


def gated(h_MJ: Tensor, experts_M: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    """(M, 2I) products of sorted routes -> (M, I): the bias of their experts, if any, and the gate, in fp32."""
    bias = weights.gate_up_bias
    assert h_MJ.is_contiguous() and (bias is None or bias.stride(1) == 1)
    rows, inner = h_MJ.shape[0], h_MJ.shape[1] // 2
    out = h_MJ.new_empty((rows, inner))
    block_m, block_n = _ROWS, min(1024, triton.next_power_of_2(inner))
    _gate_kernel[(triton.cdiv(rows, block_m), triton.cdiv(inner, block_n))](
        h_MJ, h_MJ if bias is None else bias, experts_M, out, rows, 0 if bias is None else bias.stride(0),
        INNER=inner, INTERLEAVED=weights.interleaved, BIAS=bias is not None, **gate_constants(gate),
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, **CHAIN,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _place_kernel(  # noqa: ANN202
    y, bias, experts, order, out, rows, bias_e,  # noqa: ANN001
    WIDTH: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    await_previous()
    live = m < rows
    mask = live[:, None] & (n < WIDTH)[None, :]
    y_mn = tl.load(y + m.to(tl.int64)[:, None] * WIDTH + n[None, :], mask=mask, other=0.0)
    if BIAS:
        expert = tl.load(experts + m, mask=live, other=0).to(tl.int64)[:, None]
        y_mn = y_mn.to(tl.float32) + tl.load(bias + expert * bias_e + n[None, :], mask=mask, other=0.0).to(tl.float32)
    route = tl.load(order + m, mask=live, other=0)[:, None]
    tl.store(out + route * WIDTH + n[None, :], y_mn.to(out.dtype.element_ty), mask=mask)


def placed(y_MD: Tensor, experts_M: Tensor, order_M: Tensor, bias: Tensor | None) -> Tensor:
    """(M, D) rows of sorted routes, back in the order of the routes, with the bias of their experts, if any."""
    assert y_MD.is_contiguous() and (bias is None or bias.stride(1) == 1)
    rows, width = y_MD.shape
    out, block_n = torch.empty_like(y_MD), min(1024, triton.next_power_of_2(width))
    _place_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(width, block_n))](
        y_MD, y_MD if bias is None else bias, experts_M, order_M, out, rows, 0 if bias is None else bias.stride(0),
        WIDTH=width, BIAS=bias is not None, BLOCK_M=_ROWS, BLOCK_N=block_n, num_warps=4, **CHAIN,
    )  # fmt: skip
    return out
