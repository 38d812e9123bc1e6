"""Activations inside Triton kernels, by the names of `elementwise.ACTIVATIONS`, and the gate of experts.

Kernels of experts and of the short convolution call them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    from flexgen.runtime.ops.expert_backends import Gate


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


@triton.jit
def _activate(gate, ACT: tl.constexpr, ALPHA: tl.constexpr):  # noqa: ANN001, ANN202
    if ALPHA is not None:
        return gate * tl.sigmoid(ALPHA * gate)
    return activate(gate, ACT)


@triton.jit
def gated(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):  # noqa: ANN001, ANN201
    """`expert_backends.Gate` of fp32 numbers."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + UP_OFFSET) * _activate(gate, ACT, ALPHA)


def gate_constants(gate: Gate) -> dict[str, Any]:
    """What `gated` is told, as a launch passes it."""
    return {"ACT": gate.act, "ALPHA": gate.alpha, "LIMIT": gate.limit, "UP_OFFSET": gate.up_offset}
