"""The last stage of sampling in Triton: each logit is read twice, and nothing of the vocabulary's width is written.

Three launches: every tile of a row gives its maximum, sum and best draw; a program a row merges them into a token and its
logprob; then tiles count the logits above the token's. Noise is that of `randoms`, made in registers.

Shape suffixes: R rows, V vocabulary, W tiles of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.launch import CHAIN, await_previous

_TILE = 4096
_MULTIPLIER = tl.constexpr(0xD256D193)
_WEYL = tl.constexpr(0x9E3779B9)


@triton.jit
def _philox(low, high, key, ROUNDS: tl.constexpr):  # noqa: ANN001, ANN202
    """`randoms.philox2x32` on uint32."""
    multiplier = tl.full((), _MULTIPLIER, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        new_low = tl.umulhi(low, multiplier) ^ key ^ high
        high = low * multiplier
        low = new_low
        key = key + tl.full((), _WEYL, tl.uint32)
    return low, high


@triton.jit
def _log_noise(seed, position, ids):  # noqa: ANN001, ANN202
    """The logarithm of `randoms.exponential_noise` for vocabulary ids of one row."""
    seed_low, seed_high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    stream, key = _philox((position & 0xFFFFFFFF).to(tl.uint32), seed_high, seed_low, 10)
    even, odd = _philox((ids // 2).to(tl.uint32), stream + tl.zeros_like(ids).to(tl.uint32), key, 7)
    word = tl.where(ids % 2 == 0, even, odd)
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-08)
    rest = 1.0 - uniform
    # log1p(-u) from log(1 - u): the quotient undoes the rounding of 1 - u (W. Kahan).
    log1p = tl.where(rest == 1.0, -uniform, tl.log(rest) * (-uniform / (rest - 1.0)))
    return tl.log(-log1p)


@triton.jit
def _load(logits, row, ids, stride, real, temperature, DIVIDE: tl.constexpr):  # noqa: ANN001, ANN202
    x = tl.load(logits + row * stride + ids, mask=ids < real, other=float("-inf")).to(tl.float32)
    if DIVIDE:
        x = x / tl.where(temperature > 0, temperature, 1.0)
    return x


@triton.jit(do_not_specialize=["real"])
def _tile_kernel(  # noqa: ANN202
    logits, temperatures, seeds, lengths, maxima, sums, first, scores, drawn,  # noqa: ANN001
    stride, temperature_r, seed_r, real, tiles,  # noqa: ANN001
    RANDOM: tl.constexpr, DIVIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_previous()
    ids = tile * TILE + tl.arange(0, TILE)
    temperature = tl.load(temperatures + row * temperature_r)
    x = _load(logits, row, ids, stride, real, temperature, DIVIDE)
    best, at = tl.max(x, 0, return_indices=True)
    to = row * tiles + tile
    tl.store(maxima + to, best)
    tl.store(first + to, tile * TILE + at)
    tl.store(sums + to, tl.sum(tl.exp(x - tl.where(best == float("-inf"), 0.0, best)), 0))
    if RANDOM:
        score = x - _log_noise(tl.load(seeds + row * seed_r), tl.load(lengths + row), ids)
        best, at = tl.max(score, 0, return_indices=True)
        tl.store(scores + to, best)
        tl.store(drawn + to, tile * TILE + at)


@triton.jit(do_not_specialize=["real"])
def _row_kernel(  # noqa: ANN202
    logits, temperatures, maxima, sums, first, scores, drawn, tokens, logprobs, chosen, totals, ranks,  # noqa: ANN001
    stride, temperature_r, real, tiles,  # noqa: ANN001
    RANDOM: tl.constexpr, DIVIDE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    await_previous()
    tile = tl.arange(0, BLOCK_W)
    live = tile < tiles
    at = row * tiles + tile
    most = tl.load(maxima + at, mask=live, other=float("-inf"))
    best, winner = tl.max(most, 0, return_indices=True)
    token = tl.load(first + row * tiles + winner)
    safe = tl.where(best == float("-inf"), 0.0, best)
    total = safe + tl.log(tl.sum(tl.load(sums + at, mask=live, other=0.0) * tl.exp(most - safe), 0))
    temperature = tl.load(temperatures + row * temperature_r)
    if RANDOM:
        score = tl.load(scores + at, mask=live, other=float("-inf"))
        winner = tl.max(score, 0, return_indices=True)[1]
        token = tl.where(temperature > 0, tl.load(drawn + row * tiles + winner), token)
    x = _load(logits, row, token, stride, real, temperature, DIVIDE)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, x - total)
    tl.store(chosen + row, x)
    tl.store(totals + row, total)
    tl.store(ranks + row, tl.full((), 1, tl.int64))


@triton.jit(do_not_specialize=["real"])
def _rank_kernel(  # noqa: ANN202
    logits, temperatures, chosen, ranks, stride, temperature_r, real,  # noqa: ANN001
    DIVIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    await_previous()
    ids = tile * TILE + tl.arange(0, TILE)
    x = _load(logits, row, ids, stride, real, tl.load(temperatures + row * temperature_r), DIVIDE)
    above = tl.sum((x > tl.load(chosen + row)).to(tl.int64), 0)
    if above > 0:
        tl.atomic_add(ranks + row, above)


def finish(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    lengths_R: Tensor,
    real_vocab: int,
    random: bool,
    divide: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `sampler.finish` promises. Ranks compare logits, which rounding to logprobs may tie."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1 and lengths_R.is_contiguous()
    tiles = triton.cdiv(vocab, _TILE)
    maxima, sums, scores = (logits_RV.new_empty((rows, tiles), dtype=torch.float32) for _ in range(3))
    first, drawn = (logits_RV.new_empty((rows, tiles), dtype=torch.int32) for _ in range(2))
    logprobs_R, chosen_R, totals_R = (logits_RV.new_empty(rows, dtype=torch.float32) for _ in range(3))
    tokens_R, ranks_R = (logits_RV.new_empty(rows, dtype=torch.int64) for _ in range(2))
    strides = (logits_RV.stride(0), temperature_R.stride(0))
    _tile_kernel[(rows, tiles)](
        logits_RV, temperature_R, seeds_R, lengths_R, maxima, sums, first, scores, drawn,
        *strides, seeds_R.stride(0), real_vocab, tiles, RANDOM=random, DIVIDE=divide, TILE=_TILE, num_warps=8, **CHAIN,
    )  # fmt: skip
    _row_kernel[(rows,)](
        logits_RV, temperature_R, maxima, sums, first, scores, drawn, tokens_R, logprobs_R, chosen_R, totals_R, ranks_R,
        *strides, real_vocab, tiles, RANDOM=random, DIVIDE=divide, BLOCK_W=triton.next_power_of_2(tiles), **CHAIN,
    )  # fmt: skip
    _rank_kernel[(rows, tiles)](
        logits_RV, temperature_R, chosen_R, ranks_R, *strides, real_vocab, DIVIDE=divide, TILE=_TILE, num_warps=8, **CHAIN,
    )  # fmt: skip
    return tokens_R, logprobs_R, ranks_R, _all_logprobs(logits_RV, temperature_R, totals_R, real_vocab, divide) if keep else None


def _all_logprobs(logits_RV: Tensor, temperature_R: Tensor, totals_R: Tensor, real_vocab: int, divide: bool) -> Tensor:
    from flexgen.runtime.sampling.sampler import mask_padding, warm

    x_RV = mask_padding(logits_RV.float(), real_vocab)
    return (warm(x_RV, temperature_R) if divide else x_RV) - totals_R[:, None]
