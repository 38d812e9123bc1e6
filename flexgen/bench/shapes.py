"""Text configs of real checkpoints, in full size. Weights are random: they serve to measure speed, not answers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

_CONTEXT = {"max_position_embeddings": 8192, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
_SILU = {"hidden_act": "silu"}


def _rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


def _heads(query: int, key_value: int, width: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": key_value, "head_dim": width}


SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        **_heads(32, 8, 128),
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": _rope(500000.0),
        **_SILU,
        **_CONTEXT,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        **_heads(32, 8, 128),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": _rope(1e6),
        **_SILU,
        **_CONTEXT,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        **_heads(32, 4, 128),
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": _rope(1e7),
        **_SILU,
        **_CONTEXT,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        **_heads(64, 8, 64),
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "rope_parameters": _rope(
            150000.0,
            "yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
        **_SILU,
        **_CONTEXT,
    },
    "gemma4-26b-a4b": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        **_heads(16, 8, 256),
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": _rope(10000.0),
            "full_attention": _rope(1e6, "proportional", partial_rotary_factor=0.25),
        },
        **_CONTEXT,
    },
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        **_heads(16, 2, 256),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "tie_word_embeddings": False,
        "rope_parameters": _rope(1e7, partial_rotary_factor=0.25),
        **_SILU,
        **_CONTEXT,
    },
}
"""By the name that results carry."""

LOADING: dict[str, dict[str, Any]] = {"qwen3.6-35b-a3b-bf16-state": {"mamba_ssm_cache_dtype": "bfloat16"}}
"""What `Model.load` is given beside the config."""

SHAPES["qwen3.6-35b-a3b-bf16-state"] = SHAPES["qwen3.6-35b-a3b"]


def shape(name: str, layers: int | None = None) -> dict[str, Any]:
    """The config of `name`, a copy; with `layers`, of that many layers, the first ones. Raises ValueError for an unknown one."""
    if name not in SHAPES:
        raise ValueError(f"no model {name!r} to measure; there are {', '.join(SHAPES)}")
    config = deepcopy(SHAPES[name])
    if layers is not None:
        if not 1 <= layers <= config["num_hidden_layers"]:
            raise ValueError(f"layers={layers} is out of range: {name} has 1 to {config['num_hidden_layers']}")
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config
