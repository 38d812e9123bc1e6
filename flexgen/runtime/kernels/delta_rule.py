"""The gated delta rule in Triton: one token a row, and whole prompts in chunks. The fp32 state is read and written once.

Nothing here waits for the device: launches are sized by shapes, and which chunk belongs to which row is worked out there.

Shape suffixes: T tokens, R rows, H key heads, V value heads, k and v their widths, c tokens of a chunk, n chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexgen.runtime.kernels.launch import CHAIN, await_previous, shared_memory

_BLOCK_V = 32
_CHUNK = {2: 64, 4: 32}
"""Tokens of a chunk by bytes of an element: fp32 in three products of tf32 needs the room."""


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
    s_kv = tl.load(at, mask=mask, other=0.0)
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
    tl.store(at, s_kv, mask=mask)
    o_v = tl.sum(s_kv * q_k[:, None], 0)
    tl.store(out + (row * VALUE_HEADS + head) * VALUE + j, o_v.to(out.dtype.element_ty), mask=j < VALUE)


def delta_step(
    q_RHk: Tensor, k_RHk: Tensor, v_RVv: Tensor, g_RV: Tensor, beta_RV: Tensor, state: Tensor, state_R: Tensor
) -> Tensor:
    """What `recurrent.delta_rule` promises for a step of one token a row: (R, V, v) in v's dtype; updates `state`."""
    rows, value_heads, value = v_RVv.shape
    key_heads, key = k_RHk.shape[1:]
    assert state.dtype == torch.float32 and state[0].is_contiguous()
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
def _load_unit(x, rows, live, stride, KEY: tl.constexpr, BLOCK_K: tl.constexpr):  # noqa: ANN001, ANN202
    """(c, k) fp32 of unit length."""
    i = tl.arange(0, BLOCK_K)
    x_ck = tl.load(x + rows[:, None] * stride + i[None, :], mask=live[:, None] & (i < KEY)[None, :], other=0.0)
    x_ck = x_ck.to(tl.float32)
    return x_ck / tl.sqrt(tl.sum(x_ck * x_ck, 1) + 1e-6)[:, None]


@triton.jit
def _solve_kernel(  # noqa: ANN202
    q, k, v, g, beta, starts_r, row_n, index_n, values, keys, scores,  # noqa: ANN001
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, beta_t, scale, rows,  # noqa: ANN001
    GROUP: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: what its tokens change, as `values - keys S` of the state S that enters, and their scores."""
    n, head = tl.program_id(0), tl.program_id(1)
    await_previous()
    row = tl.load(row_n + n)
    if row == rows:
        return
    begin = tl.load(starts_r + row) + tl.load(index_n + n) * CHUNK
    count = tl.minimum(tl.load(starts_r + row + 1) - begin, CHUNK)
    c = tl.arange(0, CHUNK)
    live, at = c < count, (begin + c).to(tl.int64)
    k_ck = _load_unit(k + head // GROUP * k_h, at, live, k_t, KEY, BLOCK_K)
    decay_c = tl.cumsum(tl.load(g + at * g_t + head, mask=live, other=0.0).to(tl.float32), 0)
    rate_c = tl.load(beta + at * beta_t + head, mask=live, other=0.0).to(tl.float32)
    causal = c[:, None] >= c[None, :]
    between = tl.where(causal, tl.exp(tl.where(causal, decay_c[:, None] - decay_c[None, :], 0.0)), 0.0)
    products = tl.dot(k_ck, tl.trans(k_ck), input_precision=PRECISION)
    inverse = tl.where(c[:, None] > c[None, :], -rate_c[:, None] * products * between, 0.0)
    for r in range(1, count):  # forward substitution, a row at a time
        mine = (c == r)[:, None]
        line = tl.sum(tl.where(mine, inverse, 0.0), 0)
        line += tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(mine, line[None, :], inverse)
    inverse += (c[:, None] == c[None, :]).to(tl.float32)
    i, out = tl.arange(0, BLOCK_K), at * VALUE_HEADS + head
    keys_ck = tl.dot(inverse, (rate_c * tl.exp(decay_c))[:, None] * k_ck, input_precision=PRECISION)
    tl.store(keys + out[:, None] * KEY + i[None, :], keys_ck, mask=live[:, None] & (i < KEY)[None, :])
    for first in range(0, VALUE, BLOCK_V):
        j = first + tl.arange(0, BLOCK_V)
        mask = live[:, None] & (j < VALUE)[None, :]
        v_cv = tl.load(v + at[:, None] * v_t + head * v_h + j[None, :], mask=mask, other=0.0).to(tl.float32)
        values_cv = tl.dot(inverse, rate_c[:, None] * v_cv, input_precision=PRECISION)
        tl.store(values + out[:, None] * VALUE + j[None, :], values_cv, mask=mask)
    q_ck = _load_unit(q + head // GROUP * q_h, at, live, q_t, KEY, BLOCK_K) * scale
    scores_cc = tl.dot(q_ck, tl.trans(k_ck), input_precision=PRECISION) * between
    tl.store(scores + out[:, None] * CHUNK + c[None, :], scores_cc, mask=live[:, None])


@triton.jit
def _scan_kernel(  # noqa: ANN202
    q, k, g, values, keys, scores, starts_r, state, state_r, out,  # noqa: ANN001
    q_t, q_h, k_t, k_h, g_t, state_s, state_h, scale,  # noqa: ANN001
    GROUP: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head of one row, some columns of its state: from chunk to chunk."""
    row, head = tl.program_id(1), tl.program_id(2)
    await_previous()
    start, stop = tl.load(starts_r + row), tl.load(starts_r + row + 1)
    c, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    state += tl.load(state_r + row).to(tl.int64) * state_s + head * state_h
    of_state, in_state = i[:, None] * VALUE + j[None, :], (i < KEY)[:, None] & (j < VALUE)[None, :]
    s_kv = tl.load(state + of_state, mask=in_state, other=0.0)
    for begin in range(start, stop, CHUNK):
        live, at = begin + c < stop, (begin + c).to(tl.int64)
        at_head, mask = at * VALUE_HEADS + head, live[:, None] & (j < VALUE)[None, :]
        g_c = tl.load(g + at * g_t + head, mask=live, other=0.0).to(tl.float32)
        decay_c, whole = tl.cumsum(g_c, 0), tl.sum(g_c, 0)
        keys_ck = tl.load(
            keys + at_head[:, None] * KEY + i[None, :], mask=live[:, None] & (i < KEY)[None, :], other=0.0
        )
        change_cv = tl.load(values + at_head[:, None] * VALUE + j[None, :], mask=mask, other=0.0)
        change_cv -= tl.dot(keys_ck, s_kv, input_precision=PRECISION)
        q_ck = _load_unit(q + head // GROUP * q_h, at, live, q_t, KEY, BLOCK_K) * (scale * tl.exp(decay_c))[:, None]
        o_cv = tl.dot(q_ck, s_kv, input_precision=PRECISION)
        scores_cc = tl.load(scores + at_head[:, None] * CHUNK + c[None, :], mask=live[:, None], other=0.0)
        o_cv += tl.dot(scores_cc, change_cv, input_precision=PRECISION)
        tl.store(out + at_head[:, None] * VALUE + j[None, :], o_cv.to(out.dtype.element_ty), mask=mask)
        k_ck = _load_unit(k + head // GROUP * k_h, at, live, k_t, KEY, BLOCK_K) * tl.exp(whole - decay_c)[:, None]
        s_kv = s_kv * tl.exp(whole) + tl.dot(tl.trans(k_ck), change_cv, input_precision=PRECISION)
    tl.store(state + of_state, s_kv, mask=in_state)


def delta_prefill(
    q_THk: Tensor,
    k_THk: Tensor,
    v_TVv: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    state: Tensor,
    starts_R: Tensor,
    state_R: Tensor,
) -> Tensor:
    """What `recurrent.delta_rule` promises for rows of any length: (T, V, v) in v's dtype; updates `state`.

    Chunks are solved side by side, then each row's are walked in order. Products are fp32 (in three tf32 ones), and of
    16-bit inputs tf32.
    """
    tokens, value_heads, value = v_TVv.shape
    key_heads, key = k_THk.shape[1:]
    assert state.dtype == torch.float32 and state[0].is_contiguous()
    assert all(x.stride(-1) == 1 for x in (q_THk, k_THk, v_TVv, g_TV, beta_TV))
    rows = len(state_R)
    chunk = _CHUNK[v_TVv.element_size()]
    chunks = triton.cdiv(tokens, chunk) + rows  # at least as many as there are
    counts_R = (starts_R.diff() + chunk - 1) // chunk
    ends_R = counts_R.cumsum(0)
    row_n = torch.searchsorted(ends_R, torch.arange(chunks, device=ends_R.device), right=True)
    firsts_R = torch.cat((ends_R - counts_R, ends_R[-1:]))
    index_n = torch.arange(chunks, device=ends_R.device) - firsts_R[row_n]
    values, keys, scores = (
        torch.empty((tokens, value_heads, width), dtype=torch.float32, device=v_TVv.device)
        for width in (value, key, chunk)
    )
    out = v_TVv.new_zeros(v_TVv.shape)
    sizes = {
        "GROUP": value_heads // key_heads, "VALUE_HEADS": value_heads, "KEY": key, "VALUE": value, "CHUNK": chunk,
        "BLOCK_K": max(16, triton.next_power_of_2(key)), "BLOCK_V": _BLOCK_V,
        "PRECISION": "tf32x3" if v_TVv.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    inner = (*q_THk.stride()[:2], *k_THk.stride()[:2])
    _solve_kernel[(chunks, value_heads)](
        q_THk, k_THk, v_TVv, g_TV, beta_TV, starts_R, row_n, index_n, values, keys, scores,
        *inner, *v_TVv.stride()[:2], g_TV.stride(0), beta_TV.stride(0), key**-0.5, rows, **sizes, num_warps=4, **CHAIN,
    )  # fmt: skip
    _scan_kernel[(triton.cdiv(value, _BLOCK_V), rows, value_heads)](
        q_THk, k_THk, g_TV, values, keys, scores, starts_R, state, state_R, out,
        *inner, g_TV.stride(0), *state.stride()[:2], key**-0.5, **sizes, num_warps=4,
        num_stages=_stages(chunk, key, q_THk.element_size(), v_TVv.device), **CHAIN,
    )  # fmt: skip
    return out


def _stages(chunk: int, key: int, element_size: int, device: torch.device) -> int:
    """2, for loads of the next chunk during this one, where shared memory holds two."""
    loaded = chunk * (4 * (key + chunk + _BLOCK_V) + 2 * key * element_size)
    return 2 if 2 * loaded + 2**15 <= shared_memory(device) else 1
