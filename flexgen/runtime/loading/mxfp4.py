"""MXFP4 expert weights of gpt-oss, dequantised on load.

OCP Microscaling Formats (MX) v1.0: groups of 32 four-bit floats (1 sign, 2 exponent, 1 mantissa bit) share a scale
2 ** (byte - 127). A byte of a block holds two values, the low nibble first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen.errors import ConfigError

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each four-bit code."""


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(E, in, out) in `dtype` from blocks (E, out, groups, bytes) and scales (E, out, groups), both uint8.

    Bitwise what transformers makes on load. An expert at a time, so the work space is one expert's.
    Raises ConfigError where blocks and scales do not belong together.
    """
    if blocks.dim() != 4 or blocks.shape[:-1] != scales.shape:
        raise ConfigError(
            f"MXFP4 blocks of shape {tuple(blocks.shape)} and scales of shape {tuple(scales.shape)} do not belong "
            "together: blocks are (experts, out, groups, bytes), scales (experts, out, groups). "
            "The checkpoint is damaged or not in gpt-oss's format."
        )
    experts, out, groups, width = blocks.shape
    values = torch.tensor(_VALUES, dtype=dtype, device=blocks.device)
    result = torch.empty(experts, groups * width * 2, out, dtype=dtype, device=blocks.device)
    for expert in range(experts):
        codes = torch.stack((blocks[expert] & 0x0F, blocks[expert] >> 4), dim=-1).flatten(-2)
        exponents = scales[expert].to(torch.int32).unsqueeze(-1) - 127
        result[expert] = torch.ldexp(values[codes.int()], exponents).to(dtype).flatten(-2).T
    return result
