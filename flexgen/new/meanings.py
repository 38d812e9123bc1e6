"""What fields of config.json mean: where a spec says it, or that the language cannot say it yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """`place` is the spec path that says it; None where the language has no words for it."""

    feature: str
    place: str | None = None


def _each(feature: str, place: str | None, *fields: str) -> dict[str, Meaning]:
    return dict.fromkeys(fields, Meaning(feature, place))


MEANINGS: dict[str, Meaning] = {
    # what the language can say
    **_each("a window of visible keys", "attention.*.window", "sliding_window", "attention_window_size"),
    **_each("which layers slide", "schedule", "layer_types", "sliding_window_pattern", "_sliding_window_pattern",
            "max_window_layers", "use_sliding_window"),
    **_each("a soft cap on attention scores", "attention.*.softcap", "attn_logit_softcapping"),
    **_each("a soft cap on logits", "head.softcap", "final_logit_softcapping"),
    **_each("the scale of attention scores", "attention.*.scale", "query_pre_attn_scalar", "attention_multiplier",
            "attn_scale"),
    **_each("biases of the projections", "attention.*.bias", "attention_bias", "qkv_bias", "use_bias", "use_qkv_bias"),
    **_each("biases of the MLP", "mlp.*.bias", "mlp_bias"),
    **_each("norms of queries and keys", "attention.*.q_norm", "use_qk_norm", "qk_norm", "qk_layernorm"),
    **_each("the scale of the embedding", "embedding.scale", "embedding_multiplier", "scale_emb"),
    **_each("a factor on each residual branch", "block", "residual_multiplier", "scale_depth"),
    **_each("attention and MLP in parallel", "block", "use_parallel_residual", "parallel_attn"),
    **_each("the number of experts", "moe.*.experts", "num_experts", "num_local_experts", "n_routed_experts",
            "moe_num_experts"),
    **_each("experts a token uses", "moe.*.top_k", "num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_k"),
    **_each("the width of an expert", "moe.*.size", "moe_intermediate_size", "expert_intermediate_size"),
    **_each("whether the chosen weights sum to one", "moe.*.router.normalise", "norm_topk_prob"),
    **_each("a shared expert: an MLP beside the routed ones", "block", "n_shared_experts", "num_shared_experts",
            "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    **_each("which layers have experts", "schedule", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step",
            "mlp_only_layers", "interleave_moe_layer_step", "moe_layers", "moe_layer_start_index"),
    **_each("layers without rope", "attention.*.rope", "no_rope_layers", "no_rope_layer_interval", "no_rope_layer_pattern"),
    **_each("rope that turns a part of each head", "ropes.*.parameters", "partial_rotary_factor", "rotary_pct", "rotary_dim"),
    **_each("rope of the sliding layers", "ropes", "rope_local_base_freq", "local_rope_theta"),
    **_each("the activation", "mlp.*.act", "hidden_act", "hidden_activation", "activation_function", "hidden_activation_fn"),
    **_each("per-layer embeddings", "layer_inputs", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    **_each("layers that read the K/V of earlier ones", "attention.*.kv_of", "num_kv_shared_layers"),
    **_each("gated-delta layers", "gdn", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
            "linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval"),
    **_each("the epsilon of norms", "norms.*.eps", "rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon",
            "norm_epsilon", "layernorm_epsilon"),
    **_each("a factor on the logits", "head.scale", "logits_scaling", "logit_scale", "lm_head_multiplier", "dim_model_base"),
    **_each("groups of experts, of which some are kept", "moe.*.router.groups", "n_group", "topk_group", "num_expert_group",
            "topk_method"),
    **_each("a factor on the routed sum", "moe.*.router.scale", "routed_scaling_factor", "moe_routed_scaling_factor"),
    **_each("a bias that moves the choice of experts", "moe.*.router.choice_bias", "e_score_correction_bias",
            "use_expert_bias", "moe_router_enable_expert_bias"),
    **_each("rope on neighbouring pairs of dims", "ropes.*.layout", "rope_interleave", "rope_interleaved"),
    **_each("attention in chunks", "attention.*.chunk", "attention_chunk_size"),
    **_each("a query scale that depends on the position", "attention.*.query_scale", "attn_temperature_tuning", "floor_scale"),
    **_each("clamped queries, keys and values", "attention.*.clip", "clip_qkv"),
    **_each("positions: learned, or a bias of the scores", "embedding.positions or attention.*.alibi", "n_positions",
            "position_embedding_type", "alibi"),
    **_each("training only", "checkpoint.ignore", "resid_pdrop", "embd_pdrop", "attn_pdrop", "emb_pdrop",
            "residual_dropout", "embedding_dropout", "router_jitter_noise", "router_z_loss_coef", "num_logits_to_keep",
            "num_nextn_predict_layers", "pretraining_tp", "moe_jitter_eps", "moe_loss_weight", "aux_loss_alpha", "seq_aux"),
    # what it cannot
    **_each("multi-head latent attention (compressed K/V)", None, "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "qk_head_dim", "v_head_dim"),
    **_each("Mamba layers", None, "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_n_heads", "mamba_d_head", "mamba_d_ssm",
            "mamba_n_groups", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "mamba_num_heads", "mamba_head_dim",
            "state_size", "ssm_state_size", "time_step_rank", "conv_kernel", "mamba_rms_norm", "mamba_norm_before_gate"),
    **_each("short-convolution layers", None, "conv_L_cache", "conv_bias"),
    **_each("sparse attention with an indexer", None, "index_topk", "index_n_heads", "index_head_dim"),
    **_each("AltUp and Laurel streams", None, "altup_num_inputs", "altup_active_idx", "laurel_rank", "activation_sparsity_pattern"),
    **_each("several multipliers inside layers", None, "mlp_multipliers", "key_multiplier", "attention_out_multiplier",
            "attention_in_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier"),
}  # fmt: skip
"""Fields beyond those that every spec reads, after the config classes of transformers."""
