# Generated from specs/qwen3_moe.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/qwen3_moe.yaml`.
"""How tokens of qwen3_moe see each other: one function an attention, and the rotary tables.

T tokens   D model width   N query heads   K key/value heads   H head width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexgen.contract.abi import Layer, Step
from flexgen.runtime.ops.attention import attend, write_pages
from flexgen.runtime.ops.elementwise import project, rms_norm_cast_before, rotate

if TYPE_CHECKING:
    from .walker import Dims


def rope_tables(dims: Dims, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, each (length, rotated / 2), by attention entry."""
    rope = dims.rope.tables(length, dtype, device)
    return {
        "full": rope,
        "sliding": rope,
    }


def full_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.full
    pages = step.pages["full"]
    q_T, k_T, v_T = project(x_TD, w.qkv, w.qkv_bias).split(
        (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim, dims.kv_heads * dims.head_dim), dim=-1
    )
    q_TNH = q_T.unflatten(-1, (dims.heads, dims.head_dim))
    k_TKH = k_T.unflatten(-1, (dims.kv_heads, dims.head_dim))
    v_TKH = v_T.unflatten(-1, (dims.kv_heads, dims.head_dim))
    q_TNH = rms_norm_cast_before(q_TNH, w.q_norm, dims.eps)
    k_TKH = rms_norm_cast_before(k_TKH, w.k_norm, dims.eps)
    q_TNH = rotate(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(  # reads K/V pages
        q_TNH,
        w,
        pages,
        step,
        scale=dims.head_dim ** -0.5,
    )
    return project(o_TNH.flatten(1), w.o, w.o_bias)


def sliding_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.sliding
    pages = step.pages["sliding"]
    q_T, k_T, v_T = project(x_TD, w.qkv, w.qkv_bias).split(
        (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim, dims.kv_heads * dims.head_dim), dim=-1
    )
    q_TNH = q_T.unflatten(-1, (dims.heads, dims.head_dim))
    k_TKH = k_T.unflatten(-1, (dims.kv_heads, dims.head_dim))
    v_TKH = v_T.unflatten(-1, (dims.kv_heads, dims.head_dim))
    q_TNH = rms_norm_cast_before(q_TNH, w.q_norm, dims.eps)
    k_TKH = rms_norm_cast_before(k_TKH, w.k_norm, dims.eps)
    q_TNH = rotate(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(  # reads K/V pages
        q_TNH,
        w,
        pages,
        step,
        scale=dims.head_dim ** -0.5,
        window=dims.window,
    )
    return project(o_TNH.flatten(1), w.o, w.o_bias)
