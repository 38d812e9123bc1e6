# Generated from specs/mimo_v2_flash.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/mimo_v2_flash.yaml`.
"""How tokens of mimo_v2_flash see each other: for each attention its weights and its function.

T tokens   D model width   N query heads   K key/value heads   H head width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexgen.contract import weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.state import Pages, State
from flexgen.runtime.ops.attention import attend, write_pages
from flexgen.runtime.ops.elementwise import project, rotate, widen

if TYPE_CHECKING:
    from .walker import Dims


def full_weights(dims: Dims) -> list[weights.Weight]:
    # spec: attention.full
    return [
        *weights.linear("q", {"self_attn.q_proj": dims.heads * dims.head_dim}, dims.hidden,
            out="heads", bias=dims.attention_bias),
        *weights.linear("k", {"self_attn.k_proj": dims.kv_heads * dims.head_dim}, dims.hidden,
            out="heads", bias=dims.attention_bias),
        *weights.linear("v", {"self_attn.v_proj": dims.kv_heads * dims.value_dim}, dims.hidden,
            out="heads", bias=dims.attention_bias),
        *weights.linear("o", {"self_attn.o_proj": dims.hidden}, dims.heads * dims.value_dim, into="heads"),
    ]


def full_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.full
    pages = step.pages["full"]
    q_TNH = project(x_TD, w.q, w.q_bias).unflatten(-1, (-1, dims.head_dim))
    k_TKH = project(x_TD, w.k, w.k_bias).unflatten(-1, (-1, dims.head_dim))
    v_TKH = project(x_TD, w.v, w.v_bias).unflatten(-1, (-1, dims.value_dim))
    v_TKH = v_TKH * dims.value_scale
    q_TNH = rotate(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    v_TKH = widen(v_TKH, dims.head_dim)  # pages have room for keys
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(q_TNH, w, pages, step, scale=dims.head_dim ** -0.5, softmax_fp32=False)  # reads K/V pages
    o_TNH = o_TNH[..., : dims.value_dim]
    return project(o_TNH.flatten(1), w.o)


def sliding_weights(dims: Dims) -> list[weights.Weight]:
    # spec: attention.sliding
    return [
        *weights.linear("q", {"self_attn.q_proj": dims.heads * dims.head_dim}, dims.hidden,
            out="heads", bias=dims.attention_bias),
        *weights.linear("k", {"self_attn.k_proj": 2 * dims.kv_heads * dims.head_dim}, dims.hidden,
            out="heads", bias=dims.attention_bias),
        *weights.linear("v", {"self_attn.v_proj": 2 * dims.kv_heads * dims.value_dim}, dims.hidden,
            out="heads", bias=dims.attention_bias),
        *weights.linear("o", {"self_attn.o_proj": dims.hidden}, dims.heads * dims.value_dim, into="heads"),
        weights.vector("sinks", dims.heads, "self_attn.attention_sink_bias", of="heads"),
    ]


def sliding_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.sliding
    pages = step.pages["sliding"]
    q_TNH = project(x_TD, w.q, w.q_bias).unflatten(-1, (-1, dims.head_dim))
    k_TKH = project(x_TD, w.k, w.k_bias).unflatten(-1, (-1, dims.head_dim))
    v_TKH = project(x_TD, w.v, w.v_bias).unflatten(-1, (-1, dims.value_dim))
    v_TKH = v_TKH * dims.value_scale
    q_TNH = rotate(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    v_TKH = widen(v_TKH, dims.head_dim)  # pages have room for keys
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(
        q_TNH, w, pages, step, scale=dims.head_dim ** -0.5, window=dims.window, sinks=w.sinks, softmax_fp32=False,
    )  # reads K/V pages
    o_TNH = o_TNH[..., : dims.value_dim]
    return project(o_TNH.flatten(1), w.o)


def state(dims: Dims) -> dict[str, State]:
    """What a layer of each entry keeps from step to step."""
    return {
        "full": Pages(dims.kv_heads, dims.head_dim),
        "sliding": Pages(2 * dims.kv_heads, dims.head_dim, window=dims.window),
    }


def rope_tables(dims: Dims, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, each (length, rotated / 2), by attention entry."""
    full_rope = dims.full_rope.tables(length, dtype, device)
    sliding_rope = dims.sliding_rope.tables(length, dtype, device)
    return {"full": full_rope, "sliding": sliding_rope}
