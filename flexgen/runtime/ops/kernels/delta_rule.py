"""The gated delta rule in Triton: one token a row, and whole prompts in chunks. The state is read and written once, and is fp32 in between.

Nothing here waits for the device: launches are sized by shapes, and which chunk belongs to which row is worked out there.

Shape suffixes: T tokens, R rows, H key heads, V value heads, k and v their widths, c tokens of a chunk, b its blocks of 16
tokens, s a token's place in its block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.contract.abi import PAD_SLOT
from flexgen.runtime.ops.kernels.launch import CHAIN, await_previous, processors, shared_memory

_BLOCK_V = 32
_BLOCK_R = 256
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit
def _delta_kernel(  # noqa: ANN202
    q, k, v, g, beta, state, state_r, out,  # noqa: ANN001
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, beta_t, state_s, state_h, scale,  # noqa: ANN001
    GROUP: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (i < KEY)[:, None] & (j < VALUE)[None, :]
    await_previous()
    slot = tl.load(state_r + row).to(tl.int64)
    at = state + slot * state_s + head * state_h + i[:, None] * VALUE + j[None, :]
    s_kv = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    q_k = tl.load(q + row * q_t + head // GROUP * q_h + i, mask=i < KEY, other=0.0).to(tl.float32)
    k_k = tl.load(k + row * k_t + head // GROUP * k_h + i, mask=i < KEY, other=0.0).to(tl.float32)
    v_v = tl.load(v + row * v_t + head * v_h + j, mask=j < VALUE, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g + row * g_t + head).to(tl.float32))
    rate = tl.load(beta + row * beta_t + head).to(tl.float32)
    q_k = q_k / tl.sqrt(tl.sum(q_k * q_k, 0) + 1e-6) * scale
    k_k = k_k / tl.sqrt(tl.sum(k_k * k_k, 0) + 1e-6)
    s_kv = s_kv * decay
    change_v = (v_v - tl.sum(s_kv * k_k[:, None], 0)) * rate
    s_kv = s_kv + k_k[:, None] * change_v[None, :]
    tl.store(at, s_kv.to(state.dtype.element_ty), mask=mask)
    o_v = tl.sum(s_kv * q_k[:, None], 0)
    tl.store(out + (row * VALUE_HEADS + head) * VALUE + j, o_v.to(out.dtype.element_ty), mask=j < VALUE)


def delta_step(
    q_RHk: Tensor, k_RHk: Tensor, v_RVv: Tensor, g_RV: Tensor, beta_RV: Tensor, state: Tensor, state_R: Tensor
) -> Tensor:
    """What `recurrent.delta_rule` promises for a step of one token a row: (R, V, v) in v's dtype; updates `state`."""
    rows, value_heads, value = v_RVv.shape
    key_heads, key = k_RHk.shape[1:]
    assert state[0].is_contiguous()
    assert all(x.stride(-1) == 1 for x in (q_RHk, k_RHk, v_RVv, g_RV, beta_RV))
    out = v_RVv.new_empty(v_RVv.shape)
    _delta_kernel[(triton.cdiv(value, _BLOCK_V), rows, value_heads)](
        q_RHk, k_RHk, v_RVv, g_RV, beta_RV, state, state_R, out,
        *q_RHk.stride()[:2], *k_RHk.stride()[:2], *v_RVv.stride()[:2], g_RV.stride(0), beta_RV.stride(0),
        *state.stride()[:2], key**-0.5,
        GROUP=value_heads // key_heads, VALUE_HEADS=value_heads, KEY=key, VALUE=value,
        BLOCK_K=triton.next_power_of_2(key), BLOCK_V=_BLOCK_V, num_warps=4, **CHAIN,
    )  # fmt: skip
    return out


@triton.jit
def _load_tokens(x, stride, live, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    c, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    return tl.load(x + c[:, None] * stride + i[None, :], mask=live[:, None] & (i < width)[None, :], other=0.0)


@triton.jit
def _inverse_norm(x):  # noqa: ANN001, ANN202
    x = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def _halves(x):  # noqa: ANN001, ANN202
    """fp32 as the sum of two in bf16: 16 of its 24 bits."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):  # noqa: ANN001, ANN202
    """a b of fp32 b, which is rounded to bf16 where a has it."""
    if a.dtype == tl.bfloat16:
        return tl.dot(a, b.to(tl.bfloat16))
    else:
        return tl.dot(a.to(tl.float32), b, input_precision=PRECISION)


@triton.jit
def _add_product(total, a, b, PRECISION: tl.constexpr):  # noqa: ANN001, ANN202
    """total + a b of fp32 b, of which bf16 would lose too much where errors add up."""
    if a.dtype == tl.bfloat16:
        high, low = _halves(b)
        return tl.dot(a, high, tl.dot(a, low, total))
    else:
        return tl.dot(a.to(tl.float32), b, total, input_precision=PRECISION)


@triton.jit
def _precise_product(a, b):  # noqa: ANN001, ANN202
    """a b of fp32, to 16 bits: of similar keys tf32 is not enough, since their sums cancel."""
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def _join(inverse, lower, SIZE: tl.constexpr, CHUNK: tl.constexpr):  # noqa: ANN001, ANN202
    """The inverse of diagonal blocks of 2 SIZE tokens from that of SIZE, D: D - D L D with what of L lies between two."""
    block = tl.arange(0, CHUNK) // SIZE
    between = (block[:, None] == block[None, :] + 1) & (block[None, :] % 2 == 0)
    product = _precise_product(tl.where(between, lower, 0.0), inverse)
    return inverse - _precise_product(inverse, product)


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr):  # noqa: ANN001, ANN202
    """(I + L)^-1 of strictly lower L: of its blocks of 16 by forward substitution, all at once, which are then joined."""
    BLOCKS: tl.constexpr = CHUNK // 16
    b, s = tl.arange(0, BLOCKS), tl.arange(0, 16)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    lower_bss = tl.sum(tl.where(diagonal, tl.reshape(lower, (BLOCKS, 16, BLOCKS, 16)), 0.0), 2)
    upper_bss = tl.permute(lower_bss, (0, 2, 1))
    inverse = tl.zeros((BLOCKS, 16, 16), tl.float32) + (s[:, None] == s[None, :]).to(tl.float32)[None, :, :]
    for r in range(1, 16):
        factor_bs = tl.sum(tl.where((s == r)[None, None, :], upper_bss, 0.0), 2)
        line_bs = tl.sum(factor_bs[:, :, None] * inverse, 1)
        inverse -= tl.where((s == r)[None, :, None], line_bs[:, None, :], 0.0)
    inverse = tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), (CHUNK, CHUNK))
    if CHUNK >= 32:
        inverse = _join(inverse, lower, 16, CHUNK)
    if CHUNK >= 64:
        inverse = _join(inverse, lower, 32, CHUNK)
    return inverse


@triton.jit
def _row_of(n, starts_r, rows, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr):  # noqa: ANN001, ANN202
    """The row of chunk n. Chunks of a row are counted from start // CHUNK + row on, which leaves room for those before."""
    row = -1
    for first in range(0, rows, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        begun = tl.load(starts_r + r, mask=r < rows, other=0) // CHUNK + r <= n
        row += tl.sum((begun & (r < rows)).to(tl.int32))
    return row


@triton.jit(do_not_specialize=["rows", "tokens"])
def _solve_kernel(  # noqa: ANN202
    q, k, g, beta, starts_r, state_r, inverses, scores, factors,  # noqa: ANN001
    q_t, q_h, k_t, k_h, g_t, beta_t, scale, rows, tokens,  # noqa: ANN001
    GROUP: tl.constexpr, KEY: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: what does not depend on the state that enters."""
    n, head = tl.program_id(0), tl.program_id(1)
    await_previous()
    row = _row_of(n, starts_r, rows, CHUNK, BLOCK_R)
    start, stop = tl.load(starts_r + row).to(tl.int32), tl.load(starts_r + row + 1).to(tl.int32)
    begin = (start + (n - start // CHUNK - row) * CHUNK).to(tl.int64)
    if (begin >= stop) | (tl.load(state_r + row) == _PAD):
        return
    c = tl.arange(0, CHUNK)
    live = c < stop - begin
    k_ck = _load_tokens(k + head // GROUP * k_h + begin * k_t, k_t, live, KEY, CHUNK, BLOCK_K)
    q_ck = _load_tokens(q + head // GROUP * q_h + begin * q_t, q_t, live, KEY, CHUNK, BLOCK_K)
    decay_c = tl.load(g + head + begin * g_t + c * g_t, mask=live, other=0.0).to(tl.float32)
    rate_c = tl.load(beta + head + begin * beta_t + c * beta_t, mask=live, other=0.0).to(tl.float32)
    k_unit_c, q_unit_c = _inverse_norm(k_ck), _inverse_norm(q_ck) * scale
    whole, decay_c = tl.sum(decay_c, 0), tl.cumsum(decay_c, 0)
    factors += head.to(tl.int64) * 3 * tokens + begin + c
    tl.store(factors, k_unit_c * tl.exp(decay_c), mask=live)
    tl.store(factors + tokens, k_unit_c * tl.exp(whole - decay_c), mask=live)
    tl.store(factors + 2 * tokens, q_unit_c * tl.exp(decay_c), mask=live)
    causal, strict = c[:, None] >= c[None, :], c[:, None] > c[None, :]
    between = tl.exp(tl.where(causal, decay_c[:, None] - decay_c[None, :], float("-inf"))) * k_unit_c[None, :]
    places, k_kc = (head.to(tl.int64) * tokens + begin + c[:, None]) * CHUNK + c[None, :], tl.trans(k_ck)
    scores_cc = tl.dot(q_ck, k_kc, input_precision=PRECISION) * q_unit_c[:, None] * between
    tl.store(scores + places, scores_cc.to(scores.dtype.element_ty), mask=live[:, None])
    lower = tl.dot(k_ck, k_kc, input_precision=PRECISION) * (rate_c * k_unit_c)[:, None] * between
    inverse = _inverse(tl.where(strict, lower, 0.0), CHUNK)
    tl.store(inverses + places, inverse.to(inverses.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _scan_kernel(  # noqa: ANN202
    q, k, v, g, beta, inverses, scores, factors, starts_r, state, state_r, out,  # noqa: ANN001
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, beta_t, state_s, state_h, tokens,  # noqa: ANN001
    GROUP: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one row, some columns of its state: from chunk to chunk."""
    row, head = tl.program_id(1), tl.program_id(2)
    await_previous()
    slot = tl.load(state_r + row).to(tl.int64)
    if slot == _PAD:
        return
    start, stop = tl.load(starts_r + row).to(tl.int32), tl.load(starts_r + row + 1).to(tl.int32)
    c, i, first = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V
    j = first + tl.arange(0, BLOCK_V)
    q, k, v = q + head // GROUP * q_h, k + head // GROUP * k_h, v + head * v_h + first
    state += slot * state_s + head * state_h
    of_state, in_state = i[:, None] * VALUE + j[None, :], (i < KEY)[:, None] & (j < VALUE)[None, :]
    s_kv = tl.load(state + of_state, mask=in_state, other=0.0).to(tl.float32)
    for at in tl.range(start, stop, CHUNK, disable_licm=True):  # what it hoists does not fit into the registers
        begin, live = tl.cast(at, tl.int64), c < stop - at
        of_head = head.to(tl.int64) * tokens + begin
        k_ck = _load_tokens(k + begin * k_t, k_t, live, KEY, CHUNK, BLOCK_K)
        q_ck = _load_tokens(q + begin * q_t, q_t, live, KEY, CHUNK, BLOCK_K)
        v_cv = _load_tokens(v + begin * v_t, v_t, live, VALUE - first, CHUNK, BLOCK_V)
        inverse_cc = _load_tokens(inverses + of_head * CHUNK, CHUNK, live, CHUNK, CHUNK, CHUNK).to(tl.float32)
        scores_cc = _load_tokens(scores + of_head * CHUNK, CHUNK, live, CHUNK, CHUNK, CHUNK).to(tl.float32)
        at_factors = factors + head.to(tl.int64) * 3 * tokens + begin + c
        k_in_c = tl.load(at_factors, mask=live, other=0.0)
        k_out_c = tl.load(at_factors + tokens, mask=live, other=0.0)
        q_in_c = tl.load(at_factors + 2 * tokens, mask=live, other=0.0)
        rate_c = tl.load(beta + head + begin * beta_t + c * beta_t, mask=live, other=0.0).to(tl.float32)
        through = tl.exp(tl.sum(tl.load(g + head + begin * g_t + c * g_t, mask=live, other=0.0).to(tl.float32), 0))
        error_cv = v_cv.to(tl.float32) - _product(k_ck, s_kv, PRECISION) * k_in_c[:, None]
        change_cv = tl.dot(inverse_cc, error_cv * rate_c[:, None], input_precision=PRECISION)
        o_cv = _product(q_ck, s_kv, PRECISION) * q_in_c[:, None]
        o_cv = tl.dot(scores_cc, change_cv, o_cv, input_precision=PRECISION)
        s_kv = _add_product(s_kv * through, tl.trans(k_ck), change_cv * k_out_c[:, None], PRECISION)
        of_out = (begin * VALUE_HEADS + head) * VALUE + c[:, None] * (VALUE_HEADS * VALUE) + j[None, :]
        tl.store(out + of_out, o_cv.to(out.dtype.element_ty), mask=live[:, None] & (j < VALUE)[None, :])
    tl.store(state + of_state, s_kv.to(state.dtype.element_ty), mask=in_state)


@dataclass(frozen=True)
class Launch:
    """Tokens of a chunk; of the scan from chunk to chunk the columns of a state that a program holds, warps and stages."""

    chunk: int
    block_v: int
    warps: int = 4
    stages: int = 1

    @staticmethod
    def of(q_THk: Tensor, v_TVv: Tensor, rows: int) -> Launch:
        """From shapes alone: short chunks for short rows, and narrow programs, which load ahead, for few rows."""
        tokens, heads, value = v_TVv.shape
        key, size, device = q_THk.shape[-1], q_THk.element_size(), q_THk.device
        if size == 4:
            return Launch(16, 32)  # products in three of tf32 need the room
        if tokens <= 16 * rows:
            return Launch(16, 64)
        if q_THk.dtype == torch.bfloat16 and key <= 128 and rows * heads * triton.cdiv(value, 64) >= processors(device):
            return Launch(64, 64)
        loaded = 64 * (2 * key * size + 2 * 64 * 2 + 32 * size)
        fits = 2 * loaded + 2**15 <= shared_memory(device)
        return Launch(64, 32, stages=2) if fits else Launch(16, 64)


def delta_prefill(
    q_THk: Tensor,
    k_THk: Tensor,
    v_TVv: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    state: Tensor,
    starts_R: Tensor,
    state_R: Tensor,
    launch: Launch | None = None,
) -> Tensor:
    """What `recurrent.delta_rule` promises for rows of any length: (T, V, v) in v's dtype; updates `state`.

    Chunks are solved side by side, then each row's are walked in order. Rows of the padding slot are left out: their
    outputs are zeros. Products are fp32, in three of tf32. Those of 16-bit inputs are tf32; where these are bf16, q and k
    meet a state rounded to bf16, and its update is the product of k with the sum of two in bf16.
    """
    tokens, value_heads, value = v_TVv.shape
    key_heads, key = k_THk.shape[1:]
    assert state[0].is_contiguous()
    assert all(x.stride(-1) == 1 for x in (q_THk, k_THk, v_TVv, g_TV, beta_TV))
    rows, device, wide = len(state_R), v_TVv.device, v_TVv.dtype == torch.float32
    launch = launch or Launch.of(q_THk, v_TVv, rows)
    assert launch.chunk == 16 or not wide  # blocks are joined to 16 bits
    # entries of both are at most 1, of which fp16 keeps what tf32 does
    inverses, scores = (
        torch.empty((value_heads, tokens, launch.chunk), dtype=torch.float32 if wide else torch.float16, device=device)
        for _ in range(2)
    )
    factors = torch.empty((value_heads, 3, tokens), dtype=torch.float32, device=device)
    out = v_TVv.new_zeros(v_TVv.shape)
    sizes = {
        "GROUP": value_heads // key_heads, "KEY": key, "CHUNK": launch.chunk,
        "BLOCK_K": max(16, triton.next_power_of_2(key)), "PRECISION": "tf32x3" if wide else "tf32",
    }  # fmt: skip
    strides = (*q_THk.stride()[:2], *k_THk.stride()[:2])
    _solve_kernel[(tokens // launch.chunk + rows, value_heads)](
        q_THk, k_THk, g_TV, beta_TV, starts_R, state_R, inverses, scores, factors,
        *strides, g_TV.stride(0), beta_TV.stride(0), key**-0.5, rows, tokens,
        **sizes, BLOCK_R=_BLOCK_R, num_warps=launch.chunk // 16, **CHAIN,
    )  # fmt: skip
    _scan_kernel[(triton.cdiv(value, launch.block_v), rows, value_heads)](
        q_THk, k_THk, v_TVv, g_TV, beta_TV, inverses, scores, factors, starts_R, state, state_R, out,
        *strides, *v_TVv.stride()[:2], g_TV.stride(0), beta_TV.stride(0), *state.stride()[:2], tokens,
        **sizes, VALUE_HEADS=value_heads, VALUE=value, BLOCK_V=launch.block_v,
        num_warps=launch.warps, num_stages=launch.stages, **CHAIN,
    )  # fmt: skip
    return out
