"""What launches are sized by, shapes and the device, never data, so that a captured launch stays right; and their chaining.

Kernels here begin while the one before them still runs (programmatic dependent launch, from Hopper on), but not before all
programs of that one have come to their own `await_previous`: what kernels before it wrote is then complete. So ahead of
`await_previous` a program may load what no kernel of a step writes, weights above all, and, past its L1 cache, what the kernel
before the last one wrote.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED_PROCESSORS = 4
"""Stands for a device's multiprocessors where Triton's interpreter runs the kernels on a host."""


def _chains() -> bool:
    """Whether launches can overlap on every device here. Triton's interpreter has no such thing."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return all(torch.cuda.get_device_capability(index)[0] >= 9 for index in range(torch.cuda.device_count()))


CHAINED = tl.constexpr(_chains())
CHAIN = {"launch_pdl": True} if CHAINED.value else {}
"""Options of every launch whose kernel calls `await_previous`."""


@triton.jit
def await_previous():  # noqa: ANN201
    """Wait until all that earlier kernels wrote is there, then let the next kernel begin."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


LINE = tl.constexpr(64)
"""16-bit weights in a line of the L2 cache."""


def lines(width: int, most: int) -> int:
    """How many weights of a row to `prefetch`: whole lines, a power of two of them, at most `most`; 0 for short rows."""
    weights = 2 ** (min(width, most).bit_length() - 1)
    return weights if weights >= LINE.value else 0


@triton.jit
def prefetch(pointers):  # noqa: ANN001, ANN201
    """Ask for the 128 bytes around each pointer to be brought to the L2 cache."""
    if CHAINED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


_ARRIVALS = 2**14


@lru_cache
def arrivals(device: torch.device) -> Tensor:
    """Counts of the programs that have finished their part of a result, for the last of them to add the parts up.

    Every launch leaves them at zero. Launches that share them must run one after the other: a device has one such stream.
    """
    return torch.zeros(_ARRIVALS, dtype=torch.int32, device=device)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; 0 on a host."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return properties.shared_memory_per_block_optin if properties else 0


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
