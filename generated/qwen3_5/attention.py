# Generated from specs/qwen3_5.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/qwen3_5.yaml`.
"""How tokens of qwen3_5 see each other: for each attention or mixer its weights and its function.

T tokens   D model width   N query heads   K key/value heads   H head width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.contract import weights
from flexgen.contract.abi import Layer, Step
from flexgen.contract.state import Pages, Slots, State
from flexgen.runtime.ops.attention import attend, write_pages
from flexgen.runtime.ops.elementwise import gated_rms_norm, project, rms_norm_one_plus, rotate
from flexgen.runtime.ops.recurrent import causal_conv, delta_rule

if TYPE_CHECKING:
    from .walker import Dims


def full_weights(dims: Dims) -> list[weights.Weight]:
    # spec: attention.full
    return [
        *weights.linear("qkv", {
            "self_attn.q_proj": 2 * dims.heads * dims.head_dim,
            "self_attn.k_proj": dims.kv_heads * dims.head_dim,
            "self_attn.v_proj": dims.kv_heads * dims.head_dim,
        }, dims.hidden, out="heads", bias=dims.attention_bias),
        *weights.linear("o", {"self_attn.o_proj": dims.hidden}, dims.heads * dims.head_dim,
            into="heads", bias=dims.attention_bias),
        weights.norm("q_norm", dims.head_dim, "self_attn.q_norm"),
        weights.norm("k_norm", dims.head_dim, "self_attn.k_norm"),
    ]


def full_attention(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: attention.full
    pages = step.pages["full"]
    heads_TNH = project(x_TD, w.qkv, w.qkv_bias).unflatten(-1, (-1, dims.head_dim))
    q_TNH, k_TKH, v_TKH = heads_TNH.split((2 * dims.heads, dims.kv_heads, dims.kv_heads), dim=1)
    q_TNH, gate_TNH = q_TNH.unflatten(1, (-1, 2)).unbind(2)
    q_TNH = rms_norm_one_plus(q_TNH, w.q_norm, dims.eps)
    k_TKH = rms_norm_one_plus(k_TKH, w.k_norm, dims.eps)
    q_TNH = rotate(q_TNH, w.rope_cos, w.rope_sin, step.positions_T)
    k_TKH = rotate(k_TKH, w.rope_cos, w.rope_sin, step.positions_T)
    write_pages(w, k_TKH, v_TKH, pages)  # writes K/V pages
    o_TNH = attend(q_TNH, w, pages, step, scale=dims.head_dim ** -0.5)  # reads K/V pages
    o_TNH = o_TNH * torch.sigmoid(gate_TNH)
    return project(o_TNH.flatten(1), w.o, w.o_bias)


def gdn_weights(dims: Dims) -> list[weights.Weight]:
    # spec: gdn.gdn
    return [
        *weights.linear("gdn_in", {
            "linear_attn.in_proj_qkv": 2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim,
            "linear_attn.in_proj_z": dims.value_heads * dims.value_dim,
            "linear_attn.in_proj_b": dims.value_heads,
            "linear_attn.in_proj_a": dims.value_heads,
        }, dims.hidden, out="heads"),
        weights.convolution("gdn_conv",
            2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim, dims.kernel, "linear_attn.conv1d"),
        weights.vector("gdn_a_log", dims.value_heads, "linear_attn.A_log", of="heads"),
        weights.bias("gdn_dt_bias", (dims.value_heads,), "linear_attn.dt_bias", axes=("heads",)),
        weights.norm("gdn_norm", dims.value_dim, "linear_attn.norm"),
        *weights.linear("gdn_out", {"linear_attn.out_proj": dims.hidden}, dims.value_heads * dims.value_dim,
            into="heads"),
    ]


def gdn_mixer(w: Layer, x_TD: Tensor, dims: Dims, step: Step) -> Tensor:
    # spec: gdn.gdn
    keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
    qkv_T, z_T, b_TN, a_TN = project(x_TD, w.gdn_in).split(
        (2 * keys + values, values, dims.value_heads, dims.value_heads), dim=-1
    )
    # reads and writes state
    qkv_T = causal_conv(qkv_T, w.gdn_conv.squeeze(1), w.gdn_conv_state, step, act="silu")
    q_T, k_T, v_T = qkv_T.split((keys, keys, values), dim=-1)
    decay_TN = -w.gdn_a_log.float().exp() * F.softplus(a_TN.float() + w.gdn_dt_bias)
    o_TNH = delta_rule(  # reads and writes state
        q_T.unflatten(-1, (dims.key_heads, dims.key_dim)),
        k_T.unflatten(-1, (dims.key_heads, dims.key_dim)),
        v_T.unflatten(-1, (dims.value_heads, dims.value_dim)),
        decay_TN,
        torch.sigmoid(b_TN),
        w.gdn_state,
        step,
    )
    z_TNH = z_T.unflatten(-1, (dims.value_heads, dims.value_dim))
    return project(gated_rms_norm(o_TNH, z_TNH, w.gdn_norm, dims.eps).flatten(1), w.gdn_out)


def state(dims: Dims) -> dict[str, State]:
    """What a layer of each entry keeps from step to step."""
    return {
        "full": Pages(dims.kv_heads, dims.head_dim),
        "gdn": Slots({
            "gdn_conv_state": ((2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim, dims.kernel), None),
            "gdn_state": ((dims.value_heads, dims.key_dim, dims.value_dim), torch.float32),
        }),
    }


def rope_tables(dims: Dims, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """cos and sin, each (length, rotated / 2), by attention entry."""
    rope = dims.rope.tables(length, dtype, device)
    return {"full": rope}
