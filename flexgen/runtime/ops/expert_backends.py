"""The MLPs of chosen experts, by the kernels that serve: what lies behind the ops of `experts`.

A backend gives the output of each of a token's experts, (T, K, D) in x's dtype; `loop` is the reference on a host. Where an
expert's weights lie in memory is said by `ExpertWeights`, what it computes between its two matmuls by `Gate`.

Shape suffixes: T tokens, D model width, I inner width of an expert, J = 2 I, E experts, K experts of a token, M = T K routes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.runtime.ops.elementwise import ACTIVATIONS

Layout = Literal["out_in", "in_out"]
"""gate_up (E, 2I, D) and down (E, D, I), or gate_up (E, D, 2I) and down (E, I, D)."""

ROUTED_TOKENS = 256
"""Tokens up to which the decode kernels run. Beyond them a matrix product no longer waits for weights alone."""


@dataclass(frozen=True)
class Gate:
    """What lies between an expert's two matmuls: (up + up_offset) * glu(gate), with both clamped first; ungated act(up) alone.

    limit: gate is clamped above by it, up to [-limit, limit]; None does not clamp.
    alpha: glu is gate * sigmoid(alpha * gate); None takes the activation `act`.
    """

    act: str = "silu"
    alpha: float | None = None
    limit: float | None = None
    up_offset: float = 0.0
    gated: bool = True

    def between(self, h: Tensor, interleaved: bool) -> Tensor:
        """(…, J) to (…, I): what the second matmul reads of what the first gives."""
        return self(*split_gate_up(h, interleaved)) if self.gated else ACTIVATIONS[self.act](h)

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        glu = ACTIVATIONS[self.act](gate) if self.alpha is None else gate * torch.sigmoid(self.alpha * gate)
        return (up + self.up_offset if self.up_offset else up) * glu


def split_gate_up(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up columns of the last dim: two halves, or every other column."""
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of a layer and how they lie in memory. Biases: (E, 2I) and (E, D)."""

    gate_up: Tensor
    down: Tensor
    layout: Layout
    interleaved: bool = False
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def inner(self) -> int:
        """I, the inner width of one expert."""
        return self.down.shape[2 if self.layout == "out_in" else 1]


def routed(x_TD: Tensor, experts_TK: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    """The Triton kernels for decode sizes."""
    from flexgen.runtime.ops.kernels.experts import route_outputs  # Triton is there where CUDA is

    return route_outputs(x_TD, experts_TK, weights, gate)


def grouped(x_TD: Tensor, experts_TK: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    """Routes sorted by expert, and two grouped matrix products.

    Every route has an expert, so the groups cover all rows and none is left unwritten. Counting by a search in the sorted
    experts, since bincount waits for the device.
    """
    choices, count = experts_TK.shape[1], weights.gate_up.shape[0]
    sorted_M, order_M = experts_TK.flatten().to(torch.int16).sort(stable=True)
    every_E = torch.arange(count, dtype=torch.int16, device=x_TD.device)
    offsets_E = torch.searchsorted(sorted_M, every_E, right=True, out_int32=True)
    gate_up, down = (w.transpose(1, 2) if weights.layout == "out_in" else w for w in (weights.gate_up, weights.down))
    between = _gated_cuda if x_TD.is_cuda and _kernels_know(gate) else _gated
    last = _placed_cuda if x_TD.is_cuda else _placed
    h_MJ = F.grouped_mm(x_TD[order_M // choices], gate_up, offs=offsets_E)
    y_MD = F.grouped_mm(between(h_MJ, sorted_M, weights, gate), down, offs=offsets_E)
    return last(y_MD, sorted_M, order_M, weights.down_bias).unflatten(0, (-1, choices))


def _gated(h_MJ: Tensor, experts_M: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    """What lies between an expert's two products, (M, I)."""
    if weights.gate_up_bias is not None:
        h_MJ = h_MJ + weights.gate_up_bias[experts_M.long()]
    return gate.between(h_MJ, weights.interleaved)


def _gated_cuda(h_MJ: Tensor, experts_M: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    from flexgen.runtime.ops.kernels.experts_grouped import gated  # Triton is there where CUDA is

    return gated(h_MJ, experts_M, weights, gate)


def _placed(y_MD: Tensor, experts_M: Tensor, order_M: Tensor, bias: Tensor | None) -> Tensor:
    """Rows back in the order of the routes, with the bias of their experts."""
    if bias is not None:
        y_MD = y_MD + bias[experts_M.long()]
    return torch.empty_like(y_MD).index_copy(0, order_M, y_MD)


def _placed_cuda(y_MD: Tensor, experts_M: Tensor, order_M: Tensor, bias: Tensor | None) -> Tensor:
    from flexgen.runtime.ops.kernels.experts_grouped import placed  # Triton is there where CUDA is

    return placed(y_MD, experts_M, order_M, bias)


def each(x_TD: Tensor, experts_TK: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    """An expert at a time, for any dtype and stride, where no kernel serves. Waits for the device."""
    out_TKD = x_TD.new_empty((*experts_TK.shape, x_TD.shape[1]))
    for expert in experts_TK.unique().tolist():
        token, choice = torch.where(experts_TK == expert)
        out_TKD[token, choice] = _mlp(x_TD[token], expert, weights, gate)
    return out_TKD


def _kernels_know(gate: Gate) -> bool:
    """Whether the Triton kernels compute it: a gate, of an activation that they have (`kernels/activations.py`)."""
    return gate.gated and (gate.alpha is not None or gate.act in ("silu", "gelu", "gelu_tanh", "relu"))


def _serves_routed(x_TD: Tensor, weights: ExpertWeights, gate: Gate) -> bool:
    return x_TD.shape[0] <= ROUTED_TOKENS and _kernels_know(gate)


def _serves_grouped(x_TD: Tensor, weights: ExpertWeights, gate: Gate) -> bool:
    """bf16, and strides of 16 bytes throughout, which grouped_mm wants."""
    step = 16 // x_TD.element_size()
    strides = (*weights.gate_up.stride()[:2], *weights.down.stride()[:2], weights.inner, x_TD.shape[1])
    return x_TD.dtype == torch.bfloat16 and all(stride % step == 0 for stride in strides)


Backend = Callable[[Tensor, Tensor, ExpertWeights, Gate], Tensor]

BACKENDS: tuple[tuple[Callable[[Tensor, ExpertWeights, Gate], bool], Backend], ...] = (
    (_serves_routed, routed),
    (_serves_grouped, grouped),
    (lambda x_TD, weights, gate: True, each),
)
"""The first that serves is taken, each time anew: compiled code does not depend on which."""


def choose(x_TD: Tensor, weights: ExpertWeights, gate: Gate) -> Backend:
    """The backend for these tokens; only shapes, dtypes, strides and the gate decide."""
    return next(run for serves, run in BACKENDS if serves(x_TD, weights, gate))


def loop(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    """The reference: experts ascend and sums are in x's dtype, as in transformers' eager loop. Weighted, unlike `each`."""
    y_TD = torch.zeros_like(x_TD)
    experts_KT = experts_TK.T
    for expert in experts_TK.unique().tolist():
        choice, token = torch.where(experts_KT == expert)
        h = _mlp(x_TD[token], expert, weights, gate) * weights_TK[token, choice, None]
        y_TD.index_add_(0, token, h.to(y_TD.dtype))
    return y_TD


def _mlp(x: Tensor, expert: int, weights: ExpertWeights, gate: Gate) -> Tensor:
    h = _linear(x, weights.gate_up, weights.gate_up_bias, expert, weights.layout)
    h = gate.between(h, weights.interleaved)
    return _linear(h, weights.down, weights.down_bias, expert, weights.layout)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int, layout: str) -> Tensor:
    y = F.linear(x, weight[expert]) if layout == "out_in" else x @ weight[expert]
    return y if bias is None else y + bias[expert]
