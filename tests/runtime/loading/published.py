"""Fields that published config.json files of each family carry beside the sizes, as public copies show them.

Each entry is laid over the family's tiny config: the sizes are those of the tests, everything else is as released or as the
tool named left it.
"""

from __future__ import annotations

from typing import Any

WRITTEN = {"architectures": ["X"], "initializer_range": 0.02, "attention_dropout": 0.0, "use_cache": True, "torch_dtype": "float32",
           "transformers_version": "4.52.0", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}  # fmt: skip
"""What every writer leaves."""

UNSLOTH = {"unsloth_fixed": True, "unsloth_version": "2025.6.1", "_attn_implementation_autoset": True}
OLD = {"max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1, "num_beam_groups": 1,
       "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
       "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None,
       "num_return_sequences": 1, "output_scores": False, "return_dict_in_generate": False, "forced_bos_token_id": None,
       "forced_eos_token_id": None, "remove_invalid_values": False, "exponential_decay_length_penalty": None,
       "suppress_tokens": None, "begin_suppress_tokens": None, "torchscript": False, "pruned_heads": {}, "tf_legacy_loss": False,
       "use_bfloat16": False, "tie_encoder_decoder": False, "is_decoder": False, "cross_attention_hidden_size": None,
       "add_cross_attention": False, "decoder_start_token_id": None, "sep_token_id": None, "prefix": None,
       "tokenizer_class": None, "return_dict": True, "output_hidden_states": False, "output_attentions": False,
       "chunk_size_feed_forward": 0, "is_encoder_decoder": False, "finetuning_task": None, "task_specific_params": None,
       "problem_type": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}  # fmt: skip
"""What transformers 4 wrote for a config whose nested parts it spelt out."""

QWEN3 = {"rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "layer_types": ..., "max_window_layers": 4}
QWEN3_5 = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "full_attention_interval": 4,
           "mtp_use_dedicated_embeddings": False, "partial_rotary_factor": 0.25}  # fmt: skip
VISION = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8,
          "vision_config": {"depth": 24, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": []}}  # fmt: skip
GEMMA4 = {"image_token_id": 5, "audio_token_id": 6, "video_token_id": 9, "boi_token_id": 7, "eoi_token_id": 8, "boa_token_id": 10,
          "eoa_token_id": 11, "eoa_token_index": 11, "vision_soft_tokens_per_image": 280, "initializer_range": 0.02,
          "vision_config": {"model_type": "gemma4_vision"}, "audio_config": {"model_type": "gemma4_audio"}, "dtype": "float32",
          "transformers_version": "5.5.0"}  # fmt: skip
GPT_OSS = {"experts_per_token": 2, "initial_context_length": 64, "output_router_logits": False, "router_aux_loss_coef": 0.9,
           "swiglu_limit": 7.0, "rms_norm_eps": 1e-5}  # fmt: skip

MOE = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
ENDS = {"eos_token_id": [1, 4]}

PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "Llama 2": ("llama", {**WRITTEN, "pretraining_tp": 1, "rope_scaling": None}, None),
    "Llama 3.2": ("llama", {**WRITTEN, "pretraining_tp": 1, "eos_token_id": [1, 2, 3]}, None),
    "Llama 3.2 by unsloth": ("llama", {**WRITTEN, **UNSLOTH, "pretraining_tp": 1}, None),
    "Llama finetuned with NEFTune": ("llama", {**WRITTEN, "neftune_noise_alpha": 5, "_name_or_path": "base"}, None),
    "Llama of an old writer": ("llama", {**WRITTEN, "max_sequence_length": 2048, "pretraining_tp": 1}, None),
    "SmolLM2": ("llama", {**WRITTEN, "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1,
                          "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}}, None),
    "Llama spelt out by transformers 4": ("llama", {**WRITTEN, **OLD}, None),
    "Llama with a stated window": ("llama", {**WRITTEN, "use_sliding_window": False, "use_mrope": False}, None),
    "Qwen3": ("qwen3", {**WRITTEN, **QWEN3}, None),
    "Qwen3 by unsloth": ("qwen3", {**WRITTEN, **QWEN3, **UNSLOTH}, None),
    "Qwen3 of transformers 5": ("qwen3", {"architectures": ["X"], "dtype": "float32", "_experts_implementation": None}, None),
    "Qwen3 MoE": ("qwen3_moe", {**WRITTEN, "decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False,
                                "router_aux_loss_coef": 0.001, "rope_scaling": None, "max_window_layers": 48}, None),
    "Qwen3 MoE by unsloth": ("qwen3_moe", {**WRITTEN, **UNSLOTH, "output_router_logits": False}, None),
    "gpt-oss": ("gpt_oss", {**WRITTEN, **GPT_OSS,
                            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}, None),
    "gpt-oss in 16 bits by unsloth": ("gpt_oss", {**WRITTEN, **GPT_OSS, **UNSLOTH}, None),
    "Qwen3.5": ("qwen3_5", {**QWEN3_5, "mlp_only_layers": [], "pad_token_id": None}, VISION),
    "Qwen3.5 by unsloth": ("qwen3_5", {**QWEN3_5, "mlp_only_layers": []}, {**VISION, **UNSLOTH, "use_cache": False}),
    "Qwen3.5, text alone": ("qwen3_5", {**QWEN3_5, "mlp_only_layers": []}, None),
    "Qwen3.5 MoE": ("qwen3_5_moe", {**QWEN3_5, **MOE, "mlp_only_layers": []}, VISION),
    "Gemma 4 31B": ("gemma4_dense", {"attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1}, {**GEMMA4, **ENDS}),
    "Gemma 4 26B A4B": ("gemma4_moe", {"attention_dropout": 0.0, "use_cache": True}, {**GEMMA4, **ENDS}),
    "Gemma 4 E2B": ("gemma4_e", {"attention_dropout": 0.0, **OLD}, GEMMA4),
    "Gemma 4 E4B by unsloth": ("gemma4_e", {**UNSLOTH}, {**GEMMA4, **UNSLOTH, **ENDS}),
}  # fmt: skip
"""By release: its family, the fields of the text part, and those beside it where the file nests it (None: it does not)."""
