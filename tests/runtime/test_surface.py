"""The tables of vLLM's interface against vLLM 0.26's own names, and against what is there."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from flexgen import LLM, AsyncEngine, SamplingParams
from flexgen.runtime import surface
from flexgen.runtime.options import EngineOptions, Options
from tests.runtime.toy import Toy

ARGUMENTS = [
    "additional_config", "aggregate_engine_logging", "all2all_backend", "allow_deprecated_quantization",
    "allowed_local_media_path", "allowed_media_domains", "async_scheduling", "attention_backend",
    "attention_config", "block_size", "calculate_kv_scales", "chat_template", "code_revision",
    "collect_detailed_traces", "compilation_config", "config_format", "convert", "cp_kv_cache_interleave_size",
    "cpu_distributed_timeout_seconds", "cpu_offload_gb", "cpu_offload_params", "cudagraph_capture_sizes",
    "cudagraph_metrics", "data_parallel_address", "data_parallel_backend", "data_parallel_external_lb",
    "data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb", "data_parallel_rank",
    "data_parallel_rpc_port", "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank",
    "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "dcp_comm_backend",
    "dcp_kv_cache_interleave_size", "decode_context_parallel_size", "default_mm_loras", "device_ids",
    "diffusion_config", "disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce",
    "disable_hybrid_kv_cache_manager", "disable_log_stats", "disable_nccl_for_dp_synchronization",
    "disable_sliding_window", "distributed_executor_backend", "distributed_timeout_seconds", "download_dir",
    "dtype", "ec_transfer_config", "enable_bf16x3_router_gemm", "enable_chunked_prefill",
    "enable_cumem_allocator", "enable_dbo", "enable_elastic_ep", "enable_ep_weight_filter", "enable_eplb",
    "enable_expert_parallel", "enable_flashinfer_autotune", "enable_layerwise_nvtx_tracing",
    "enable_log_requests", "enable_logging_iteration_details", "enable_lora",
    "enable_mamba_cache_stochastic_rounding", "enable_mfu_metrics", "enable_mixed_moe_lora_format",
    "enable_mm_embeds", "enable_mm_processor_stats", "enable_moe_shared_loras", "enable_prefix_caching",
    "enable_prompt_embeds", "enable_return_routed_experts", "enable_sleep_mode", "enable_tower_connector_lora",
    "enforce_eager", "eplb_config", "expert_placement_strategy", "fail_on_environ_validation",
    "fully_sharded_loras", "gdn_prefill_backend", "generation_config", "gpu_memory_utilization", "hf_config_path",
    "hf_overrides", "hf_token", "ignore_patterns", "interleave_mm_strings", "io_processor_plugin",
    "ir_op_priority", "jit_monitor_mode", "jit_monitor_verbose", "kernel_config", "kv_cache_dtype",
    "kv_cache_dtype_skip_layers", "kv_cache_memory_bytes", "kv_cache_metrics", "kv_cache_metrics_sample",
    "kv_events_config", "kv_offloading_backend", "kv_offloading_size", "kv_sharing_fast_prefill",
    "kv_transfer_config", "language_model_only", "limit_mm_per_prompt", "linear_backend", "load_format",
    "logits_processors", "logprobs_mode", "long_prefill_token_threshold", "lora_dtype", "lora_target_modules",
    "mamba_backend", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "mamba_cache_philox_rounds",
    "mamba_config", "mamba_ssm_cache_dtype", "master_addr", "master_port", "max_cpu_loras",
    "max_cudagraph_capture_size", "max_logprobs", "max_long_partial_prefills", "max_lora_rank", "max_loras",
    "max_model_len", "max_num_batched_tokens", "max_num_partial_prefills", "max_num_scheduled_tokens",
    "max_num_seqs", "max_parallel_loading_workers", "media_io_kwargs", "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path", "mm_encoder_only", "mm_encoder_tp_mode", "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_kwargs", "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc", "model", "model_class_overrides", "model_impl", "model_loader_extra_config", "model_weights",
    "moe_backend", "nnodes", "node_rank", "num_gpu_blocks_override", "numa_bind", "numa_bind_cpus",
    "numa_bind_nodes", "offload_backend", "offload_group_size", "offload_num_in_group", "offload_params",
    "offload_prefetch_step", "optimization_level", "otlp_traces_endpoint", "override_attention_dtype",
    "override_generation_config", "performance_mode", "pipeline_parallel_size", "pooler_config",
    "prefill_context_parallel_size", "prefill_schedule_interval", "prefix_caching_hash_algo", "prefix_match_unit",
    "profiler_config", "pt_load_map_location", "quantization", "quantization_config", "ray_workers_use_nsight",
    "reasoning_config", "reasoning_parser", "reasoning_parser_plugin", "renderer_num_workers", "revision",
    "runner", "safetensors_load_strategy", "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads",
    "scheduler_cls", "scheduler_reserve_full_isl", "scheduling_policy", "seed", "served_model_name",
    "show_hidden_metrics_for_version", "shutdown_timeout", "skip_mm_profiling", "skip_tokenizer_init",
    "spec_method", "spec_model", "spec_tokens", "specialize_active_lora", "speculative_config", "stream_interval",
    "structured_outputs_config", "tensor_parallel_size", "tokenizer", "tokenizer_mode", "tokenizer_revision",
    "tokens_only", "trust_remote_code", "ubatch_size", "use_fp64_gumbel", "use_tqdm_on_load",
    "video_pruning_rate", "watermark", "weight_transfer_config", "worker_cls", "worker_extension_cls",
]  # fmt: skip
METHODS = [
    "apply_model", "chat", "collective_rpc", "enqueue", "enqueue_chat", "finish_weight_update",
    "from_engine_args", "generate", "get_default_sampling_params", "get_metrics", "get_tokenizer",
    "get_world_size", "init_weight_transfer_engine", "reset_mm_cache", "reset_prefix_cache", "sleep",
    "start_draft_weight_update", "start_profile", "start_weight_update", "stop_profile", "update_weights",
    "wait_for_completion", "wake_up", "beam_search", "encode", "embed", "classify", "score", "reward",
]  # fmt: skip
ASYNC = [
    "abort", "add_lora", "add_request", "check_health", "collective_rpc", "dead_error", "do_log_stats", "encode",
    "errored", "finish_weight_update", "from_engine_args", "from_vllm_config", "generate", "get_supported_tasks",
    "get_tokenizer", "init_weight_transfer_engine", "is_paused", "is_running", "is_sleeping", "is_stopped",
    "is_tracing_enabled", "list_loras", "notify_kv_transfer_request_rejected", "pause_generation", "pin_lora",
    "remove_lora", "reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache", "resume_generation",
    "scale_elastic_ep", "shutdown", "sleep", "start_draft_weight_update", "start_profile", "start_weight_update",
    "stop_profile", "tokenizer", "update_weights", "wait_for_requests_to_drain", "wake_up",
]  # fmt: skip
FIELDS = [
    "allowed_token_ids", "bad_words", "detokenize", "extra_args", "flat_logprobs", "frequency_penalty",
    "ignore_eos", "include_stop_str_in_output", "logit_bias", "logprob_token_ids", "logprobs", "max_tokens",
    "min_p", "min_tokens", "n", "output_kind", "output_text_buffer_length", "presence_penalty", "prompt_logprobs",
    "repetition_detection", "repetition_penalty", "routed_experts_prompt_start", "seed", "skip_clone",
    "skip_reading_prefix_cache", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids",
    "structured_outputs", "temperature", "thinking_token_budget", "top_k", "top_p",
]  # fmt: skip

BARE = {"skip_tokenizer_init": True, "max_model_len": 32, "num_gpu_blocks_override": 8, "max_num_seqs": 2}


def test_every_argument_is_in_one_table():
    known = {*surface.WORKING_ARGUMENTS, *surface.NEUTRAL_ARGUMENTS}
    assert set(ARGUMENTS) <= known
    assert known - set(ARGUMENTS) == {"swap_space"}  # of older scripts
    assert not set(surface.WORKING_ARGUMENTS) & surface.NEUTRAL_ARGUMENTS.keys()
    taken = {*inspect.signature(LLM.__init__).parameters, *EngineOptions.names()}
    assert set(surface.WORKING_ARGUMENTS) <= taken and not surface.NEUTRAL_ARGUMENTS.keys() & taken
    assert Options.__annotations__.keys() == set(EngineOptions.names()) - {"max_model_len"}


@pytest.mark.parametrize("name", surface.NEUTRAL_ARGUMENTS)
def test_an_argument_is_taken_where_it_changes_nothing_and_refused_by_name_elsewhere(name):
    neutral = surface.NEUTRAL_ARGUMENTS[name]
    for value in neutral.values:
        surface.check_arguments({name: value}, ())
    strange = object()
    if neutral.values == (surface.ANY,):
        surface.check_arguments({name: strange}, ())
    else:
        with pytest.raises(NotImplementedError, match=f"^{name}=.* is not supported: "):
            surface.check_arguments({name: strange}, ())


@pytest.mark.parametrize(
    ("kind", "names", "working", "refused"),
    [
        (LLM, METHODS, surface.WORKING_METHODS, surface.REFUSED_METHODS),
        (AsyncEngine, ASYNC, surface.WORKING_ASYNC_METHODS, surface.REFUSED_ASYNC_METHODS),
    ],
)
def test_every_method_is_in_one_table(kind, names, working, refused):
    assert set(names) <= {*working, *refused}
    assert not set(working) & refused.keys()
    assert all(hasattr(kind, name) for name in working)
    assert not [name for name in refused if hasattr(kind, name)]


def test_a_refused_method_says_why_and_an_unknown_one_is_none():
    llm = LLM(Toy(), **BARE)
    for name, reason in surface.REFUSED_METHODS.items():
        with pytest.raises(NotImplementedError) as error:
            getattr(llm, name)(1, key=2)
        assert str(error.value) == f"LLM.{name} is not supported: {reason}"
    with pytest.raises(AttributeError, match="has no attribute 'generat'"):
        llm.generat
    assert not hasattr(llm, "shared_weights")


def test_every_field_of_sampling_params_is_there():
    assert set(FIELDS) <= {field.name for field in fields(SamplingParams)}
    for name, neutral in surface.NEUTRAL_FIELDS.items():
        default = getattr(SamplingParams(), name)
        assert neutral.takes(default)
        if neutral.values != (surface.ANY,):
            with pytest.raises(NotImplementedError, match=f"^{name}="):
                SamplingParams(**{name: object()})


def test_names_that_are_loaded_late_are_listed():
    import flexgen

    assert set(flexgen.__all__) <= set(dir(flexgen))
    assert all(getattr(flexgen, name) is not None for name in flexgen.__all__)
