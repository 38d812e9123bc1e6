"""Sizes and switches of one engine: what `LLM` passes on of its arguments, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TypedDict

from flexgen.contract.json_files import shown
from flexgen.runtime.ladder import ladder

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
POLICIES = ("fcfs", "priority")


class Options(TypedDict, total=False):
    """The fields of `EngineOptions` as keywords of `LLM`, for editors; vLLM's others are in `surface`."""

    max_num_seqs: int
    block_size: int
    num_gpu_blocks_override: int | None
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    enable_prefix_caching: bool | None
    logprobs_mode: str
    max_logprobs: int | None
    scheduling_policy: str
    seed: int
    enforce_eager: bool
    cudagraph_capture_sizes: Sequence[int] | None
    lazy_capture: bool
    enable_return_routed_experts: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_target_modules: Sequence[str] | None


@dataclass(frozen=True)
class EngineOptions:
    """Checked on construction: ValueError names field, value and range.

    enable_prefix_caching  None: on, unless the model has recurrent state
    max_logprobs           most logprobs that a request may ask for at each position; None and -1: the whole vocabulary
    max_loras              adapters of requests that run in one step, each of at most max_lora_rank
    max_cpu_loras          adapters of requests that are kept, at least max_loras, the oldest leaving; None: all
    lora_target_modules    last parts of the modules that have room for them; None: all linear ones and experts
    """

    max_model_len: int
    max_num_seqs: int = 256
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool | None = None
    logprobs_mode: str = "processed_logprobs"
    max_logprobs: int | None = None
    scheduling_policy: str = "fcfs"
    seed: int = 0
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None
    lazy_capture: bool = False
    enable_return_routed_experts: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_target_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, low in (("max_model_len", 2), ("max_num_seqs", 1), ("block_size", 1), ("max_num_batched_tokens", 1),
                          ("max_loras", 1), ("max_lora_rank", 1)):  # fmt: skip
            _at_least(name, getattr(self, name), low)
        if self.num_gpu_blocks_override is not None:
            _at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: a "
                "step must have room for one token of each running request"
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization={shown(share)} is out of range: it must be in (0, 1]")
        for name, known in (("logprobs_mode", LOGPROBS_MODES), ("scheduling_policy", POLICIES)):
            if not isinstance(value := getattr(self, name), str) or value not in known:
                raise ValueError(f"{name}={shown(value)} must be one of {', '.join(known)}")
        if self.max_cpu_loras is not None:
            _at_least("max_cpu_loras", self.max_cpu_loras, self.max_loras)
        if self.max_logprobs is not None:
            _at_least("max_logprobs", self.max_logprobs, -1)
        for name in ("enforce_eager", "lazy_capture", "enable_return_routed_experts", "enable_lora", "enable_prefix_caching"):
            optional = name == "enable_prefix_caching"
            if not isinstance(value := getattr(self, name), bool) and not (optional and value is None):
                raise ValueError(f"{name} must be True or False{' or None' if optional else ''}, got {shown(value)}")
        if not isinstance(self.cudagraph_capture_sizes, Sequence | None):
            raise ValueError(f"cudagraph_capture_sizes must be a list of sizes, got {shown(self.cudagraph_capture_sizes)}")
        for size in self.cudagraph_capture_sizes or ():
            _at_least("cudagraph_capture_sizes", size, 1)
            if size > self.max_num_seqs:
                raise ValueError(f"cudagraph_capture_sizes holds {size}, more than max_num_seqs={self.max_num_seqs}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an int, got {shown(self.seed)}")

    @property
    def capture_sizes(self) -> list[int]:
        """Batch sizes that decode steps are padded to, ascending; the last one is max_num_seqs."""
        if self.cudagraph_capture_sizes is None:
            return ladder(self.max_num_seqs)
        return sorted({*self.cudagraph_capture_sizes, self.max_num_seqs})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


def _at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an int of at least {low}, got {shown(value)}")
    if value < low:
        raise ValueError(f"{name}={value} is out of range: it must be at least {low}")
