"""What launches are sized by: shapes and the device, never data, so that a captured launch stays right."""

from __future__ import annotations

from functools import lru_cache

import torch

INTERPRETED_PROCESSORS = 4
"""Stands for a device's multiprocessors where Triton's interpreter runs the kernels on a host."""


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; 0 on a host."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
