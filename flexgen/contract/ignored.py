"""Fields of config.json without effect on a forward pass, each with its reason. `hidden_act` is not one of them.

The loader reads the tables; `flexgen new` asks the first which fields a draft can leave out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "_name_or_path": "where the file came from",
        "_model_name_or_path": "where the file came from",
        "unk_token_id": "read by the tokenizer",
        "architectures": "names the class that transformers would build",
        "auto_map": "names remote code, which never runs here",
        "attention_dropout": "training only",
        "hidden_dropout": "training only",
        "initializer_range": "training only",
        "router_aux_loss_coef": "training only",
        "output_router_logits": "what transformers returns",
        "output_attentions": "what transformers returns",
        "output_hidden_states": "what transformers returns",
        "return_dict": "what transformers returns",
        "use_cache": "the engine always keeps K/V",
        "bos_token_id": "read by the tokenizer",
        "eos_token_id": "read where generation stops",
        "pad_token_id": "requests are packed, never padded",
        "max_position_embeddings": "read as the limit of max_model_len",
        "torch_dtype": "read as the default dtype",
        "dtype": "read as the default dtype",
        "transformers_version": "which version wrote the file",
        "model_type": "read when the spec is chosen",
        "chunk_size_feed_forward": "how transformers splits work",
        "is_encoder_decoder": "decoders only",
        "id2label": "classification heads",
        "label2id": "classification heads",
        "problem_type": "classification heads",
        "task_specific_params": "defaults of pipelines",
        "finetuning_task": "where the file came from",
        "_commit_hash": "where the file came from",
        "unsloth_fixed": "which tool wrote the file",
        "unsloth_version": "which tool wrote the file",
        "model_name": "where the file came from",
        "is_llama_config": "which tool wrote the file",
        "transformers.js_config": "read by another runtime",
        "_attn_implementation": "which kernels transformers would choose",
        "_attn_implementation_autoset": "which kernels transformers would choose",
        "_attn_implementation_internal": "which kernels transformers would choose",
        "attn_implementation": "which kernels transformers would choose",
        "_experts_implementation": "which kernels transformers would choose",
        "use_flash_attention": "which kernels transformers would choose",
        "use_flash_attention_2": "which kernels transformers would choose",
        "torchscript": "how transformers exports",
        "tf_legacy_loss": "training only",
        "use_bfloat16": "TensorFlow only",
        "neftune_noise_alpha": "training only",
        "gradient_checkpointing": "training only",
        "use_reentrant": "training only",
        "embd_pdrop": "training only",
        "attn_pdrop": "training only",
        "resid_pdrop": "training only",
        "z_loss_coefficient": "training only",
        "router_z_loss_coef": "training only",
        "router_jitter_noise": "training only",
        "max_sequence_length": "how long training texts were",
        "model_max_length": "read by the tokenizer",
        "tokenizer_class": "read by the tokenizer",
        "prefix": "defaults of pipelines",
        "sep_token_id": "read by the tokenizer",
        "decoder_start_token_id": "encoder-decoders only",
        "cross_attention_hidden_size": "encoder-decoders only",
        "is_decoder": "decoders only",
        "pruned_heads": "heads that training removed; the shapes of the file's tensors say so too",
        "keys_to_ignore_at_inference": "what transformers returns",
        "classifier_dropout": "classification heads",
        "num_labels": "classification heads",
        **dict.fromkeys(
            (
                "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample",
                "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
                "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff",
                "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty", "length_penalty",
                "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
                "num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate",
                "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
                "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
                "penalty_alpha",
            ),
            "a default of transformers 4's generate; SamplingParams alone say how to sample",
        ),
    }
)  # fmt: skip

STATED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "mlp_only_layers": (([],), "no layer is an exception to the schedule"),
        "decoder_sparse_step": ((1,), "no layer is an exception to the schedule"),
        "use_sliding_window": ((False,), "every token is seen"),
        "rope_interleaved": ((False,), "dim j turns with dim j + d/2"),
        "use_mrope": ((False,), "one position a token"),
        "add_cross_attention": ((False,), "decoders only"),
        "tie_encoder_decoder": ((False,), "decoders only"),
        "use_parallel_residual": ((False,), "attention and MLP follow each other"),
        "scale_attn_by_inverse_layer_idx": ((False,), "all layers scale scores alike"),
    }
)
"""Fields that a file may state although the spec reads no such thing: with these values they say what it does anyway."""

OUTSIDE: Mapping[str, str] = MappingProxyType(
    {
        "vision_soft_tokens_per_image": "tokens of an image",
        "mm_tokens_per_image": "tokens of an image",
        "audio_seq_length": "tokens of a recording",
        "image_seq_length": "tokens of an image",
        "projector_hidden_act": "between images and text",
        "multimodal_projector_bias": "between images and text",
        "spatial_merge_size": "between images and text",
        "vision_feature_layer": "between images and text",
        "vision_feature_select_strategy": "between images and text",
        "language_model_only": "which modalities a server offers",
    }
)
"""Fields beside the nested text config of a multimodal file that are about other modalities, each with its reason."""

OUTSIDE_ENDINGS = ("_config", "_token_id", "_token_index", "_token_ids")
"""How such fields end that name a nested config of another modality or a token that stands for it."""
