"""Counter-based randomness for the sampler: noise that depends on a request's seed and position alone, never on its neighbours.

Philox 2x32 from J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Words of 32 bits live in int64
tensors: the product of two of them may wrap, which leaves both of its halves right. Torch's own generators are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9
_ROUNDS = 7
"""The fewest rounds that pass BigCrush (table 2 of the paper)."""

_LARGEST_UNIFORM = 1 - 2**-24
"""The largest fp32 below 1, so that no exponential is infinite."""


def philox2x32(low: Tensor, high: Tensor, key: Tensor, rounds: int = _ROUNDS) -> tuple[Tensor, Tensor]:
    """Two random words for each counter (`low`, `high`) under `key`; all are 32-bit words in int64, broadcast."""
    for index in range(rounds):
        product = low * _MULTIPLIER
        round_key = (key + index * _WEYL) & _MASK
        low, high = ((product >> 32) & _MASK) ^ round_key ^ high, product & _MASK
    return low, high


def exponential_noise(seeds_R: Tensor, positions_R: Tensor, vocab: int) -> Tensor:
    """Exponential(1) noise, (R, `vocab`) fp32, a pure function of each row's seed (int64) and position (int64).

    `argmax(logits - log(noise))` draws from softmax(logits) (the Gumbel-max trick). Each row first turns seed and position
    into 64 bits that key its own stream, so streams of neighbouring seeds or positions share no counter.
    """
    seed_low, seed_high = seeds_R & _MASK, (seeds_R >> 32) & _MASK
    stream, key = philox2x32(positions_R & _MASK, seed_high, seed_low, rounds=10)
    counters = torch.arange((vocab + 1) // 2, device=seeds_R.device)
    even, odd = philox2x32(counters[None, :], stream[:, None], key[:, None])
    words = torch.stack((even, odd), dim=-1).flatten(1)[:, :vocab]
    # log1p(-u) keeps full precision near u = 0, where the noise is smallest and unlikely tokens win.
    uniforms = ((words.float() + 0.5) * 2**-32).clamp_(max=_LARGEST_UNIFORM)
    return uniforms.neg_().log1p_().neg_()
