# Generated from specs/cohere.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/cohere.yaml`.
"""How tokens of cohere see each other: for each attention its weights and its function.

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
from flexgen.runtime.ops.elementwise import layer_norm, project, rotate_pairs

if TYPE_CHECKING:
    from .walker import Dims


def bare_weights(dims: Dims) -> list[weights.Weight]:
    # spec: attention.bare
    return [
        *weights.linear("qkv", {
            "self_attn.q_proj": dims.heads * dims.head_dim,
            "self_attn.k_proj": dims.kv_heads * dims.head_dim,
            "self_attn.v_proj": dims.kv_heads * dims.head_dim,
        }, dims.hidden, out="heads", bias=dims.bias),
        *weights.linear("o", {"self_attn.o_proj": dims.hidden}, dims.heads * dims.head_dim,
            into="heads", bias=dims.bias),
    ]


def bare_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.bare
    pages = step.pages["bare"]
    heads_TNH = project(x_TD, w.qkv, w.qkv_bias).unflatten(-1, (-1, dims.head_dim))
    q_TNH, k_TKH, v_TKH = heads_TNH.split((dims.heads, dims.kv_heads, dims.kv_heads), dim=1)
    q_TNH = rotate_pairs(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate_pairs(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(q_TNH, w, pages, step, scale=dims.head_dim ** -0.5)  # reads K/V pages
    return project(o_TNH.flatten(1), w.o, w.o_bias)


def normed_weights(dims: Dims) -> list[weights.Weight]:
    # spec: attention.normed
    return [
        *weights.linear("qkv", {
            "self_attn.q_proj": dims.heads * dims.head_dim,
            "self_attn.k_proj": dims.kv_heads * dims.head_dim,
            "self_attn.v_proj": dims.kv_heads * dims.head_dim,
        }, dims.hidden, out="heads", bias=dims.bias),
        *weights.linear("o", {"self_attn.o_proj": dims.hidden}, dims.heads * dims.head_dim,
            into="heads", bias=dims.bias),
        weights.head_norm("q_norm", dims.heads, dims.head_dim, "self_attn.q_norm"),
        weights.head_norm("k_norm", dims.kv_heads, dims.head_dim, "self_attn.k_norm"),
    ]


def normed_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.normed
    pages = step.pages["normed"]
    heads_TNH = project(x_TD, w.qkv, w.qkv_bias).unflatten(-1, (-1, dims.head_dim))
    q_TNH, k_TKH, v_TKH = heads_TNH.split((dims.heads, dims.kv_heads, dims.kv_heads), dim=1)
    q_TNH = layer_norm(q_TNH, w.q_norm, None, dims.eps)
    k_TKH = layer_norm(k_TKH, w.k_norm, None, dims.eps)
    q_TNH = rotate_pairs(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate_pairs(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(q_TNH, w, pages, step, scale=dims.head_dim ** -0.5)  # reads K/V pages
    return project(o_TNH.flatten(1), w.o, w.o_bias)


def state(dims: Dims) -> dict[str, State]:
    """What a layer of each entry keeps from step to step."""
    return {
        "bare": Pages(dims.kv_heads, dims.head_dim),
        "normed": Pages(dims.kv_heads, dims.head_dim),
    }


def rope_tables(dims: Dims, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, each (length, rotated / 2), by attention entry."""
    rope = dims.rope.tables(length, torch.float32, device, rounded=dtype)
    return {"bare": rope, "normed": rope}
