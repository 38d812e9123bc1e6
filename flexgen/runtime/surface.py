"""vLLM 0.26's offline interface, name by name: what of it works here, what is taken and changes nothing, what is refused and why.

docs/vllm.md is made of these tables by `pages`, and a test holds them against what is there. An argument that is in none of them is a
`TypeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from flexgen.contract.json_files import shown


class _Any:
    """Stands for every value."""

    def __repr__(self) -> str:
        return "any value"


ANY = _Any()


@dataclass(frozen=True)
class Neutral:
    """Values of an argument that change nothing here, and why others are refused, or why none has an effect."""

    values: tuple[Any, ...]
    why: str

    def takes(self, value: Any) -> bool:
        return self.values == (ANY,) or any(
            value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in self.values
        )


def _rows(why: str, **arguments: tuple[Any, ...]) -> dict[str, Neutral]:
    return {name: Neutral(values, why) for name, values in arguments.items()}


def _hints(why: str, *names: str) -> dict[str, Neutral]:
    return dict.fromkeys(names, Neutral((ANY,), why))


WORKING_ARGUMENTS = (
    "model", "tokenizer", "skip_tokenizer_init", "dtype", "load_format", "max_model_len", "max_num_seqs", "block_size",
    "num_gpu_blocks_override", "max_num_batched_tokens", "gpu_memory_utilization", "enable_prefix_caching", "logprobs_mode",
    "seed", "enforce_eager", "cudagraph_capture_sizes", "enable_return_routed_experts",
    "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules", "mamba_ssm_cache_dtype", "revision",
    "tokenizer_revision", "download_dir", "hf_token", "hf_overrides", "generation_config", "override_generation_config",
    "max_logprobs", "scheduling_policy", "chat_template", "compilation_config",
)  # fmt: skip

NEUTRAL_ARGUMENTS: Mapping[str, Neutral] = {
    **_rows(
        "one engine runs on one device",
        tensor_parallel_size=(1,), pipeline_parallel_size=(1,), data_parallel_size=(1,), prefill_context_parallel_size=(1,),
        decode_context_parallel_size=(1,), enable_expert_parallel=(False,), nnodes=(1,), node_rank=(0,),
        distributed_executor_backend=(None, "external_launcher", "uni"), device_ids=(None,), data_parallel_rank=(None,),
        data_parallel_start_rank=(None,), data_parallel_size_local=(None,), data_parallel_address=(None,),
        data_parallel_rpc_port=(None,), data_parallel_hybrid_lb=(False,), data_parallel_external_lb=(False,),
        data_parallel_multi_port_external_lb=(False,), enable_eplb=(False,), enable_elastic_ep=(False,), enable_dbo=(False,),
        enable_ep_weight_filter=(False,), dcp_kv_cache_interleave_size=(1,), cp_kv_cache_interleave_size=(1,),
    ),
    **_hints(
        "says how several devices talk, and there is one",
        "master_addr", "master_port", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "dcp_comm_backend",
        "data_parallel_backend", "all2all_backend", "ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold",
        "disable_nccl_for_dp_synchronization", "eplb_config", "expert_placement_strategy", "disable_custom_all_reduce",
        "ray_workers_use_nsight", "numa_bind", "numa_bind_nodes", "numa_bind_cpus",
    ),
    **_rows(
        "weights are served as the checkpoint holds them",
        quantization=(None,), quantization_config=(None,), allow_deprecated_quantization=(False,), kv_cache_dtype=("auto",),
        kv_cache_dtype_skip_layers=(None, []), calculate_kv_scales=(False,), override_attention_dtype=(None,),
    ),
    **_rows("code from a checkpoint never runs; a spec describes the model", trust_remote_code=(False,), code_revision=(None,),
            model_impl=("auto", "vllm"), model_class_overrides=(None, {}), config_format=("auto", "hf"), hf_config_path=(None,),
            model_weights=("",), runner=("auto", "generate"), convert=("auto", "none"), pooler_config=(None,),
            served_model_name=(None,), io_processor_plugin=(None,), worker_cls=("auto",), worker_extension_cls=("",),
            scheduler_cls=(None,), logits_processors=(None, []), diffusion_config=(None,), additional_config=(None, {})),
    **_rows("tokenizers are those that transformers makes of the files", tokenizer_mode=("auto", "hf")),
    **_rows("everything is kept on the device", cpu_offload_gb=(0, 0.0), cpu_offload_params=(None, set()), offload_params=(None, set()),
            offload_group_size=(0,), offload_num_in_group=(1,), kv_offloading_size=(None,), kv_transfer_config=(None,),
            kv_events_config=(None,), ec_transfer_config=(None,), offload_prefetch_step=(1,), offload_backend=("auto",),
            kv_offloading_backend=("native",)),
    **_hints("pages of preempted requests are computed again, never swapped", "swap_space"),
    **_rows("prompts are text or token ids", enable_prompt_embeds=(False,), enable_mm_embeds=(False,), mm_processor_kwargs=(None, {}),
            allowed_local_media_path=("",), allowed_media_domains=(None, []), default_mm_loras=(None,), media_io_kwargs=(None, {})),
    **_hints(
        "is about images, audio and video, which no prompt can hold here",
        "limit_mm_per_prompt", "language_model_only", "interleave_mm_strings", "mm_processor_cache_gb", "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_tensor_ipc",
        "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "skip_mm_profiling",
        "mm_encoder_fp8_scale_save_margin", "video_pruning_rate", "mm_ipc_gpu_memory_gb", "disable_chunked_mm_input",
        "enable_mm_processor_stats", "renderer_num_workers",
    ),
    **_rows("adapters are of the text model's own modules, in any form that PEFT writes", enable_tower_connector_lora=(False,),
            enable_mixed_moe_lora_format=(False,), enable_moe_shared_loras=(False,)),
    **_rows("tables of adapters have the dtype of the weight", lora_dtype=("auto",)),
    **_hints("one device holds whole adapters, and one graph serves any of them", "fully_sharded_loras", "specialize_active_lora"),
    **_rows(
        "prompts are always computed in chunks beside what decodes",
        enable_chunked_prefill=(None, True), max_num_partial_prefills=(1,), max_long_partial_prefills=(1,),
        long_prefill_token_threshold=(0,), disable_sliding_window=(False,),
        max_num_scheduled_tokens=(None,), async_scheduling=(None, True), kv_sharing_fast_prefill=(False,),
    ),
    **_rows("memory is given as gpu_memory_utilization or num_gpu_blocks_override", kv_cache_memory_bytes=(None,),
            mamba_block_size=(None,), mamba_cache_dtype=("auto",), mamba_cache_mode=("none",), prefix_match_unit=(None,),
            enable_mamba_cache_stochastic_rounding=(False,)),
    **_rows("tokens are drawn one a step", speculative_config=(None,), spec_method=(None,), spec_model=(None,), spec_tokens=(None,)),
    **_rows("sleep is not supported yet", enable_sleep_mode=(False,), enable_cumem_allocator=(False,)),
    **_rows("answers are returned as the model wrote them", reasoning_parser=("",), reasoning_parser_plugin=(None,),
            structured_outputs_config=(None, {}), reasoning_config=(None,), tokens_only=(False,)),
    **_rows("weights come through load_weights", weight_transfer_config=(None,), ignore_patterns=(None, [], "original/**/*"),
            model_loader_extra_config=(None, {})),
    **_hints(
        "is about how fast vLLM's own parts load, compile or log, and never changes an answer",
        "disable_log_stats", "aggregate_engine_logging", "enable_log_requests", "use_tqdm_on_load", "max_parallel_loading_workers",
        "pt_load_map_location", "safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size",
        "max_cudagraph_capture_size", "ir_op_priority", "moe_backend", "linear_backend", "attention_backend", "attention_config",
        "mamba_config", "kernel_config", "enable_flashinfer_autotune", "enable_bf16x3_router_gemm", "mamba_backend",
        "gdn_prefill_backend", "mamba_cache_philox_rounds", "optimization_level", "performance_mode", "prefix_caching_hash_algo",
        "disable_cascade_attn", "disable_hybrid_kv_cache_manager", "scheduler_reserve_full_isl", "prefill_schedule_interval",
        "watermark", "stream_interval", "use_fp64_gumbel", "show_hidden_metrics_for_version", "otlp_traces_endpoint",
        "collect_detailed_traces", "kv_cache_metrics", "kv_cache_metrics_sample", "cudagraph_metrics", "profiler_config",
        "enable_layerwise_nvtx_tracing", "enable_mfu_metrics", "enable_logging_iteration_details", "jit_monitor_mode",
        "jit_monitor_verbose", "shutdown_timeout", "fail_on_environ_validation",
    ),
}  # fmt: skip

_POOLING = "models here generate text, and give no embeddings, classes or scores"
REFUSED_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _POOLING),
    **dict.fromkeys(("start_profile", "stop_profile"), "`flexgen bench --profile` shows which kernels take a step"),
    **dict.fromkeys(("sleep", "wake_up"), "sleep is not supported yet"),
    "get_metrics": "metrics() returns every counter",
    "collective_rpc": "there are no workers beside this process; load_weights and reload_weights update weights",
    "apply_model": "the model is generated code, and no torch module",
    **dict.fromkeys(
        ("init_weight_transfer_engine", "start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
        "weights come through load_weights, reload_weights or LLM.from_model",
    ),
}
"""Methods of vLLM's LLM that raise NotImplementedError, with the reason."""

WORKING_ASYNC_METHODS = (
    "from_engine_args", "generate", "abort", "add_lora", "remove_lora", "list_loras", "pin_lora",
    "get_tokenizer", "reset_prefix_cache", "reset_mm_cache", "check_health", "shutdown",
    "is_running", "is_stopped", "errored", "dead_error", "is_sleeping", "model_config",
)  # fmt: skip

REFUSED_ASYNC_METHODS: Mapping[str, str] = {
    name: reason for name, reason in REFUSED_METHODS.items() if name not in ("embed", "classify", "score", "reward", "apply_model")
} | {
    "from_vllm_config": "there is no such config; from_engine_args takes the arguments",
    "add_request": "generate yields a request's outputs",
    "get_supported_tasks": _POOLING,
    **dict.fromkeys(("pause_generation", "resume_generation", "is_paused"), "load_weights waits for what runs, or aborts it"),
    **dict.fromkeys(("is_tracing_enabled", "do_log_stats"), "metrics() has all counters"),
    "tokenizer": "get_tokenizer() returns it",
    "reset_encoder_cache": "prompts hold no images",
    "notify_kv_transfer_request_rejected": "pages are not sent to other engines",
    **dict.fromkeys(("wait_for_requests_to_drain", "scale_elastic_ep"), "one engine runs on one device"),
}
"""The same of vLLM's AsyncLLM."""


def refusal(owner: str, name: str, refused: Mapping[str, str]) -> Callable[..., NoReturn]:
    """For `__getattr__`: what raises NotImplementedError when it is called, for a name that is refused; else AttributeError."""
    if name not in refused:
        raise AttributeError(f"{owner!r} object has no attribute {name!r}")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{owner}.{name} is not supported: {refused[name]}")

    return refuse

WORKING_METHODS = (
    "generate", "chat", "get_tokenizer", "get_world_size", "get_default_sampling_params", "reset_prefix_cache", "reset_mm_cache",
    "from_engine_args", "beam_search", "enqueue", "enqueue_chat", "wait_for_completion",
)  # fmt: skip

NEUTRAL_FIELDS: Mapping[str, Neutral] = {
    **_rows("answers list the most likely tokens, by `logprobs`", logprob_token_ids=(None,), flat_logprobs=(False,)),
    **_hints("is about how vLLM passes parameters on", "skip_clone", "output_text_buffer_length"),
    **_rows("nothing here reads it", extra_args=(None, {})),
    **_rows("routed experts are returned from the first token on", routed_experts_prompt_start=(0,)),
    **_rows("an answer ends by max_tokens, stop strings, stop tokens or a grammar", thinking_token_budget=(None,),
            repetition_detection=(None,)),
}  # fmt: skip
"""Fields of SamplingParams."""


def check_arguments(arguments: Mapping[str, Any], own: Iterable[str]) -> None:
    """Raises NotImplementedError for an argument of vLLM's with a value that would change something, TypeError for a name
    that is neither vLLM's nor among `own`."""
    own = tuple(own)
    for name, value in arguments.items():
        if name in NEUTRAL_ARGUMENTS:
            check_neutral(name, value, NEUTRAL_ARGUMENTS[name])
        elif name not in own:
            near = get_close_matches(name, [*own, *NEUTRAL_ARGUMENTS], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(f"LLM has no argument {name!r}; {hint}docs/parameters.md lists those it has")


def check_neutral(name: str, value: Any, neutral: Neutral) -> None:
    if not neutral.takes(value):
        allowed = " or ".join(repr(each) for each in neutral.values)
        raise NotImplementedError(f"{name}={shown(value)} is not supported: {neutral.why}; only {allowed} is taken")


def page() -> str:
    """docs/vllm.md."""
    parts = [
        "# vLLM's interface, name by name",
        "Made from `flexgen/runtime/surface.py` by `flexgen schema`: the offline and the asynchronous interface of vLLM 0.26. A "
        "script needs another import, and what is not here says so by its name.",
        "Modules with vLLM's names: `flexgen`, `flexgen.sampling_params`, `flexgen.outputs`, `flexgen.inputs`, "
        "`flexgen.lora.request`. All other classes are imported from `flexgen`; `AsyncLLMEngine` is `AsyncEngine`.",
        "## Arguments of `LLM`, `AsyncEngine`, `EngineArgs`",
        f"These work: {_listed(WORKING_ARGUMENTS)}.",
        _table("argument", NEUTRAL_ARGUMENTS),
        "## Methods of `LLM`",
        f"These work: {_listed(WORKING_METHODS)}. These raise `NotImplementedError`:",
        _refused(REFUSED_METHODS),
        "## Methods and properties of `AsyncEngine`",
        f"These work: {_listed(WORKING_ASYNC_METHODS)}. These raise `NotImplementedError`:",
        _refused(REFUSED_ASYNC_METHODS),
        "## Fields of `SamplingParams`",
        "All fields work, by [parameters.md](parameters.md), but for these:",
        _table("field", NEUTRAL_FIELDS),
    ]
    return "\n\n".join(parts) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(what: str, rows: Mapping[str, Neutral]) -> str:
    """One line for all names that take the same values for the same reason."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, neutral in rows.items():
        taken = ", ".join("any value" if value is ANY else f"`{value!r}`" for value in neutral.values)
        names.setdefault((taken, neutral.why), []).append(name)
    lines = [f"| {_listed(named)} | {taken} | {why} |" for (taken, why), named in names.items()]
    return "\n".join([f"| {what} | taken | since |", "|---|---|---|", *lines])


def _refused(rows: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, reason in rows.items():
        names.setdefault(reason, []).append(name)
    return "\n".join(["| name | since |", "|---|---|", *(f"| {_listed(named)} | {reason} |" for reason, named in names.items())])
