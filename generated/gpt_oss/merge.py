# Generated from specs/gpt_oss.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gpt_oss.yaml`.
"""Where adapters of gpt_oss land. Every merge starts from the pristine base and writes `out`.

Each function returns how many tensors it changed, so that a merge that does nothing cannot pass for one that did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flexgen.runtime.loading.lora import Deltas, merge_experts, merge_rows

if TYPE_CHECKING:
    from .walker import Dims

# module of an adapter -> the weights that hold it
LORA: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("embed_tokens",),
    "lm_head": ("lm_head",),
    "self_attn.q_proj": ("qkv",),
    "self_attn.k_proj": ("qkv",),
    "self_attn.v_proj": ("qkv",),
    "self_attn.o_proj": ("o",),
    "mlp.experts.gate_up_proj": ("moe_gate_up",),
    "mlp.experts.gate_up_proj_bias": ("moe_gate_up_bias",),
    "mlp.experts.down_proj": ("moe_down",),
    "mlp.experts.down_proj_bias": ("moe_down_bias",),
}


def merge_embed_tokens(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: embedding, head
    return merge_rows(out, base, {"embed_tokens": d.vocab}, deltas)


def merge_lm_head(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: embedding, head
    return merge_rows(out, base, {"lm_head": d.vocab}, deltas)


def merge_qkv(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: attention.full
    rows = {
        "self_attn.q_proj": d.heads * d.head_dim,
        "self_attn.k_proj": d.kv_heads * d.head_dim,
        "self_attn.v_proj": d.kv_heads * d.head_dim,
    }
    return merge_rows(out, base, rows, deltas)


def merge_o(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: attention.full
    return merge_rows(out, base, {"self_attn.o_proj": d.hidden}, deltas)


def merge_moe_gate_up(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: moe.moe
    per_expert = ()
    return merge_experts(out, base, "mlp.experts.gate_up_proj", per_expert, deltas, transposed=True)


def merge_moe_gate_up_bias(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: moe.moe
    return merge_rows(out, base, {"mlp.experts.gate_up_proj_bias": d.experts}, deltas)


def merge_moe_down(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: moe.moe
    per_expert = ()
    return merge_experts(out, base, "mlp.experts.down_proj", per_expert, deltas, transposed=True)


def merge_moe_down_bias(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: moe.moe
    return merge_rows(out, base, {"mlp.experts.down_proj_bias": d.experts}, deltas)


MERGES = {
    "embed_tokens": merge_embed_tokens,
    "lm_head": merge_lm_head,
    "qkv": merge_qkv,
    "o": merge_o,
    "moe_gate_up": merge_moe_gate_up,
    "moe_gate_up_bias": merge_moe_gate_up_bias,
    "moe_down": merge_moe_down,
    "moe_down_bias": merge_moe_down_bias,
}
