"""What both attention kernels do with tiles of paged keys: fold them into a query's sums, merge parts, write the result.

The sums of a query are those of FlashAttention's online softmax (Dao et al. 2022, arXiv:2205.14135): `best`, the largest
logit to base 2; `total`, the weights' sum; `sums`, the weighted values; the latter two relative to `best`.

Shape suffixes: m packed query heads of a program, n keys of a tile, h head width.
"""

# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr):
    """The sums over no keys."""
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return best, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_H), tl.float32)


@triton.jit
def alibi_slopes(head, HEADS: tl.constexpr, ALIBI: tl.constexpr, EVEN: tl.constexpr):
    """What ALiBi adds a position for each head, times ALIBI: `attention.alibi_slopes`, EVEN the power of two of heads there."""
    exponent = tl.where(head < EVEN, 8.0 * (head + 1) / EVEN, 4.0 * (2 * (head - EVEN) + 1) / EVEN)
    return tl.exp2(-exponent) * ALIBI


@triton.jit
def fold_tiles(
    best, total, sums, q_mh, k_pages, v_pages, pages_of_row, kv_head, first, last, begin, stop, position, scale,
    page_p, page_s, page_k, slope_m,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums with a row's tiles from `first` to before `last` added.

    Keys from `begin` to before `stop` may be read; a query sees those up to its `position`, within its window and its
    chunk. MASKED: some of the tiles' keys may be out of some query's sight; else all see all. `slope_m` has, with ALIBI, each
    head's bias a position.
    """
    h = tl.arange(0, BLOCK_H)
    for tile in range(first, last):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (key >= begin) & (key < stop)
        if MASKED:
            page = tl.load(pages_of_row + key // PAGE, mask=live, other=0).to(tl.int64)
        else:
            page = tl.load(pages_of_row + key // PAGE).to(tl.int64)
        at_nh = (page * page_p + (key % PAGE) * page_s + kv_head * page_k)[:, None] + h[None, :]
        inside = (h < WIDTH)[None, :]
        if MASKED:
            inside = inside & live[:, None]
        if MASKED or WIDTH < BLOCK_H:
            k_nh = tl.load(k_pages + at_nh, mask=inside, other=0.0)
        else:
            k_nh = tl.load(k_pages + at_nh)
        scores = tl.dot(q_mh, tl.trans(k_nh), input_precision="ieee")
        if SOFTCAP > 0:
            scores = SOFTCAP * (1.0 - 2.0 / (tl.exp(2.0 * (scores * scale) / SOFTCAP) + 1.0))
            base2 = LOG2E
        else:
            base2 = scale * LOG2E
        if ALIBI > 0:
            scores = scores * base2 + slope_m[:, None] * LOG2E * (key[None, :] - position[:, None]).to(tl.float32)
            base2 = 1.0
        if MASKED:
            visible = live[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
            if CHUNK > 0:
                visible = visible & (key[None, :] >= (position // CHUNK * CHUNK)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * base2)
        safe = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
        weights = tl.exp2(scores * base2 - safe[:, None])
        shrink = tl.exp2(best - safe)
        if MASKED or WIDTH < BLOCK_H:
            v_nh = tl.load(v_pages + at_nh, mask=inside, other=0.0)
        else:
            v_nh = tl.load(v_pages + at_nh)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v_nh.dtype), v_nh, sums * shrink[:, None], input_precision="ieee")
        best = new_best
    return best, total, sums


@triton.jit
def store_part(part_out, part_max, part_sum, at_m, live_m, best, total, sums, WIDTH: tl.constexpr):
    """Leave the sums over a part of a row's keys for the program that merges."""
    h = tl.arange(0, sums.shape[1])
    tl.store(part_max + at_m, best, mask=live_m)
    tl.store(part_sum + at_m, total, mask=live_m)
    tl.store(part_out + at_m[:, None] * WIDTH + h[None, :], sums, mask=live_m[:, None] & (h < WIDTH)[None, :])


@triton.jit
def merge_parts(
    part_out, part_max, part_sum, at_m, stride, parts, live_m,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums over all of a row's keys, from those over its parts, in their order (Flash-Decoding, Dao et al. 2023).

    STAGES parts are on their way at once, each as large as `sums`.
    """
    h = tl.arange(0, BLOCK_H)
    mask = live_m[:, None] & (h < WIDTH)[None, :]
    best, total, sums = no_keys(BLOCK_M, BLOCK_H)
    for part in tl.range(parts, num_stages=STAGES):
        at = at_m + part * stride
        most = tl.load(part_max + at, mask=live_m, other=float("-inf"), cache_modifier=".cg")
        total_m = tl.load(part_sum + at, mask=live_m, other=0.0, cache_modifier=".cg")
        sums_mh = tl.load(part_out + at[:, None] * WIDTH + h[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, most)
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weight = tl.exp2(best - safe), tl.exp2(most - safe)
        total = total * shrink + total_m * weight
        sums = sums * shrink[:, None] + sums_mh * weight[:, None]
        best = new_best
    return best, total, sums


@triton.jit
def write(out, sinks, head, at_m, best, total, sums, live_m, WIDTH: tl.constexpr, SINKS: tl.constexpr):
    """The output of each packed query head, from the sums over all its keys."""
    if SINKS:
        sink = tl.load(sinks + head, mask=live_m, other=0.0).to(tl.float32) * LOG2E
        new_best = tl.maximum(best, sink)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.exp2(sink - new_best)
        sums = sums * shrink[:, None]
    o_mh = sums / tl.where(total > 0, total, 1.0)[:, None]
    h = tl.arange(0, sums.shape[1])
    mask = live_m[:, None] & (h < WIDTH)[None, :]
    tl.store(out + at_m[:, None] * WIDTH + h[None, :], o_mh.to(out.dtype.element_ty), mask=mask)
