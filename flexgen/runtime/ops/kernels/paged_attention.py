"""Attention of a step with prompts over paged keys and values, in Triton; `paged_decode` serves steps of one token a row.

A program takes BLOCK_Q neighbouring queries of one row with all query heads of one key/value head, packed into the rows
of a matrix product; `paged_tiles` has the arithmetic. Where programs are few, each is split over its keys and the last part
to be ready merges all. Keys outside the window or beyond the row are never loaded. Lengths are read on the device; launches
depend on shapes alone.

Shape suffixes: T tokens, N query heads, K key/value heads, H head width, P pages, S tokens of a page, R rows, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.launch import CHAIN, arrivals, await_previous, processors, shared_memory
from flexgen.runtime.ops.kernels.paged_tiles import alibi_slopes, fold_tiles, merge_parts, no_keys, store_part, write

if TYPE_CHECKING:
    from flexgen.runtime.ops.attention import Keys, Scoring

_TILE_BYTES, _ROOM = 32768, 200_000
"""Of a tile of keys: a few of them and of values, and twice as many bytes of queries, fill `_ROOM` bytes of shared memory.
Where there is less, a tile is half as large."""

_NARROW = 256
"""Up to such a window, large tiles would mostly hold keys out of sight."""

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


@triton.jit(do_not_specialize=["rows", "tokens", "splits"])
def _attend_kernel(  # noqa: ANN202
    q, k_pages, v_pages, table, starts, lengths, sinks, out, part_out, part_max, part_sum, counts,  # noqa: ANN001
    rows, tokens, splits, scale,  # noqa: ANN001
    q_t, q_n, page_p, page_s, page_k, table_r,  # noqa: ANN001
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, ALIBI: tl.constexpr, EVEN: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    block, kv_head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)  # long rows first
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

    slope_m = alibi_slopes(head, HEADS, ALIBI, EVEN)
    best, total, sums = no_keys(BLOCK_M, BLOCK_H)
    # tiles that are in sight of all these queries need no mask; at the window's edge and at the diagonal lie others
    full_to = tl.minimum(tl.maximum((length - count + first + 1) // BLOCK_N, first_tile), last_tile)
    full_from = first_tile
    if WINDOW > 0:
        full_from = tl.cdiv(tl.maximum(stop - WINDOW, 0), BLOCK_N)
        full_from = tl.minimum(tl.maximum(full_from, first_tile), last_tile)
        full_to = tl.maximum(full_to, full_from)
        if CHUNK > 0:  # a chunk may begin in any tile
            full_to = full_from
        best, total, sums = fold_tiles(
            best, total, sums, q_mh, k_pages, v_pages, table + row * table_r, kv_head, first_tile, full_from, begin, stop,
            position, scale, page_p, page_s, page_k, slope_m, WIDTH, PAGE, WINDOW, CHUNK, ALIBI, SOFTCAP, BLOCK_N, BLOCK_H,
            MASKED=True,
        )  # fmt: skip
    best, total, sums = fold_tiles(
        best, total, sums, q_mh, k_pages, v_pages, table + row * table_r, kv_head, full_from, full_to, begin, stop,
        position, scale, page_p, page_s, page_k, slope_m, WIDTH, PAGE, WINDOW, CHUNK, ALIBI, SOFTCAP, BLOCK_N, BLOCK_H,
        MASKED=False,
    )  # fmt: skip
    best, total, sums = fold_tiles(
        best, total, sums, q_mh, k_pages, v_pages, table + row * table_r, kv_head, full_to, last_tile, begin, stop,
        position, scale, page_p, page_s, page_k, slope_m, WIDTH, PAGE, WINDOW, CHUNK, ALIBI, SOFTCAP, BLOCK_N, BLOCK_H,
        MASKED=True,
    )  # fmt: skip

    if working == 1:
        write(out, sinks, head, part, best, total, sums, live_m, WIDTH, SINKS)
    else:  # the last split to arrive merges all of them
        size = tokens.to(tl.int64) * HEADS
        store_part(part_out, part_max, part_sum, split * size + part, live_m, best, total, sums, WIDTH)
        tl.debug_barrier()  # all of this program's part is written before it says so
        arrived = counts + block * tl.num_programs(1) + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == working - 1:
            tl.store(arrived, 0)
            best, total, sums = merge_parts(part_out, part_max, part_sum, part, size, working, live_m, WIDTH, BLOCK_M, BLOCK_H, STAGES=1)
            write(out, sinks, head, part, best, total, sums, live_m, WIDTH, SINKS)


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
    stages: int
    least: int = _LEAST_TILES

    @staticmethod
    def of(q_TNH: Tensor, k_pages: Tensor, table_RB: Tensor, window: int | None) -> Launch:
        """From shapes alone; sizes are those that were fastest on an H200 (benchmarks/KERNELS.md)."""
        tokens, heads, width = q_TNH.shape
        _, page_size, kv_heads, _ = k_pages.shape
        rows, group = table_RB.shape[0], heads // kv_heads
        block_h = max(16, triton.next_power_of_2(width))
        row_bytes = block_h * k_pages.element_size()
        tile_bytes = _TILE_BYTES if shared_memory(q_TNH.device) >= _ROOM else _TILE_BYTES // 2
        block_n = min(128 if window is None or window > _NARROW else 64, max(16, tile_bytes // row_bytes))
        block_m = max(min(128, max(16, 2 * tile_bytes // row_bytes)), triton.next_power_of_2(group))
        block_q = block_m // group
        blocks, warps, stages = tokens // block_q + rows, 8 if block_h > 64 else 4, 3 if row_bytes <= 256 else 2
        most_keys = table_RB.shape[1] * page_size
        if window is not None:
            most_keys = min(most_keys, window + block_q)
        wanted = 2 * processors(q_TNH.device) // (blocks * kv_heads)
        splits = max(1, min(wanted, triton.cdiv(most_keys, block_n), _MAX_SPLITS))
        return Launch(block_m, block_q, block_n, block_h, blocks, splits, warps, stages)


def attend(q_TNH: Tensor, keys: Keys, scoring: Scoring, launch: Launch | None = None) -> Tensor:
    """What `attention.attend` promises, (T, N, H); fp32 softmax and sums. `launch` overrides the sizes, for tuning."""
    k_pages, v_pages, table_RB, window = keys.k_pages, keys.v_pages, keys.table_RB, scoring.reach
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
        CHUNK=scoring.chunk or 0, ALIBI=scoring.alibi or 0.0, EVEN=2 ** (heads.bit_length() - 1),
        SOFTCAP=scoring.softcap or 0.0, SINKS=scoring.sinks is not None, SPLIT=launch.splits > 1, LEAST=launch.least,
        BLOCK_M=launch.block_m, BLOCK_Q=launch.block_q, BLOCK_N=launch.block_n, BLOCK_H=launch.block_h,
        num_warps=launch.warps, num_stages=launch.stages, **CHAIN,
    )  # fmt: skip
    return out
