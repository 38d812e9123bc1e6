"""What families call one number in config.json. transformers reads some files by one name and writes them by another."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SYNONYMS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "block_ff_dim"),
    "rms_norm_eps": ("norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_local_experts": ("num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("top_k_experts", "moe_top_k", "moe_topk", "moe_k"),
    "moe_intermediate_size": ("expert_intermediate_size", "intermediate_size"),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    "vocab_size": ("padded_vocab_size",),
    "head_dim": ("attention_head_dim", "kv_channels"),
})
"""Other names of the fields that specs read, the likeliest first."""
