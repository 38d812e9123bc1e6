"""Attention of a decode step in Triton: one query a row over its pages, the keys of all rows split evenly among programs.

How long each row is stands on the device alone, so a kernel first plans the split, once a step. Long rows go end to end into
a queue, whose tiles are cut into runs of one length, a program each (as Stream-K cuts matrix products: Osama et al. 2023,
arXiv:2301.03598); of a row that several programs share, the last one to be ready merges the parts (Flash-Decoding, Dao et
al. 2023). Short rows have a program each. So no row paces the others, and a launch's size depends on shapes alone. `plan` is
called by what makes a step's tables, `attend` by `attention.attend`.

Shape suffixes: R rows, N query heads, K key/value heads, H head width, P pages, S tokens of a page, B blocks, G programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.launch import CHAIN, arrivals, await_previous, processors
from flexgen.runtime.ops.kernels.paged_tiles import alibi_slopes, fold_tiles, merge_parts, no_keys, store_part, write

if TYPE_CHECKING:
    from flexgen.runtime.ops.attention import Keys, Scoring

_RUN = tl.constexpr(6)
"""Numbers of a program: the place in the queue that it begins at, its row and the row's length, the tile of that row, the
tiles of all rows before it, and the tiles of its run."""

_QUEUED = tl.constexpr(2)
"""Numbers of a place in the queue: a row, and its length."""

_LEAST_TILES = 4
"""Fewer tiles are no run of their own: short rows are then not shared, and need no merge."""

_MOST_PARTS = 64
"""Of a row: the last program merges them all."""


@dataclass(frozen=True)
class Split:
    """How a decode step's keys are split, from shapes alone.

    tile      keys of a tile
    programs  of each key/value head that share the queue: as many as run at once
    alone     whether short rows have a launch of their own, which pays where rows alone keep the device busy
    queued    whether a row can be too long for that
    stages    tiles on their way to a program
    registers of a thread, so that all those programs do run at once
    """

    tile: int
    programs: int
    alone: bool
    queued: bool
    stages: int
    registers: int

    @staticmethod
    def of(rows: int, keys: int, kv_heads: int, width: int, itemsize: int, window: int | None, device: torch.device) -> Split:
        """For `rows` of at most `keys` keys. Tiles are as large as shared memory holds of two or three programs' (measured)."""
        block = _block(width)
        tile_bytes, resident, stages = (32768, 2, 2) if block > 128 else (16384, 3, 3)
        tile = min(128, max(16, tile_bytes // (block * itemsize)))
        most = triton.cdiv(keys if window is None else min(keys, window + tile), tile)
        together = resident * processors(device) // kv_heads
        queued = most > 2 * _LEAST_TILES
        alone = not queued or rows * kv_heads >= processors(device)
        programs = min(together, rows * triton.cdiv(most, _LEAST_TILES))
        return Split(tile, max(1, programs), alone, queued, stages, registers=168 if resident == 3 else 255)

    def size(self, rows: int) -> int:
        """Numbers of a plan: runs, queue, how many rows are queued, and the tiles of the longest row that is not."""
        return _RUN.value * self.programs + _QUEUED.value * rows + 2


@triton.jit(do_not_specialize=["rows", "programs"])
def _plan_kernel(  # noqa: ANN202
    lengths, plan, rows, programs,  # noqa: ANN001
    WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, ALONE: tl.constexpr,
    RUN: tl.constexpr, QUEUED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    await_previous()
    r = tl.arange(0, BLOCK_R)
    length = tl.load(lengths + r, mask=r < rows, other=0)
    tiles = tl.cdiv(length, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    even = tl.cdiv(tl.sum(tiles), programs)
    fair = even + even // 4 + LEAST // 2  # a row that takes no more than about an even share paces nobody
    short = fair if ALONE else 0
    tiles = tl.where(tiles > short, tiles, 0)
    is_queued = (tiles > 0) & (r < rows)
    place = tl.cumsum(is_queued.to(tl.int32)) - is_queued.to(tl.int32)
    queued = tl.sum(is_queued.to(tl.int32))
    queue = plan + programs * RUN
    tl.store(queue + place * QUEUED, r, mask=is_queued)
    tl.store(queue + place * QUEUED + 1, length, mask=is_queued)
    tl.store(queue + rows * QUEUED, queued)
    tl.store(queue + rows * QUEUED + 1, short)

    total = tl.sum(tiles)
    run = tl.maximum(tl.cdiv(total, programs), tl.maximum(tl.cdiv(tl.max(tiles), MOST), LEAST))
    stop = tl.cumsum(tiles)
    start = stop - tiles
    is_whole = (tl.max(tiles) <= fair) & (rows <= programs)  # then each row has a program of the queue's
    begin = tl.where(is_whole, place, tl.cdiv(start, run))
    count = tl.where(is_queued, tl.where(is_whole, 1, tl.cdiv(stop, run) - begin), 0)
    for part in range(tl.max(count)):
        mask = part < count
        at = plan + (begin + part) * RUN
        tl.store(at, place, mask=mask)
        tl.store(at + 1, r, mask=mask)
        tl.store(at + 2, length, mask=mask)
        tl.store(at + 3, tl.where(is_whole, 0, (begin + part) * run - start), mask=mask)
        tl.store(at + 4, tl.where(is_whole, 0, start), mask=mask)
        tl.store(at + 5, tl.where(is_whole, tiles, run), mask=mask)
    g = tl.arange(0, BLOCK_G)
    idle = (g >= tl.where(is_whole, queued, tl.cdiv(total, run))) & (g < programs)
    tl.store(plan + g * RUN, tl.zeros_like(g) + queued, mask=idle)  # the end of the queue


def plan(lengths_R: Tensor, split: Split, window: int | None) -> Tensor:
    """The split of rows with `lengths_R` tokens each, the query's own included: `split.size` numbers, int32; unset where no
    row can be queued."""
    rows = len(lengths_R)
    made = lengths_R.new_empty(split.size(rows), dtype=torch.int32)
    if not split.queued:
        return made
    _plan_kernel[(1,)](
        lengths_R, made, rows, split.programs,
        WINDOW=window or 0, TILE=split.tile, LEAST=_LEAST_TILES, MOST=_MOST_PARTS, ALONE=split.alone, RUN=_RUN, QUEUED=_QUEUED,
        BLOCK_R=triton.next_power_of_2(rows), BLOCK_G=triton.next_power_of_2(split.programs), num_warps=4, **CHAIN,
    )  # fmt: skip
    return made


@triton.jit
def _attend(  # noqa: ANN202
    q, k_pages, v_pages, table, row, length, begin, first, last, head, mask, scale,  # noqa: ANN001
    q_t, q_n, page_p, page_s, page_k, table_r, kv_head, slope_m,  # noqa: ANN001
    WIDTH: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The maximum, sum and weighted values of a row's keys in the tiles from `first` to before `last`."""
    h = tl.arange(0, BLOCK_H)
    q_mh = tl.load(q + row.to(tl.int64) * q_t + head[:, None] * q_n + h[None, :], mask=mask, other=0.0)
    position = tl.zeros((BLOCK_M,), tl.int32) + (length - 1)
    best, total, sums = no_keys(BLOCK_M, BLOCK_H)
    return fold_tiles(
        best, total, sums, q_mh, k_pages, v_pages, table + row * table_r, kv_head, first, last, begin, length, position, scale,
        page_p, page_s, page_k, slope_m, WIDTH, PAGE, WINDOW, CHUNK, ALIBI, SOFTCAP, BLOCK_N, BLOCK_H, MASKED=True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "programs"])
def _short_kernel(  # noqa: ANN202
    q, k_pages, v_pages, table, lengths, plan, sinks, out, rows, programs, scale,  # noqa: ANN001
    q_t, q_n, page_p, page_s, page_k, table_r,  # noqa: ANN001
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, ALIBI: tl.constexpr, EVEN: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, RUN: tl.constexpr, QUEUED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Rows that are not queued, a program each."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    await_previous()
    length = tl.load(lengths + row)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    first, last = begin // BLOCK_N, tl.cdiv(length, BLOCK_N)
    if not ALL:  # noqa: SIM102
        if last - first > tl.load(plan + programs * RUN + rows * QUEUED + 1):
            return
    m = tl.arange(0, BLOCK_M)
    head, live_m = kv_head * GROUP + m, m < GROUP
    slope_m = alibi_slopes(head, HEADS, ALIBI, EVEN)
    mask = live_m[:, None] & (tl.arange(0, BLOCK_H) < WIDTH)[None, :]
    best, total, sums = _attend(
        q, k_pages, v_pages, table, row, length, begin, first, last, head, mask, scale,
        q_t, q_n, page_p, page_s, page_k, table_r, kv_head, slope_m, WIDTH, PAGE, WINDOW, CHUNK, ALIBI, SOFTCAP, BLOCK_M, BLOCK_N,
        BLOCK_H,
    )  # fmt: skip
    write(out, sinks, head, row.to(tl.int64) * HEADS + head, best, total, sums, live_m, WIDTH, SINKS)


@triton.jit(do_not_specialize=["rows", "programs"])
def _queue_kernel(  # noqa: ANN202
    q, k_pages, v_pages, table, plan, sinks, out, part_out, part_max, part_sum, counts, rows, programs, scale,  # noqa: ANN001
    q_t, q_n, page_p, page_s, page_k, table_r,  # noqa: ANN001
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, ALIBI: tl.constexpr, EVEN: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, RUN: tl.constexpr, QUEUED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One run of the queue's tiles."""
    program, kv_head = tl.program_id(0), tl.program_id(1)
    mine, queue = plan + program * RUN, plan + programs * RUN
    if ALONE:  # the kernel before this one is that of the short rows: the plan is there, and mostly says that all is done
        queued = tl.load(queue + rows * QUEUED, cache_modifier=".cg")
        await_previous()
        if queued == 0:
            return
    else:
        await_previous()
        queued = tl.load(queue + rows * QUEUED)
    place, row, length = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2)
    offset, before, run = tl.load(mine + 3), tl.load(mine + 4), tl.load(mine + 5)
    m = tl.arange(0, BLOCK_M)
    head, live_m = kv_head * GROUP + m, m < GROUP
    slope_m = alibi_slopes(head, HEADS, ALIBI, EVEN)
    mask = live_m[:, None] & (tl.arange(0, BLOCK_H) < WIDTH)[None, :]
    left = run
    while (left > 0) & (place < queued):
        is_there = place + 1 < queued
        next_row = tl.load(queue + (place + 1) * QUEUED, mask=is_there, other=0)
        next_length = tl.load(queue + (place + 1) * QUEUED + 1, mask=is_there, other=1)
        begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
        first = begin // BLOCK_N
        tiles = tl.cdiv(length, BLOCK_N) - first
        taken = tl.minimum(left, tiles - offset)
        best, total, sums = _attend(
            q, k_pages, v_pages, table, row, length, begin, first + offset, first + offset + taken, head, mask, scale,
            q_t, q_n, page_p, page_s, page_k, table_r, kv_head, slope_m, WIDTH, PAGE, WINDOW, CHUNK, ALIBI, SOFTCAP, BLOCK_M, BLOCK_N,
        BLOCK_H,
        )  # fmt: skip
        opening = before // run  # the program that begins the row
        parts = (before + tiles - 1) // run - opening + 1
        if parts > 1:  # the last of its programs to arrive merges all of them
            at_m = (program + place).to(tl.int64) * HEADS + head
            store_part(part_out, part_max, part_sum, at_m, live_m, best, total, sums, WIDTH)
            tl.debug_barrier()  # all of this program's part is written before it says so
            arrived = counts + place * tl.num_programs(1) + kv_head
            if tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
                tl.store(arrived, 0)
                at_m = (opening + place).to(tl.int64) * HEADS + head
                best, total, sums = merge_parts(part_out, part_max, part_sum, at_m, HEADS, parts, live_m, WIDTH, BLOCK_M, BLOCK_H, STAGES=3)
                write(out, sinks, head, row.to(tl.int64) * HEADS + head, best, total, sums, live_m, WIDTH, SINKS)
        else:
            write(out, sinks, head, row.to(tl.int64) * HEADS + head, best, total, sums, live_m, WIDTH, SINKS)
        left -= taken
        before += tiles
        offset = offset * 0
        place += 1
        row, length = next_row, next_length


def attend(q_RNH: Tensor, keys: Keys, scoring: Scoring) -> Tensor:
    """What `attention.attend` promises of a decode step, (R, N, H); fp32 softmax and sums."""
    k_pages, v_pages, table_RB, window = keys.k_pages, keys.v_pages, keys.table_RB, scoring.reach
    (rows, heads, width), (_, page_size, kv_heads, _) = q_RNH.shape, k_pages.shape
    keys_of_row, device = table_RB.shape[1] * page_size, q_RNH.device
    split = Split.of(rows, keys_of_row, kv_heads, width, k_pages.element_size(), window, device)
    planned = plan(keys.lengths_R, split, window) if keys.split is None else keys.split
    assert len(planned) == split.size(rows)
    if q_RNH.stride(-1) != 1:
        q_RNH = q_RNH.contiguous()
    assert k_pages.stride() == v_pages.stride() and k_pages.stride(-1) == 1
    out = torch.empty(q_RNH.shape, dtype=q_RNH.dtype, device=device)
    part_out = q_RNH.new_empty((rows + split.programs, heads, width), dtype=torch.float32)
    part_max, part_sum = (part_out.new_empty(part_out.shape[:2]) for _ in range(2))
    counts = arrivals(device)
    assert rows * kv_heads <= len(counts)
    strides = (q_RNH.stride(0), q_RNH.stride(1), *k_pages.stride()[:3], table_RB.stride(0))
    sizes = dict(
        HEADS=heads, GROUP=heads // kv_heads, WIDTH=width, PAGE=page_size, WINDOW=window or 0, CHUNK=scoring.chunk or 0,
        ALIBI=scoring.alibi or 0.0, EVEN=2 ** (heads.bit_length() - 1), SOFTCAP=scoring.softcap or 0.0,
        SINKS=scoring.sinks is not None, RUN=_RUN, QUEUED=_QUEUED, BLOCK_M=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_N=split.tile, BLOCK_H=_block(width), num_warps=4, num_stages=split.stages, **CHAIN,
    )  # fmt: skip
    sinks = out if scoring.sinks is None else scoring.sinks
    if split.alone:
        _short_kernel[(rows, kv_heads)](
            q_RNH, k_pages, v_pages, table_RB, keys.lengths_R, planned, sinks, out, rows, split.programs, scoring.scale,
            *strides, **sizes, ALL=not split.queued,
        )  # fmt: skip
    if not split.queued:
        return out
    _queue_kernel[(split.programs, kv_heads)](
        q_RNH, k_pages, v_pages, table_RB, planned, sinks, out, part_out, part_max, part_sum, counts, rows, split.programs,
        scoring.scale,
        *strides, **sizes, ALONE=split.alone, maxnreg=split.registers,
    )  # fmt: skip
    return out


def _block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))
