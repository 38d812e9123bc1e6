# Generated from specs/qwen3_5.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/qwen3_5.yaml`.
"""How tokens of qwen3_5 see each other: one function an attention or mixer, and the rotary tables.

T tokens   D model width   N query heads   K key/value heads   H head width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.contract.abi import Layer, Step
from flexgen.runtime.ops.attention import attend, write_pages
from flexgen.runtime.ops.elementwise import gated_rms_norm, project, rms_norm_one_plus, rotate
from flexgen.runtime.ops.recurrent import causal_conv, delta_rule

if TYPE_CHECKING:
    from .walker import Dims


def rope_tables(dims: Dims, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, each (length, rotated / 2), by attention entry."""
    rope = dims.rope.tables(length, dtype, device)
    return {
        "full": rope,
    }


def full_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.full
    pages = step.pages["full"]
    q_T, k_T, v_T = project(x_TD, w.qkv, w.qkv_bias).split(
        (dims.heads * 2 * dims.head_dim, dims.kv_heads * dims.head_dim, dims.kv_heads * dims.head_dim), dim=-1
    )
    q_TNH, gate_TNH = q_T.unflatten(-1, (dims.heads, 2 * dims.head_dim)).chunk(2, dim=-1)
    k_TKH = k_T.unflatten(-1, (dims.kv_heads, dims.head_dim))
    v_TKH = v_T.unflatten(-1, (dims.kv_heads, dims.head_dim))
    q_TNH = rms_norm_one_plus(q_TNH, w.q_norm, dims.eps)
    k_TKH = rms_norm_one_plus(k_TKH, w.k_norm, dims.eps)
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
    o_TNH = o_TNH * torch.sigmoid(gate_TNH)
    return project(o_TNH.flatten(1), w.o, w.o_bias)


def gdn_mixer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: gdn.gdn
    keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
    qkv_T, z_T, b_TN, a_TN = project(x_TD, w.gdn_in).split(
        (2 * keys + values, values, dims.value_heads, dims.value_heads), dim=-1
    )
    qkv_T = causal_conv(  # reads and writes state
        qkv_T, w.gdn_conv.squeeze(1), w.gdn_conv_state, step, act="silu"
    )
    q_T, k_T, v_T = qkv_T.split((keys, keys, values), dim=-1)
    o_TNH = delta_rule(  # reads and writes state
        q_T.unflatten(-1, (dims.key_heads, dims.key_dim)),
        k_T.unflatten(-1, (dims.key_heads, dims.key_dim)),
        v_T.unflatten(-1, (dims.value_heads, dims.value_dim)),
        -w.gdn_a_log.float().exp() * F.softplus(a_TN.float() + w.gdn_dt_bias),
        torch.sigmoid(b_TN),
        w.gdn_state,
        step,
    )
    z_TNH = z_T.unflatten(-1, (dims.value_heads, dims.value_dim))
    return project(gated_rms_norm(o_TNH, z_TNH, w.gdn_norm, dims.eps).flatten(1), w.gdn_out)
