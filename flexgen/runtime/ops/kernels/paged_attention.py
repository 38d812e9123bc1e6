"""Attention of a step with prompts over paged keys and values, in Triton; `paged_decode` serves steps of one token a row.

A program takes BLOCK_Q neighbouring queries of one row with all query heads of one key/value head, packed into the rows
of a matrix product (FlashAttention's online softmax: Dao et al. 2022, arXiv:2205.14135). Where programs are few, each is
split over its keys and the last part to be ready merges all (Flash-Decoding, Dao et al. 2023). Keys outside the window or
beyond the row are never loaded. Lengths are read on the device; launches depend on shapes alone.

Shape suffixes: T tokens, N query heads, K key/value heads, H head width, P pages, S tokens of a page, R rows, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.launch import CHAIN, arrivals, await_previous, processors

if TYPE_CHECKING:
    from flexgen.runtime.ops.attention import Keys, Scoring

LOG2E = tl.constexpr(1.4426950408889634)

_TILE_BYTES = 16384
_MAX_SPLITS = 32
_LEAST_TILES = 4
"""Fewer tiles of keys are no split of their own: short rows are then not split, and need no merge."""


@triton.jit
def _row_of_block(starts, rows, block, BLOCK_Q: tl.constexpr):  # noqa: ANN001, ANN202
    """The row of query block `block`: row r's blocks begin at starts[r] // BLOCK_Q + r, and gaps are idle blocks."""
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _queries(starts, rows, block, BLOCK_Q: tl.constexpr):  # noqa: ANN001, ANN202
    """Of a query block: its row, the row's first token and number of tokens, and the block's first one among them."""
    row = _row_of_block(starts, rows, block, BLOCK_Q)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    first = (block - (start // BLOCK_Q + row)) * BLOCK_Q
    return row, start, count, first


@triton.jit
def masked_scores(q_mh, k_nh, scale, key, position, live, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr):  # noqa: ANN001, ANN201
    """Logits to base 2 of each query and key, -inf where the key is not visible."""
    scores = tl.dot(q_mh, tl.trans(k_nh), input_precision="ieee") * scale
    if SOFTCAP > 0:
        scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 * scores / SOFTCAP) + 1.0))
    visible = live[None, :] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(visible, scores * LOG2E, float("-inf"))


@triton.jit
def _merge(  # noqa: ANN202
    part_out, part_max, part_sum, at, stride, parts, live_m, mask,  # noqa: ANN001
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The maximum, sum and weighted values of a row's keys, from those of its parts, in their order."""
    h = tl.arange(0, BLOCK_H)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    for part in range(parts):
        of_part = at + part * stride
        most = tl.load(part_max + of_part, mask=live_m, other=float("-inf"), cache_modifier=".cg")
        new_best = tl.maximum(best, most)
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weight = tl.exp2(best - safe), tl.exp2(most - safe)
        total_m = tl.load(part_sum + of_part, mask=live_m, other=0.0, cache_modifier=".cg")
        sums_mh = tl.load(part_out + of_part[:, None] * WIDTH + h[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        total = total * shrink + total_m * weight
        sums = sums * shrink[:, None] + sums_mh * weight[:, None]
        best = new_best
    return best, total, sums


@triton.jit(do_not_specialize=["rows", "tokens", "splits"])
def _attend_kernel(  # noqa: ANN202
    q, k_pages, v_pages, table, starts, lengths, sinks, out, part_out, part_max, part_sum, counts,  # noqa: ANN001
    rows, tokens, splits, scale,  # noqa: ANN001
    q_t, q_n, page_p, page_s, page_k, table_r,  # noqa: ANN001
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    await_previous()
    row, start, count, first = _queries(starts, rows, block, BLOCK_Q)
    if first >= count:
        return
    length = tl.load(lengths + row)

    m = tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    query = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    live_m = (m // GROUP < BLOCK_Q) & (query < count)
    token = (start + query).to(tl.int64)
    stop = tl.minimum(length - count + first + BLOCK_Q, length)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - count + first - WINDOW + 1, 0)
    first_tile = begin // BLOCK_N
    last_tile = tl.cdiv(stop, BLOCK_N)
    part = token * HEADS + head
    working = 1
    if SPLIT:
        tiles = tl.maximum(tl.cdiv(last_tile - first_tile, splits), LEAST)
        working = tl.cdiv(last_tile - first_tile, tiles)
        if split >= working:
            return
        first_tile += split * tiles
        last_tile = tl.minimum(first_tile + tiles, last_tile)
    position = length - count + query
    q_mh = tl.load(
        q + token[:, None] * q_t + head[:, None] * q_n + h[None, :],
        mask=live_m[:, None] & (h < WIDTH)[None, :],
        other=0.0,
    )

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    for tile in range(first_tile, last_tile):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (key >= begin) & (key < stop)
        page = tl.load(table + row * table_r + key // PAGE, mask=live, other=0).to(tl.int64)
        at = page * page_p + (key % PAGE) * page_s + kv_head * page_k
        mask = live[:, None] & (h < WIDTH)[None, :]
        k_nh = tl.load(k_pages + at[:, None] + h[None, :], mask=mask, other=0.0)
        scores = masked_scores(q_mh, k_nh, scale, key, position, live, WINDOW, SOFTCAP)
        new_best = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        v_nh = tl.load(v_pages + at[:, None] + h[None, :], mask=mask, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v_nh.dtype), v_nh, input_precision="ieee")
        best = new_best

    mask = live_m[:, None] & (h < WIDTH)[None, :]
    if working > 1:  # the last split to arrive merges all of them
        size = tokens.to(tl.int64) * HEADS
        mine = split * size + part
        tl.store(part_max + mine, best, mask=live_m)
        tl.store(part_sum + mine, total, mask=live_m)
        tl.store(part_out + mine[:, None] * WIDTH + h[None, :], sums, mask=mask)
        tl.debug_barrier()  # all of this program's part is written before it says so
        arrived = counts + block * tl.num_programs(1) + kv_head
        last = tl.atomic_add(arrived, 1, sem="acq_rel") == working - 1
        parts = tl.where(last, working, 0)
        best, total, sums = _merge(part_out, part_max, part_sum, part, size, parts, live_m, mask, WIDTH, BLOCK_M, BLOCK_H)
        mask = mask & (h < tl.where(last, WIDTH, 0))[None, :]
        if last:
            tl.store(arrived, 0)
    if SINKS:
        sink = tl.load(sinks + head, mask=live_m, other=0.0).to(tl.float32) * LOG2E
        new_best = tl.maximum(best, sink)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.exp2(sink - new_best)
        sums = sums * shrink[:, None]
    o_mh = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + part[:, None] * WIDTH + h[None, :], o_mh.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Launch:
    """Block sizes of one launch: BLOCK_M packed query heads, BLOCK_N keys, programs split up to `splits` ways over keys.

    A split has at least `least` tiles of keys.
    """

    block_m: int
    block_q: int
    block_n: int
    block_h: int
    blocks: int
    splits: int
    warps: int
    least: int = _LEAST_TILES

    @staticmethod
    def of(q_TNH: Tensor, k_pages: Tensor, table_RB: Tensor, window: int | None) -> Launch:
        """From shapes alone. A tile of keys is 16 KiB, so that three stages of K and V leave room for two programs."""
        tokens, heads, width = q_TNH.shape
        _, page_size, kv_heads, _ = k_pages.shape
        rows, group = table_RB.shape[0], heads // kv_heads
        block_h = max(16, triton.next_power_of_2(width))
        block_n = min(128, max(16, _TILE_BYTES // (block_h * k_pages.element_size())))
        block_m = max(min(128, max(16, 16384 // block_h)), triton.next_power_of_2(group))
        block_q = block_m // group
        blocks, warps = tokens // block_q + rows, 8 if block_m * block_h >= 16384 else 4
        most_keys = table_RB.shape[1] * page_size
        if window is not None:
            most_keys = min(most_keys, window + block_q)
        wanted = 2 * processors(q_TNH.device) // (blocks * kv_heads)
        splits = max(1, min(wanted, triton.cdiv(most_keys, block_n), _MAX_SPLITS))
        return Launch(block_m, block_q, block_n, block_h, blocks, splits, warps)


def attend(q_TNH: Tensor, keys: Keys, scoring: Scoring, launch: Launch | None = None) -> Tensor:
    """What `attention.attend` promises, (T, N, H); fp32 softmax and sums. `launch` overrides the sizes, for tuning."""
    k_pages, v_pages, table_RB, window = keys.k_pages, keys.v_pages, keys.table_RB, scoring.window
    if q_TNH.stride(-1) != 1:
        q_TNH = q_TNH.contiguous()
    assert k_pages.stride() == v_pages.stride() and k_pages.stride(-1) == 1
    launch = launch or Launch.of(q_TNH, k_pages, table_RB, window)
    tokens, heads, width = q_TNH.shape
    kv_heads, rows = k_pages.shape[2], table_RB.shape[0]
    out = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    if launch.splits > 1:
        part_out = q_TNH.new_empty((launch.splits, tokens, heads, width), dtype=torch.float32)
        part_max, part_sum = (part_out.new_empty(part_out.shape[:-1]) for _ in range(2))
    else:
        part_out = part_max = part_sum = out
    counts = arrivals(q_TNH.device)
    assert launch.splits == 1 or launch.blocks * kv_heads <= len(counts)
    _attend_kernel[(launch.blocks, kv_heads, launch.splits)](
        q_TNH, k_pages, v_pages, table_RB, keys.starts_R, keys.lengths_R, out if scoring.sinks is None else scoring.sinks, out,
        part_out, part_max, part_sum, counts, rows, tokens, launch.splits, scoring.scale,
        q_TNH.stride(0), q_TNH.stride(1), *k_pages.stride()[:3], table_RB.stride(0),
        HEADS=heads, GROUP=heads // kv_heads, WIDTH=width, PAGE=k_pages.shape[1], WINDOW=window or 0,
        SOFTCAP=scoring.softcap or 0.0, SINKS=scoring.sinks is not None, SPLIT=launch.splits > 1, LEAST=launch.least,
        BLOCK_M=launch.block_m, BLOCK_Q=launch.block_q, BLOCK_N=launch.block_n, BLOCK_H=launch.block_h,
        num_warps=launch.warps, num_stages=3, **CHAIN,
    )  # fmt: skip
    return out
