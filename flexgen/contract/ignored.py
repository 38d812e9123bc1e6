"""Fields of config.json without effect on a forward pass, each with its reason. `hidden_act` is not one of them."""

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
    }
)
