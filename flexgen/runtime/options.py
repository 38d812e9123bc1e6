"""Sizes and switches of one engine, and how many pages they give each group."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch

from flexgen.runtime.cache import PageGroup, group_pages, state_bytes
from flexgen.runtime.errors import FlexgenError
from flexgen.runtime.graphs import ladder

log = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 4 * 2**30
"""Most K/V memory on a CPU unless num_gpu_blocks_override says otherwise."""

_DEVICE_RESERVE_BYTES = 2**30
"""Device memory left for activations, graphs and the sampler."""

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")


@dataclass(frozen=True)
class EngineOptions:
    """Checked on construction: ValueError names field, value and range.

    enable_prefix_caching None: on, unless the model has recurrent state.
    """

    max_model_len: int
    max_num_seqs: int = 256
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool | None = None
    logprobs_mode: str = "processed_logprobs"
    seed: int = 0
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None
    lazy_capture: bool = False
    enable_return_routed_experts: bool = False

    def __post_init__(self) -> None:
        for name, low in (("max_model_len", 2), ("max_num_seqs", 1), ("block_size", 1), ("max_num_batched_tokens", 1)):
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
            raise ValueError(f"gpu_memory_utilization={share!r} is out of range: it must be in (0, 1]")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode={self.logprobs_mode!r} must be one of {', '.join(LOGPROBS_MODES)}")
        for name in ("enforce_eager", "lazy_capture", "enable_return_routed_experts", "enable_prefix_caching"):
            optional = name == "enable_prefix_caching"
            if not isinstance(value := getattr(self, name), bool) and not (optional and value is None):
                raise ValueError(f"{name} must be True or False{' or None' if optional else ''}, got {value!r}")
        if not isinstance(self.cudagraph_capture_sizes, Sequence | None):
            raise ValueError(f"cudagraph_capture_sizes must be a list of sizes, got {self.cudagraph_capture_sizes!r}")
        for size in self.cudagraph_capture_sizes or ():
            _at_least("cudagraph_capture_sizes", size, 1)
            if size > self.max_num_seqs:
                raise ValueError(f"cudagraph_capture_sizes holds {size}, more than max_num_seqs={self.max_num_seqs}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an int, got {self.seed!r}")

    @property
    def capture_sizes(self) -> list[int]:
        """Batch sizes that decode steps are padded to, ascending; the last one is max_num_seqs."""
        if self.cudagraph_capture_sizes is None:
            return ladder(self.max_num_seqs)
        return sorted({*self.cudagraph_capture_sizes, self.max_num_seqs})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


def size_pools(model: Any, groups: Sequence[PageGroup], options: EngineOptions) -> list[int]:
    """Pages of each group's pool: `num_gpu_blocks_override`, or what memory holds but no more than all slots can use."""

    def pages(full: int) -> list[int]:
        limits = (options.block_size, options.max_num_seqs, options.max_num_batched_tokens)
        return group_pages(groups, full, *limits)

    def taken(full: int) -> int:
        return sum(n * group.page_bytes(options.block_size, model.dtype) for n, group in zip(pages(full), groups))

    if options.num_gpu_blocks_override is not None:
        return pages(options.num_gpu_blocks_override)
    usable = _cache_bytes(model, options)
    low, high = 0, options.max_num_seqs * -(-options.max_model_len // options.block_size)
    while low < high:  # the largest number of full pages whose pools fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(middle) <= usable else (low, middle - 1)
    if low < 1:
        state = _slots_bytes(model, options) / 2**30
        slots = f", or lower max_num_seqs={options.max_num_seqs}, whose recurrent state takes {state:.2f} GiB" if state else ""
        raise FlexgenError(
            f"{usable / 2**30:.2f} GiB are left for keys and values and one block of each group takes "
            f"{taken(1) / 2**30:.2f} GiB; raise gpu_memory_utilization={options.gpu_memory_utilization}{slots}"
        )
    if groups and low * options.block_size < options.max_model_len:
        log.warning("memory holds %d tokens, less than max_model_len=%d", low * options.block_size, options.max_model_len)
    return pages(low)


def _cache_bytes(model: Any, options: EngineOptions) -> int:
    """What pages may take: on a device, what weights and recurrent state leave of it."""
    if model.device.type != "cuda":
        return _CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(model.device)
    taken = total - free + _slots_bytes(model, options) + _DEVICE_RESERVE_BYTES
    return int(total * options.gpu_memory_utilization) - taken


def _slots_bytes(model: Any, options: EngineOptions) -> int:
    """Recurrent state of all slots, the pad slot included."""
    return state_bytes(model) * (options.max_num_seqs + 1)


def _at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an int of at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name}={value} is out of range: it must be at least {low}")
