"""Activations inside Triton kernels, by the names of `ops.ACTIVATIONS`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, ACT: tl.constexpr):  # noqa: ANN001, ANN201
    """The activation of fp32 numbers."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2.0 * inner)
    else:
        tl.static_assert(ACT == "relu", "unknown activation")
        return tl.maximum(x, 0.0)
