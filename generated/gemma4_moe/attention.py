# Generated from specs/gemma4_moe.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gemma4_moe.yaml`.
"""How tokens of gemma4_moe see each other: one function an attention, and the rotary tables.

T tokens   D model width   N query heads   K key/value heads   H head width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexgen.contract.abi import Layer, Step
from flexgen.runtime.ops.attention import attend, write_pages
from flexgen.runtime.ops.elementwise import project, rms_norm, rotate

if TYPE_CHECKING:
    from .walker import Dims


def rope_tables(dims: Dims, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, each (length, rotated / 2), by attention entry."""
    sliding_rope = dims.sliding_rope.tables(length, dtype, device)
    full_rope = dims.full_rope.tables(length, dtype, device)
    return {
        "sliding": sliding_rope,
        "full": full_rope,
    }


def sliding_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.sliding
    pages = step.pages["sliding"]
    q_T, k_T, v_T = project(x_TD, w.qkv, w.qkv_bias).split(
        (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim, dims.kv_heads * dims.head_dim), dim=-1
    )
    q_TNH = q_T.unflatten(-1, (dims.heads, dims.head_dim))
    k_TKH = k_T.unflatten(-1, (dims.kv_heads, dims.head_dim))
    v_TKH = v_T.unflatten(-1, (dims.kv_heads, dims.head_dim))
    q_TNH = rms_norm(q_TNH, w.q_norm, dims.eps)
    k_TKH = rms_norm(k_TKH, w.k_norm, dims.eps)
    v_TKH = rms_norm(v_TKH, None, dims.eps)
    q_TNH = rotate(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(  # reads K/V pages
        q_TNH,
        w,
        pages,
        step,
        scale=1.0,
        window=dims.window,
    )
    return project(o_TNH.flatten(1), w.o, w.o_bias)


def full_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.full
    pages = step.pages["full"]
    q_T, k_T = project(x_TD, w.qk, w.qk_bias).split(
        (dims.heads * dims.full_head_dim, dims.full_kv_heads * dims.full_head_dim), dim=-1
    )
    q_TNH = q_T.unflatten(-1, (dims.heads, dims.full_head_dim))
    k_TKH = k_T.unflatten(-1, (dims.full_kv_heads, dims.full_head_dim))
    v_TKH = k_TKH  # the value is the raw key projection, before its norm and rope
    q_TNH = rms_norm(q_TNH, w.q_norm, dims.eps)
    k_TKH = rms_norm(k_TKH, w.k_norm, dims.eps)
    v_TKH = rms_norm(v_TKH, None, dims.eps)
    q_TNH = rotate(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(  # reads K/V pages
        q_TNH,
        w,
        pages,
        step,
        scale=1.0,
    )
    return project(o_TNH.flatten(1), w.o, w.o_bias)
