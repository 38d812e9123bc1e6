"""The short depthwise convolution of recurrent mixers in Triton: one launch for decode, two where rows have more tokens.

Shape suffixes: T tokens, R rows, C channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.ops.kernels.activations import activate
from flexgen.runtime.ops.kernels.launch import CHAIN, await_previous

_BLOCK_C = 256


@triton.jit
def _conv_kernel(  # noqa: ANN202
    u, weight, state, rows, starts, state_r, out,  # noqa: ANN001
    u_t, weight_c, state_s,  # noqa: ANN001
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, ACT: tl.constexpr, DECODE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token's output; in decode also its row's new state."""
    token = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = c < CHANNELS
    await_previous()
    row = token
    first = token
    if not DECODE:
        row = tl.load(rows + token)
        first = tl.load(starts + row)
    slot = tl.load(state_r + row).to(tl.int64)
    past = state + slot * state_s + c * TAPS
    sums = tl.zeros((BLOCK_C,), tl.float32)
    for tap in tl.static_range(TAPS):
        place = token - first - (TAPS - 1 - tap) + tl.zeros((BLOCK_C,), tl.int32)
        now = tl.load(u + (first + place).to(tl.int64) * u_t + c, mask=live & (place >= 0), other=0.0)
        before = tl.load(past + TAPS + place, mask=live & (place < 0), other=0.0)
        sums += (now + before).to(tl.float32) * tl.load(weight + c * weight_c + tap, mask=live, other=0.0).to(tl.float32)
    if DECODE:
        k = tl.arange(0, BLOCK_K)
        mask = live[:, None] & (k < TAPS)[None, :]
        older = tl.load(past[:, None] + 1 + k[None, :], mask=mask & (k < TAPS - 1)[None, :], other=0.0)
        tl.debug_barrier()  # other warps of the program may still read what is overwritten here
        latest = tl.load(u + token.to(tl.int64) * u_t + c, mask=live, other=0.0)
        tl.store(past[:, None] + k[None, :], tl.where((k == TAPS - 1)[None, :], latest[:, None], older), mask=mask)
    y = sums.to(out.dtype.element_ty)
    if ACT is not None:
        y = activate(y.to(tl.float32), ACT).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * CHANNELS + c, y, mask=live)


@triton.jit
def _state_kernel(  # noqa: ANN202
    u, state, starts, state_r, u_t, state_s,  # noqa: ANN001
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A row's last inputs become its state."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    mask = (c < CHANNELS)[:, None] & (k < TAPS)[None, :]
    await_previous()
    first, stop = tl.load(starts + row), tl.load(starts + row + 1)
    place = stop - first - TAPS + k
    past = state + tl.load(state_r + row).to(tl.int64) * state_s + c[:, None] * TAPS
    now = tl.load(u + (first + place).to(tl.int64)[None, :] * u_t + c[:, None], mask=mask & (place >= 0)[None, :], other=0.0)
    before = tl.load(past + TAPS + place[None, :], mask=mask & (place < 0)[None, :], other=0.0)
    tl.debug_barrier()  # as above
    tl.store(past + k[None, :], now + before, mask=mask)


def causal_conv(
    u_TC: Tensor, weight_CK: Tensor, state: Tensor, rows_T: Tensor, starts_R: Tensor, state_R: Tensor, act: str | None
) -> Tensor:
    """What `recurrent.causal_conv` promises: (T, C) in u's dtype; updates `state`."""
    (tokens, channels), taps, rows = u_TC.shape, weight_CK.shape[1], state_R.shape[0]
    assert u_TC.stride(1) == 1 and weight_CK.stride(1) == 1 and state[0].is_contiguous()
    out = u_TC.new_empty((tokens, channels))
    blocks = triton.cdiv(channels, _BLOCK_C)
    sizes = {"CHANNELS": channels, "TAPS": taps, "BLOCK_C": _BLOCK_C, "BLOCK_K": triton.next_power_of_2(taps)}
    _conv_kernel[(tokens, blocks)](
        u_TC, weight_CK, state, rows_T, starts_R, state_R, out,
        u_TC.stride(0), weight_CK.stride(0), state.stride(0), ACT=act, DECODE=tokens == rows, **sizes, **CHAIN,
    )  # fmt: skip
    if tokens != rows:
        _state_kernel[(rows, blocks)](u_TC, state, starts_R, state_R, u_TC.stride(0), state.stride(0), **sizes, **CHAIN)
    return out
