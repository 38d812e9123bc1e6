# Generated from specs/gemma4_moe.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gemma4_moe.yaml`.
"""Where adapters of gemma4_moe land. Every merge starts from the pristine base and writes `out`.

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
    "self_attn.q_proj": ("qkv", "qk"),
    "self_attn.k_proj": ("qkv", "qk"),
    "self_attn.v_proj": ("qkv",),
    "self_attn.o_proj": ("o",),
    "mlp.gate_proj": ("mlp_gate_up",),
    "mlp.up_proj": ("mlp_gate_up",),
    "mlp.down_proj": ("mlp_down",),
    "experts.gate_up_proj": ("moe_gate_up",),
    "experts.down_proj": ("moe_down",),
}


def merge_embed_tokens(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: embedding, head
    return merge_rows(out, base, {"embed_tokens": d.vocab}, deltas)


def merge_lm_head(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: embedding, head
    return merge_rows(out, base, {"lm_head": d.vocab}, deltas)


def merge_qkv(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: attention.sliding
    rows = {
        "self_attn.q_proj": d.heads * d.head_dim,
        "self_attn.k_proj": d.kv_heads * d.head_dim,
        "self_attn.v_proj": d.kv_heads * d.head_dim,
    }
    return merge_rows(out, base, rows, deltas)


def merge_o(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: attention.sliding
    return merge_rows(out, base, {"self_attn.o_proj": d.hidden}, deltas)


def merge_qk(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: attention.full
    rows = {
        "self_attn.q_proj": d.heads * d.full_head_dim,
        "self_attn.k_proj": d.full_kv_heads * d.full_head_dim,
    }
    return merge_rows(out, base, rows, deltas)


def merge_mlp_gate_up(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: mlp.mlp
    rows = {
        "mlp.gate_proj": d.size,
        "mlp.up_proj": d.size,
    }
    return merge_rows(out, base, rows, deltas)


def merge_mlp_down(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: mlp.mlp
    return merge_rows(out, base, {"mlp.down_proj": d.hidden}, deltas)


def merge_moe_gate_up(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: moe.moe
    per_expert = ()
    return merge_experts(out, base, "experts.gate_up_proj", per_expert, deltas, transposed=False)


def merge_moe_down(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: moe.moe
    per_expert = ()
    return merge_experts(out, base, "experts.down_proj", per_expert, deltas, transposed=False)


MERGES = {
    "embed_tokens": merge_embed_tokens,
    "lm_head": merge_lm_head,
    "qkv": merge_qkv,
    "o": merge_o,
    "qk": merge_qk,
    "mlp_gate_up": merge_mlp_gate_up,
    "mlp_down": merge_mlp_down,
    "moe_gate_up": merge_moe_gate_up,
    "moe_down": merge_moe_down,
}
