"""Routed expert MLPs in Triton for decode sizes: every chosen expert's weights are read once.

Three launches. Routes (a token's choice of an expert) are sorted by expert and cut into blocks of BLOCK_M of one expert.
Then two grouped matrix products: gate and up with their activation, and down. The last one writes each route's own row, so
sums keep one order; the caller weighs and adds a token's K rows, which the compiler fuses with what follows.
Shapes bound the number of blocks; blocks beyond the data return at once.

`expert_backends.routed` calls `route_outputs`; one token has kernels of its own, in `experts_one`.

Shape suffixes: T tokens, D model width, I inner width, E experts, K experts of a token, M = T K routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.activations import gate_constants, gated
from flexgen.runtime.ops.kernels.experts_one import one_token
from flexgen.runtime.ops.kernels.launch import CHAIN, LINE, await_previous, lines, prefetch, processors

if TYPE_CHECKING:
    from flexgen.runtime.ops.expert_backends import ExpertWeights, Gate

_BLOCK_K = 128
_AHEAD = 512
"""Weights of a column of down that are asked for early, in 16 bits 1 KiB."""


@triton.jit(do_not_specialize=["routes", "count", "blocks"])
def _sort_kernel(  # noqa: ANN202
    experts, order, block_expert, block_start, block_rows, routes, count, blocks,  # noqa: ANN001
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program an expert: its routes in order, its blocks, and a share of the idle blocks."""
    expert = tl.program_id(0)
    await_previous()
    route = tl.arange(0, BLOCK_R)
    ids = tl.load(experts + route, mask=route < routes, other=count).to(tl.int32)
    mine = (ids == expert).to(tl.int32)
    before = tl.sum((ids < expert).to(tl.int32), 0)
    rows = tl.sum(mine, 0)
    tl.store(order + before + tl.cumsum(mine, 0) - 1, route, mask=mine > 0)

    e = tl.arange(0, BLOCK_E)
    of_expert = tl.where(e < count, tl.cdiv(tl.histogram(ids, BLOCK_E), BLOCK_M), 0)
    first = tl.sum(tl.where(e < expert, of_expert, 0), 0)
    for n in range(tl.cdiv(rows, BLOCK_M)):
        tl.store(block_expert + first + n, expert)
        tl.store(block_start + first + n, before + n * BLOCK_M)
        tl.store(block_rows + first + n, tl.minimum(rows - n * BLOCK_M, BLOCK_M))
    for idle in range(tl.sum(of_expert, 0) + expert, blocks, count):
        tl.store(block_rows + idle, 0)


@triton.jit
def _gate_up_kernel(  # noqa: ANN202
    x, weight, bias, delta, hidden, experts, order, block_expert, block_start, block_rows,  # noqa: ANN001
    x_t, weight_e, weight_in, weight_out, bias_e,  # noqa: ANN001
    WIDTH: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr, SORTED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr, DELTA: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden[block rows, BLOCK_N columns] = gated(x @ gate, x @ up), rows in sorted order; `delta` (M, J), by route, is added."""
    block = tl.program_id(1)
    await_previous()
    start, rows = block, 1
    if SORTED:
        rows = tl.load(block_rows + block)
        if rows == 0:
            return
        start = tl.load(block_start + block)
        expert = tl.load(block_expert + block).to(tl.int64)
    else:
        expert = tl.load(experts + block).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    if SORTED:
        route = tl.load(order + start + m, mask=m < rows, other=0)
    else:
        route = start + m * 0
    token = route // CHOICES
    k = tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(0) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    weight += expert * weight_e
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for at in range(0, WIDTH, BLOCK_K):
        live_k = at + k < WIDTH
        x_mk = tl.load(
            x + token[:, None].to(tl.int64) * x_t + at + k[None, :],
            mask=(m < rows)[:, None] & live_k[None, :],
            other=0.0,
        )
        if INTERLEAVED:
            w_kn = tl.load(
                weight + (at + k)[:, None] * weight_in + pair[None, :] * weight_out,
                mask=live_k[:, None] & (pair < 2 * INNER)[None, :], other=0.0,
            )  # fmt: skip
            both = tl.dot(x_mk, w_kn, both, input_precision="ieee")
        else:
            mask = live_k[:, None] & (n < INNER)[None, :]
            from_gate = weight + (at + k)[:, None] * weight_in + n[None, :] * weight_out
            gate = tl.dot(x_mk, tl.load(from_gate, mask=mask, other=0.0), gate, input_precision="ieee")
            from_up = from_gate + INNER * weight_out
            up = tl.dot(x_mk, tl.load(from_up, mask=mask, other=0.0), up, input_precision="ieee")
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    first = 2 * n if INTERLEAVED else n
    second = 2 * n + 1 if INTERLEAVED else n + INNER
    if DELTA:
        delta += route[:, None].to(tl.int64) * 2 * INNER
        live = (m < rows)[:, None] & (n < INNER)[None, :]
        gate += tl.load(delta + first[None, :], mask=live, other=0.0).to(tl.float32)
        up += tl.load(delta + second[None, :], mask=live, other=0.0).to(tl.float32)
    if BIAS:
        bias += expert * bias_e
        gate += tl.load(bias + first, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + second, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
    h_mn = gated(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
    to = hidden + (start + m)[:, None].to(tl.int64) * INNER + n[None, :]
    tl.store(to, h_mn.to(hidden.dtype.element_ty), mask=(m < rows)[:, None] & (n < INNER)[None, :])


@triton.jit
def _down_kernel(  # noqa: ANN202
    hidden, weight, bias, out, experts, order, block_expert, block_start, block_rows,  # noqa: ANN001
    weight_e, weight_in, weight_out, bias_e,  # noqa: ANN001
    WIDTH: tl.constexpr, INNER: tl.constexpr, SORTED: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[route, BLOCK_N columns] = hidden @ down, rows back in the order of the routes.

    Which experts there are was written two kernels before and may be read at once, from the L2 cache. AHEAD: weights of each
    column to ask for before the hidden rows are there.
    """
    block = tl.program_id(1)
    start, rows = block, 1
    if SORTED:
        rows = tl.load(block_rows + block, cache_modifier=".cg")
        if rows == 0:
            return
        start = tl.load(block_start + block, cache_modifier=".cg")
        expert = tl.load(block_expert + block, cache_modifier=".cg").to(tl.int64)
    else:
        expert = tl.load(experts + block, cache_modifier=".cg").to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight += expert * weight_e
    if AHEAD > 0:
        columns = tl.minimum(n, WIDTH - 1)[:, None] * weight_out
        prefetch(weight + columns + LINE * tl.arange(0, AHEAD // LINE)[None, :])
    await_previous()
    m = tl.arange(0, BLOCK_M)
    if SORTED:
        route = tl.load(order + start + m, mask=m < rows, other=0)
    else:
        route = start + m * 0
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, INNER, BLOCK_K):
        live_k = at + k < INNER
        from_hidden = hidden + (start + m)[:, None].to(tl.int64) * INNER + at + k[None, :]
        h_mk = tl.load(from_hidden, mask=(m < rows)[:, None] & live_k[None, :], other=0.0)
        from_weight = weight + (at + k)[:, None] * weight_in + n[None, :] * weight_out
        w_kn = tl.load(from_weight, mask=live_k[:, None] & (n < WIDTH)[None, :], other=0.0)
        sums = tl.dot(h_mk, w_kn, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + expert * bias_e + n, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
    to = out + route[:, None].to(tl.int64) * WIDTH + n[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < WIDTH)[None, :])


@dataclass(frozen=True)
class Launch:
    """Block sizes of one call: BLOCK_M routes of one expert, at most `blocks` of them, and columns of each product."""

    block_m: int
    blocks: int
    gate_up_n: int
    down_n: int

    @staticmethod
    def of(
        tokens: int, choices: int, count: int, width: int, inner: int, device: torch.device, layout: str = "out_in"
    ) -> Launch:
        """From shapes alone: blocks that hold an average expert's routes, and columns that still fill the device.

        Of small blocks gate and up take narrow tiles, which leave less of the device idle at the end.
        """
        routes = tokens * choices
        per_expert = routes / count
        block_m = 16 if per_expert <= 12 or tokens <= 16 else 32 if per_expert <= 24 else 64
        blocks = min(routes, routes // block_m + min(count, routes))

        def columns(size: int) -> int:
            enough = 2 * processors(device)
            return next((n for n in (64, 32) if triton.cdiv(size, n) * blocks >= enough), 16)

        narrow = layout == "out_in" and block_m == 16 and tokens >= 8
        return Launch(block_m, blocks, min(32 if narrow else 64, columns(inner)), columns(width))


def _strides(weight: Tensor, layout: str) -> tuple[int, int, int]:
    """Strides of expert, input and output."""
    first, second, third = weight.stride()
    return (first, third, second) if layout == "out_in" else (first, second, third)


def route_outputs(
    x_TD: Tensor, experts_TK: Tensor, weights: ExpertWeights, gate: Gate, launch: Launch | None = None
) -> Tensor:
    """The output of each token's experts: (T, K, D) in x's dtype. `launch`: other block sizes than those of `Launch.of`."""
    (tokens, choices), width, inner = experts_TK.shape, x_TD.shape[1], weights.inner
    if tokens == 1 and weights.layout == "out_in" and launch is None and not weights.adapted:
        return one_token(x_TD.contiguous(), experts_TK.contiguous(), weights, gate)
    count = weights.gate_up.shape[0]
    launch = launch or Launch.of(tokens, choices, count, width, inner, x_TD.device, weights.layout)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    experts_TK = experts_TK.contiguous()
    routes = (experts_TK, *(_sort(experts_TK, count, launch) if tokens > 1 else (experts_TK,) * 4))
    hidden = x_TD.new_empty((tokens * choices, inner))
    out = x_TD.new_empty((tokens, choices, width))
    if not weights.adapted:
        _gate_up(x_TD, hidden, routes, weights, gate, launch)
        _down(hidden, out, routes, weights, launch)
        return out
    token_M = torch.arange(tokens, device=x_TD.device).repeat_interleave(choices, output_size=tokens * choices)
    entries_M = weights.entries(token_M, experts_TK.flatten())
    _gate_up(x_TD, hidden, routes, weights, gate, launch, weights.gate_up_delta(x_TD, entries_M, choices))
    _down(hidden, out, routes, weights, launch)
    if tokens == 1:
        return out + weights.down_delta(hidden, entries_M).view_as(out)
    order_M = routes[1].long()  # hidden lies in sorted order
    out.flatten(0, 1).index_add_(0, order_M, weights.down_delta(hidden, entries_M[order_M]))
    return out


def _gate_up(
    x_TD: Tensor, hidden: Tensor, routes: Sequence[Tensor], weights: ExpertWeights, gate: Gate, launch: Launch,
    delta: Tensor | None = None,
) -> None:  # fmt: skip
    """hidden (M, I): each route's gated product with gate and up, `delta` added to it. `routes`: the experts, and what `_sort`
    says of them."""
    weight, bias, inner = weights.gate_up, weights.gate_up_bias, weights.inner
    tokens, choices = routes[0].shape
    _gate_up_kernel[(triton.cdiv(inner, launch.gate_up_n), launch.blocks)](
        x_TD, weight, x_TD if bias is None else bias, x_TD if delta is None else delta, hidden, *routes,
        x_TD.stride(0), *_strides(weight, weights.layout), 0 if bias is None else bias.stride(0),
        WIDTH=x_TD.shape[1], INNER=inner, CHOICES=choices, SORTED=tokens > 1, INTERLEAVED=weights.interleaved,
        BIAS=bias is not None, DELTA=delta is not None, **gate_constants(gate),
        BLOCK_M=launch.block_m, BLOCK_N=launch.gate_up_n, BLOCK_K=_BLOCK_K,
        num_warps=4, num_stages=4 if launch.gate_up_n <= 32 else 3, **CHAIN,
    )  # fmt: skip


def _down(hidden: Tensor, out: Tensor, routes: Sequence[Tensor], weights: ExpertWeights, launch: Launch) -> None:
    """out (T, K, D): each route's product of `hidden` with down."""
    weight, bias, inner = weights.down, weights.down_bias, weights.inner
    tokens, _, width = out.shape
    _down_kernel[(triton.cdiv(width, launch.down_n), launch.blocks)](
        hidden, weight, hidden if bias is None else bias, out, *routes,
        *_strides(weight, weights.layout), 0 if bias is None else bias.stride(0),
        WIDTH=width, INNER=inner, SORTED=tokens > 1, BIAS=bias is not None,
        AHEAD=lines(inner, _AHEAD) if weights.layout == "out_in" else 0,
        BLOCK_M=launch.block_m, BLOCK_N=launch.down_n, BLOCK_K=_BLOCK_K, num_warps=4, num_stages=4, **CHAIN,
    )  # fmt: skip


def _route_block(routes: int) -> int:
    """A block that holds all routes: of few sizes where they are few, since each is a kernel to compile."""
    return next((block for block in (64, 512) if routes <= block), triton.next_power_of_2(routes))


def _sort(experts_TK: Tensor, count: int, launch: Launch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Routes by expert, and each block's expert, first place in that order, and number of routes."""
    routes = experts_TK.numel()
    order = experts_TK.new_empty(routes, dtype=torch.int32)
    of_block = [experts_TK.new_empty(launch.blocks, dtype=torch.int32) for _ in range(3)]
    _sort_kernel[(count,)](
        experts_TK, order, *of_block, routes, count, launch.blocks,
        BLOCK_M=launch.block_m, BLOCK_R=_route_block(routes), BLOCK_E=triton.next_power_of_2(count + 1),
        num_warps=4, **CHAIN,
    )  # fmt: skip
    return order, of_block[0], of_block[1], of_block[2]
