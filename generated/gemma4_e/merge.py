# Generated from specs/gemma4_e.yaml. Do not edit: change the spec or the templates,
# then run `flexgen build specs/gemma4_e.yaml`.
"""Where adapters of gemma4_e land. Every merge starts from the pristine base and writes `out`.

Each function returns how many tensors it changed, so that a merge that does nothing cannot pass for one that did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flexgen.runtime.loading.lora import Deltas, merge_rows

if TYPE_CHECKING:
    from .walker import Dims

# module of an adapter -> the weights that hold it
LORA: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("embed_tokens",),
    "per_layer_model_projection": ("per_layer_model_projection",),
    "embed_tokens_per_layer": ("embed_tokens_per_layer",),
    "lm_head": ("lm_head",),
    "per_layer_input_gate": ("per_layer_input_gate",),
    "per_layer_projection": ("per_layer_projection",),
    "self_attn.q_proj": ("qkv", "q"),
    "self_attn.k_proj": ("qkv",),
    "self_attn.v_proj": ("qkv",),
    "self_attn.o_proj": ("o",),
    "mlp.gate_proj": ("mlp_gate_up", "wide_gate_up"),
    "mlp.up_proj": ("mlp_gate_up", "wide_gate_up"),
    "mlp.down_proj": ("mlp_down", "wide_down"),
}


def merge_embed_tokens(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: embedding, head
    return merge_rows(out, base, {"embed_tokens": d.vocab}, deltas)


def merge_per_layer_model_projection(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: embedding, head
    return merge_rows(out, base, {"per_layer_model_projection": d.layers * d.input_size}, deltas)


def merge_embed_tokens_per_layer(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: embedding, head
    return merge_rows(out, base, {"embed_tokens_per_layer": d.input_vocab}, deltas)


def merge_lm_head(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: embedding, head
    return merge_rows(out, base, {"lm_head": d.vocab}, deltas)


def merge_per_layer_input_gate(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: block
    return merge_rows(out, base, {"per_layer_input_gate": d.input_size}, deltas)


def merge_per_layer_projection(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: block
    return merge_rows(out, base, {"per_layer_projection": d.hidden}, deltas)


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


def merge_q(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: attention.sliding_shared
    return merge_rows(out, base, {"self_attn.q_proj": d.heads * d.head_dim}, deltas)


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


def merge_wide_gate_up(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: mlp.wide
    rows = {
        "mlp.gate_proj": d.wide_size,
        "mlp.up_proj": d.wide_size,
    }
    return merge_rows(out, base, rows, deltas)


def merge_wide_down(out: Tensor, base: Tensor, deltas: Deltas, d: Dims) -> int:
    # spec: mlp.wide
    return merge_rows(out, base, {"mlp.down_proj": d.hidden}, deltas)


MERGES = {
    "embed_tokens": merge_embed_tokens,
    "per_layer_model_projection": merge_per_layer_model_projection,
    "embed_tokens_per_layer": merge_embed_tokens_per_layer,
    "lm_head": merge_lm_head,
    "per_layer_input_gate": merge_per_layer_input_gate,
    "per_layer_projection": merge_per_layer_projection,
    "qkv": merge_qkv,
    "o": merge_o,
    "q": merge_q,
    "mlp_gate_up": merge_mlp_gate_up,
    "mlp_down": merge_mlp_down,
    "wide_gate_up": merge_wide_gate_up,
    "wide_down": merge_wide_down,
}
