"""Routed expert MLPs in Triton for decode sizes: every chosen expert's weights are read once.

Three launches. Routes (a token's choice of an expert) are sorted by expert and cut into blocks of BLOCK_M of one expert.
Then two grouped matrix products: gate and up with their activation, and down. The last one writes each route's own row, so
sums keep one order; the caller weighs and adds a token's K rows, which the compiler fuses with what follows.
Shapes bound the number of blocks; blocks beyond the data return at once.

For many tokens torch has grouped products; what comes after each of the two, `gated` and `placed`, is here.

Shape suffixes: T tokens, D model width, I inner width, E experts, K experts of a token, M = T K routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.activations import activate
from flexgen.runtime.ops.kernels.launch import CHAIN, LINE, await_previous, lines, prefetch, processors

_BLOCK_K = 128
_AHEAD = 512
"""Weights of a column of down that are asked for early, in 16 bits 1 KiB."""
_ROWS = 4
"""Rows of a program that moves them."""


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
def _activate(gate, ACT: tl.constexpr, ALPHA: tl.constexpr):  # noqa: ANN001, ANN202
    if ALPHA is not None:
        return gate * tl.sigmoid(ALPHA * gate)
    return activate(gate, ACT)


@triton.jit
def _gated(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):  # noqa: ANN001, ANN202
    """`moe.Gate` of fp32 numbers."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + UP_OFFSET) * _activate(gate, ACT, ALPHA)


@triton.jit
def _gate_up_kernel(  # noqa: ANN202
    x, weight, bias, hidden, experts, order, block_expert, block_start, block_rows,  # noqa: ANN001
    x_t, weight_e, weight_in, weight_out, bias_e,  # noqa: ANN001
    WIDTH: tl.constexpr, INNER: tl.constexpr, CHOICES: tl.constexpr, SORTED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """hidden[block rows, BLOCK_N columns] = gated(x @ gate, x @ up), rows in sorted order."""
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
        token = tl.load(order + start + m, mask=m < rows, other=0) // CHOICES
    else:
        token = (start + m * 0) // CHOICES
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
    if BIAS:
        bias += expert * bias_e
        first = 2 * n if INTERLEAVED else n
        second = 2 * n + 1 if INTERLEAVED else n + INNER
        gate += tl.load(bias + first, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + second, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
    h_mn = _gated(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
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


@triton.jit
def _gate_up_one_kernel(  # noqa: ANN202
    x, weight, bias, hidden, experts, weight_e, weight_out, bias_e,  # noqa: ANN001
    WIDTH: tl.constexpr, INNER: tl.constexpr, INTERLEAVED: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_gate_up_kernel` for one token and weights with contiguous rows: products without a tile of idle rows."""
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
    h_n = _gated(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
    tl.store(hidden + route * INNER + n, h_n.to(hidden.dtype.element_ty), mask=live)


@triton.jit
def _down_one_kernel(  # noqa: ANN202
    hidden, weight, bias, out, experts, weight_e, weight_out, bias_e,  # noqa: ANN001
    WIDTH: tl.constexpr, INNER: tl.constexpr, BIAS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_down_kernel` for one token and weights with contiguous rows."""
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
    x_TD: Tensor,
    experts_TK: Tensor,
    *,
    gate_up: Tensor,
    down: Tensor,
    layout: str,
    interleaved: bool,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    act: str,
    alpha: float | None,
    limit: float | None,
    up_offset: float,
    launch: Launch | None = None,
) -> Tensor:
    """The output of each token's experts: (T, K, D) in x's dtype. Arguments as in `moe.experts`."""
    (tokens, choices), width, count = experts_TK.shape, x_TD.shape[1], gate_up.shape[0]
    inner, routes = down.shape[2 if layout == "out_in" else 1], tokens * choices
    if tokens == 1 and layout == "out_in" and launch is None:
        return _one_token(
            x_TD.contiguous(), experts_TK.contiguous(), gate_up, down, inner,
            gate_up_bias, down_bias, {"ACT": act, "ALPHA": alpha, "LIMIT": limit, "UP_OFFSET": up_offset},
            interleaved,
        )  # fmt: skip
    launch = launch or Launch.of(tokens, choices, count, width, inner, x_TD.device, layout)
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    experts_TK = experts_TK.contiguous()
    is_sorted = tokens > 1
    order, *of_block = _sort(experts_TK, count, launch) if is_sorted else (experts_TK,) * 4
    hidden = x_TD.new_empty((routes, inner))
    out = x_TD.new_empty((tokens, choices, width))
    shared = {"WIDTH": width, "INNER": inner, "SORTED": is_sorted, "BLOCK_M": launch.block_m, "BLOCK_K": _BLOCK_K}
    _gate_up_kernel[(triton.cdiv(inner, launch.gate_up_n), launch.blocks)](
        x_TD, gate_up, x_TD if gate_up_bias is None else gate_up_bias, hidden, experts_TK, order, *of_block,
        x_TD.stride(0), *_strides(gate_up, layout), 0 if gate_up_bias is None else gate_up_bias.stride(0),
        **shared, CHOICES=choices, INTERLEAVED=interleaved, BIAS=gate_up_bias is not None, BLOCK_N=launch.gate_up_n,
        ACT=act, ALPHA=alpha, LIMIT=limit, UP_OFFSET=up_offset,
        num_warps=4, num_stages=4 if launch.gate_up_n <= 32 else 3, **CHAIN,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(width, launch.down_n), launch.blocks)](
        hidden, down, x_TD if down_bias is None else down_bias, out, experts_TK, order, *of_block,
        *_strides(down, layout), 0 if down_bias is None else down_bias.stride(0),
        **shared, BIAS=down_bias is not None, BLOCK_N=launch.down_n,
        AHEAD=lines(inner, _AHEAD) if layout == "out_in" else 0, num_warps=4, num_stages=4, **CHAIN,
    )  # fmt: skip
    return out


def _one_token(
    x_1D: Tensor,
    experts_1K: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: int,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate: dict[str, Any],
    interleaved: bool,
) -> Tensor:
    """`route_outputs` of one token, where rows of the weights are contiguous."""
    assert gate_up.stride(2) == 1 and down.stride(2) == 1
    choices, width, device = experts_1K.shape[1], x_1D.shape[1], x_1D.device
    hidden = x_1D.new_empty((choices, inner))
    out = x_1D.new_empty((1, choices, width))
    sizes = _one_blocks(choices * inner, width, device, tile=4096)
    _gate_up_one_kernel[(triton.cdiv(inner, sizes["BLOCK_O"]), choices)](
        x_1D, gate_up, x_1D if gate_up_bias is None else gate_up_bias, hidden, experts_1K,
        *gate_up.stride()[:2], 0 if gate_up_bias is None else gate_up_bias.stride(0),
        WIDTH=width, INNER=inner, INTERLEAVED=interleaved, BIAS=gate_up_bias is not None, **gate, **sizes, num_warps=4, **CHAIN,
    )  # fmt: skip
    sizes = _one_blocks(choices * width, inner, device, tile=8192)
    _down_one_kernel[(triton.cdiv(width, sizes["BLOCK_O"]), choices)](
        hidden, down, x_1D if down_bias is None else down_bias, out, experts_1K,
        *down.stride()[:2], 0 if down_bias is None else down_bias.stride(0),
        WIDTH=width, INNER=inner, BIAS=down_bias is not None, **sizes, num_warps=4, **CHAIN,
    )  # fmt: skip
    return out


def _one_blocks(rows: int, width: int, device: torch.device, tile: int) -> dict[str, int]:
    """BLOCK_O weight rows and BLOCK_D features of a program: a tile, or less where two a multiprocessor need work."""
    block_d = min(tile, triton.next_power_of_2(width))
    enough = triton.next_power_of_2(rows // (2 * processors(device)) + 1) // 2
    return {"BLOCK_O": max(1, min(tile // block_d, enough)), "BLOCK_D": block_d}


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
    return (order, *of_block)


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
    h_mn = _gated(gate, up, ACT, ALPHA, LIMIT, UP_OFFSET)
    tl.store(out + route * INNER + n[None, :], h_mn.to(out.dtype.element_ty), mask=mask)


def gated(
    h_MJ: Tensor,
    experts_M: Tensor,
    bias: Tensor | None,
    interleaved: bool,
    act: str,
    alpha: float | None,
    limit: float | None,
    up_offset: float,
) -> Tensor:
    """(M, 2I) products of sorted routes -> (M, I): the bias of their experts, if any, and the gate, in fp32."""
    assert h_MJ.is_contiguous() and (bias is None or bias.stride(1) == 1)
    rows, inner = h_MJ.shape[0], h_MJ.shape[1] // 2
    out = h_MJ.new_empty((rows, inner))
    block_m, block_n = _ROWS, min(1024, triton.next_power_of_2(inner))
    _gate_kernel[(triton.cdiv(rows, block_m), triton.cdiv(inner, block_n))](
        h_MJ, h_MJ if bias is None else bias, experts_M, out, rows, 0 if bias is None else bias.stride(0),
        INNER=inner, INTERLEAVED=interleaved, BIAS=bias is not None, ACT=act, ALPHA=alpha, LIMIT=limit,
        UP_OFFSET=up_offset, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, **CHAIN,
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
