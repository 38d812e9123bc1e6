# Generated from specs/hunyuan_v1_dense.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/hunyuan_v1_dense.yaml`.
"""How tokens of hunyuan_v1_dense see each other: for each attention its weights and its function.

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
from flexgen.runtime.ops.elementwise import project, rms_norm_cast_before, rotate

if TYPE_CHECKING:
    from .walker import Dims


def attention_weights(dims: Dims) -> list[weights.Weight]:
    # spec: attention.attention
    return [
        *weights.linear("qkv", {
            "self_attn.q_proj": dims.heads * dims.head_dim,
            "self_attn.k_proj": dims.kv_heads * dims.head_dim,
            "self_attn.v_proj": dims.kv_heads * dims.head_dim,
        }, dims.hidden, out="heads", bias=dims.bias),
        *weights.linear("o", {"self_attn.o_proj": dims.hidden}, dims.heads * dims.head_dim,
            into="heads", bias=dims.bias),
        weights.norm("q_norm", dims.head_dim, "self_attn.query_layernorm"),
        weights.norm("k_norm", dims.head_dim, "self_attn.key_layernorm"),
    ]


def attention_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.attention
    pages = step.pages["attention"]
    heads_TNH = project(x_TD, w.qkv, w.qkv_bias).unflatten(-1, (-1, dims.head_dim))
    q_TNH, k_TKH, v_TKH = heads_TNH.split((dims.heads, dims.kv_heads, dims.kv_heads), dim=1)
    q_TNH = rotate(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    q_TNH = rms_norm_cast_before(q_TNH, w.q_norm, dims.eps)
    k_TKH = rms_norm_cast_before(k_TKH, w.k_norm, dims.eps)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(q_TNH, w, pages, step, scale=dims.head_dim ** -0.5)  # reads K/V pages
    return project(o_TNH.flatten(1), w.o, w.o_bias)


def state(dims: Dims) -> dict[str, State]:
    """What a layer of each entry keeps from step to step."""
    return {"attention": Pages(dims.kv_heads, dims.head_dim)}


def rope_tables(dims: Dims, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, each (length, rotated / 2), by attention entry."""
    rope = dims.rope.tables(length, dtype, device)
    return {"attention": rope}
