"""Routed expert MLPs of a single token in Triton: two launches, products without a tile of idle rows.

`experts.route_outputs` calls `one_token` where the rows of weights are contiguous.

Shape suffixes: 1 the token, D model width, I inner width, K experts of the token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.activations import gate_constants, gated
from flexgen.runtime.ops.kernels.launch import CHAIN, await_previous, processors

if TYPE_CHECKING:
    from flexgen.runtime.ops.expert_backends import ExpertWeights, Gate


@triton.jit
def _gate_up_kernel(  # noqa: ANN202
    x, weight, bias, hidden, experts, weight_e, weight_out, bias_e,  # noqa: ANN001
    WIDTH: tl.constexpr, INNER: tl.constexpr, INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`experts._gate_up_kernel` for one token and weights with contiguous rows: products without a tile of idle rows."""
    route = tl.program_id(1)
    await_previous()
    expert = tl.load(experts + route).to(tl.int64)
    n = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    live = n < INNER
    first = 2 * n if INTERLEAVED else n
    second = 2 * n + 1 if INTERLEAVED else n + INNER
    weight += expert * weight_e
    gates = tl.zeros((BLOCK_O, BLOCK_D), tl.float32)
    ups = tl.zeros((BLOCK_O, BLOCK_D), tl.float32)
    for at in tl.static_range(0, WIDTH, BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (d < WIDTH)[None, :]
        gate_od = tl.load(weight + first[:, None] * weight_out + d[None, :], mask=mask, other=0.0)
        up_od = tl.load(weight + second[:, None] * weight_out + d[None, :], mask=mask, other=0.0)
        x_d = tl.load(x + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
        gates += gate_od.to(tl.float32) * x_d
        ups += up_od.to(tl.float32) * x_d
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if BIAS:
        bias += expert * bias_e
        gate += tl.load(bias + first, mask=live, other=0.0).to(tl.float32)
        up += tl.load(bias + second, mask=live, other=0.0).to(tl.float32)
    h_n = gated(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
    tl.store(hidden + route * INNER + n, h_n.to(hidden.dtype.element_ty), mask=live)


@triton.jit
def _down_kernel(  # noqa: ANN202
    hidden, weight, bias, out, experts, weight_e, weight_out, bias_e,  # noqa: ANN001
    WIDTH: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`experts._down_kernel` for one token and weights with contiguous rows."""
    route = tl.program_id(1)
    expert = tl.load(experts + route, cache_modifier=".cg").to(tl.int64)
    n = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    live = n < WIDTH
    weight += expert * weight_e
    sums = tl.zeros((BLOCK_O, BLOCK_D), tl.float32)
    for at in tl.static_range(0, INNER, BLOCK_D):
        d = at + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (d < INNER)[None, :]
        w_od = tl.load(weight + n[:, None] * weight_out + d[None, :], mask=mask, other=0.0)
        if at == 0:
            await_previous()
        sums += w_od.to(tl.float32) * tl.load(hidden + route * INNER + d, mask=d < INNER, other=0.0).to(tl.float32)[None, :]
    y_n = tl.sum(sums, 1)
    if BIAS:
        y_n += tl.load(bias + expert * bias_e + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + route * WIDTH + n, y_n.to(out.dtype.element_ty), mask=live)


def one_token(x_1D: Tensor, experts_1K: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    """What `experts.route_outputs` gives, (1, K, D)."""
    gate_up, down, up_bias, down_bias = weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias
    assert gate_up.stride(2) == 1 and down.stride(2) == 1
    choices, width, inner, device = experts_1K.shape[1], x_1D.shape[1], weights.inner, x_1D.device
    hidden = x_1D.new_empty((choices, inner))
    out = x_1D.new_empty((1, choices, width))
    sizes = _blocks(choices * inner, width, device, tile=4096)
    _gate_up_kernel[(triton.cdiv(inner, sizes["BLOCK_O"]), choices)](
        x_1D, gate_up, x_1D if up_bias is None else up_bias, hidden, experts_1K,
        *gate_up.stride()[:2], 0 if up_bias is None else up_bias.stride(0),
        WIDTH=width, INNER=inner, INTERLEAVED=weights.interleaved, BIAS=up_bias is not None,
        **gate_constants(gate), **sizes, num_warps=4, **CHAIN,
    )  # fmt: skip
    sizes = _blocks(choices * width, inner, device, tile=8192)
    _down_kernel[(triton.cdiv(width, sizes["BLOCK_O"]), choices)](
        hidden, down, x_1D if down_bias is None else down_bias, out, experts_1K,
        *down.stride()[:2], 0 if down_bias is None else down_bias.stride(0),
        WIDTH=width, INNER=inner, BIAS=down_bias is not None, **sizes, num_warps=4, **CHAIN,
    )  # fmt: skip
    return out


def _blocks(rows: int, width: int, device: torch.device, tile: int) -> dict[str, int]:
    """BLOCK_O weight rows and BLOCK_D features of a program: a tile, or less where two a multiprocessor need work."""
    block_d = min(tile, triton.next_power_of_2(width))
    enough = triton.next_power_of_2(rows // (2 * processors(device)) + 1) // 2
    return {"BLOCK_O": max(1, min(tile // block_d, enough)), "BLOCK_D": block_d}
