"""How many pages the pools of an engine get, which asks when it is made: memory decides the full group's, and that the others'."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from flexgen.errors import FlexgenError
from flexgen.runtime.options import EngineOptions
from flexgen.runtime.scheduling.pools import PageGroup, group_pages, state_bytes
from flexgen.runtime.served import ServedModel
from flexgen.runtime.transfer import memory_bytes

log = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 4 * 2**30
"""Most K/V memory on a CPU unless num_gpu_blocks_override says otherwise."""

_DEVICE_RESERVE_BYTES = 2**30
"""Device memory left for activations, graphs and the sampler."""


def size_pools(model: ServedModel, groups: Sequence[PageGroup], options: EngineOptions) -> list[int]:
    """Pages of each group's pool: `num_gpu_blocks_override`, or what memory holds but no more than all slots can use."""

    def pages(full: int) -> list[int]:
        limits = (options.block_size, options.max_num_seqs, options.max_num_batched_tokens)
        return group_pages(groups, full, *limits)

    def taken(full: int) -> int:
        return sum(n * group.page_bytes(options.block_size, model.dtype) for n, group in zip(pages(full), groups))

    if options.num_gpu_blocks_override is not None:
        wanted, memory = taken(options.num_gpu_blocks_override), memory_bytes(model.device)
        if wanted > memory:
            raise ValueError(
                f"num_gpu_blocks_override={options.num_gpu_blocks_override} takes {wanted} bytes, and {model.device} has {memory}; "
                "lower it, or leave it out to use what memory holds"
            )
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


def _cache_bytes(model: ServedModel, options: EngineOptions) -> int:
    """What pages may take: on a device, what weights and recurrent state leave of it."""
    if model.device.type != "cuda":
        return _CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(model.device)
    taken = total - free + _slots_bytes(model, options) + _DEVICE_RESERVE_BYTES
    return int(total * options.gpu_memory_utilization) - taken


def _slots_bytes(model: ServedModel, options: EngineOptions) -> int:
    """Recurrent state of all slots, the pad slot included."""
    return state_bytes(model) * (options.max_num_seqs + 1)
