"""One token a row of the gated delta rule in Triton: the fp32 state is read once and written once.

Shape suffixes: R rows, H key heads, V value heads, k and v their widths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_V = 32


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
        BLOCK_K=triton.next_power_of_2(key), BLOCK_V=_BLOCK_V, num_warps=4,
    )  # fmt: skip
    return out
