"""Routing and expert matmuls.

Two memory layouts exist and are declared by the spec, never guessed: `out_in`, gate_up (E, 2I, D) and down (E, D, I),
as most families; `in_out`, gate_up (E, D, 2I) and down (E, I, D), as gpt_oss, whose gate and up columns interleave.

Shape suffixes: T tokens, D model width, I inner width of an expert, E experts, K experts of a token, M = T K routes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.runtime.operators import operator
from flexgen.runtime.ops import ACTIVATIONS

Layout = Literal["out_in", "in_out"]


def top_k(scores_TE: Tensor, k: int, record: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k best experts of each token, best first: (values_TK, experts_TK int64).

    Ties are broken as torch.topk breaks them on a host, and by order on CUDA.

    record: (at least T, K) int16, takes the experts in its first T rows; None where nobody asks for them.
    """
    weights_TK, experts_TK = torch.ops.flexgen.top_k(scores_TE, k)
    if record is not None:
        record[: experts_TK.shape[0]] = experts_TK
    return weights_TK, experts_TK


def _top_k_cpu(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return torch.topk(scores_TE, k, dim=-1)


def _top_k_cuda(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    from flexgen.runtime.kernels.routing import top_k  # Triton is there where CUDA is

    return top_k(scores_TE, k)


def _top_k_fake(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (scores_TE.shape[0], k)
    return scores_TE.new_empty(shape), scores_TE.new_empty(shape, dtype=torch.int64)


operator("top_k", cpu=_top_k_cpu, cuda=_top_k_cuda, fake=_top_k_fake)


def renormalise(weights_TK: Tensor, on: bool) -> Tensor:
    """Each token's routing weights over their sum; `on` False leaves them."""
    return weights_TK / weights_TK.sum(dim=-1, keepdim=True) if on else weights_TK


@dataclass(frozen=True)
class Gate:
    """What lies between an expert's two matmuls: (up + up_offset) * glu(gate), with both clamped first.

    limit: gate is clamped above by it, up to [-limit, limit]; None does not clamp.
    alpha: glu is gate * sigmoid(alpha * gate); None takes the activation `act`.
    """

    act: str = "silu"
    alpha: float | None = None
    limit: float | None = None
    up_offset: float = 0.0

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
class Weights:
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

    def flat(self, gate: Gate) -> dict[str, Any]:
        """Itself and the gate as keyword arguments of an operator."""
        return {
            "gate_up": self.gate_up,
            "down": self.down,
            "layout": self.layout,
            "interleaved": self.interleaved,
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
            "act": gate.act,
            "alpha": gate.alpha,
            "limit": gate.limit,
            "up_offset": gate.up_offset,
        }


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    act: str = "silu",
    layout: Layout,
    interleaved: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """The routed MLPs of each token, weighted and summed: (T, D) in x's dtype.

    weights_TK may be fp32 in a 16-bit model: the product with them is then fp32. Biases: (E, 2I) and (E, D).
    """
    weights = Weights(gate_up, down, layout, interleaved, gate_up_bias, down_bias)
    run = choose(x_TD, weights)
    return run(x_TD, weights_TK, experts_TK, weights, Gate(act, alpha, limit, up_offset))


# ---------------------------------------------------------------- backends


def loop(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, weights: Weights, gate: Gate) -> Tensor:
    """An expert at a time, in the order and with the casts of transformers' eager loop: the reference."""
    return torch.ops.flexgen.experts_loop(x_TD, weights_TK, experts_TK, **weights.flat(gate))


def grouped(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, weights: Weights, gate: Gate) -> Tensor:
    """Routes sorted by expert, two grouped matrix products, K contributions a token summed in fp32.

    Every route has an expert, so the groups cover all rows and none is left unwritten. Counting by a search in the sorted
    experts, since bincount waits for the device; the sum is written out, for the compiler to fuse with the gather.
    """
    choices, count = experts_TK.shape[1], weights.gate_up.shape[0]
    sorted_M, order_M = experts_TK.flatten().to(torch.int16).sort(stable=True)
    every_E = torch.arange(count, dtype=torch.int16, device=x_TD.device)
    offsets_E = torch.searchsorted(sorted_M, every_E, right=True, out_int32=True)
    place_M = torch.empty_like(order_M).scatter(0, order_M, torch.arange(len(order_M), device=x_TD.device))

    def linear(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.grouped_mm(h, weight.transpose(1, 2) if weights.layout == "out_in" else weight, offs=offsets_E)
        return y if bias is None else y + bias[sorted_M.long()]

    h_MD = linear(x_TD[order_M // choices], weights.gate_up, weights.gate_up_bias)
    h_MD = linear(gate(*split_gate_up(h_MD, weights.interleaved)), weights.down, weights.down_bias)
    parts_TKD = h_MD[place_M].unflatten(0, (-1, choices)) * weights_TK[..., None]
    return reduce(torch.add, parts_TKD.float().unbind(1)).to(x_TD.dtype)


def routed(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, weights: Weights, gate: Gate) -> Tensor:
    """The Triton kernels for decode sizes; the weighted sum over a token's K experts is for the compiler to fuse."""
    parts_TKD = torch.ops.flexgen.experts_routed(x_TD, experts_TK, **weights.flat(gate))
    return reduce(torch.add, (parts_TKD * weights_TK[..., None]).unbind(1)).to(x_TD.dtype)


def _serves_routed(x_TD: Tensor, weights: Weights) -> bool:
    return x_TD.is_cuda and x_TD.shape[0] <= ROUTED_TOKENS


def _serves_grouped(x_TD: Tensor, weights: Weights) -> bool:
    """bf16, and strides of 16 bytes throughout, which grouped_mm wants."""
    step = 16 // x_TD.element_size()
    strides = (*weights.gate_up.stride()[:2], *weights.down.stride()[:2], weights.inner, x_TD.shape[1])
    return x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and all(stride % step == 0 for stride in strides)


ROUTED_TOKENS = 256
"""Tokens up to which the decode kernels run. Beyond them a matrix product no longer waits for weights alone."""

Backend = Callable[[Tensor, Tensor, Tensor, Weights, Gate], Tensor]

BACKENDS: tuple[tuple[Callable[[Tensor, Weights], bool], Backend], ...] = (
    (_serves_routed, routed),
    (_serves_grouped, grouped),
    (lambda x_TD, weights: True, loop),
)
"""The first that serves is taken: on a host the reference, which rounds where transformers does."""


def choose(x_TD: Tensor, weights: Weights) -> Backend:
    """The backend for these tokens; only shapes, dtypes, strides and the device decide."""
    return next(run for serves, run in BACKENDS if serves(x_TD, weights))


def _experts_loop(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    layout: str,
    interleaved: bool,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    act: str,
    alpha: float | None,
    limit: float | None,
    up_offset: float,
) -> Tensor:
    """An opaque operator, since which experts run depends on the data. Experts ascend, sums are in x's dtype."""
    gate = Gate(act, alpha, limit, up_offset)
    y_TD = torch.zeros_like(x_TD)
    experts_KT = experts_TK.T
    for expert in experts_TK.unique().tolist():
        choice, token = torch.where(experts_KT == expert)
        h = _linear(x_TD[token], gate_up, gate_up_bias, expert, layout)
        h = gate(*split_gate_up(h, interleaved))
        h = _linear(h, down, down_bias, expert, layout) * weights_TK[token, choice, None]
        y_TD.index_add_(0, token, h.to(y_TD.dtype))
    return y_TD


def _experts_loop_fake(x_TD: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TD)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int, layout: str) -> Tensor:
    y = F.linear(x, weight[expert]) if layout == "out_in" else x @ weight[expert]
    return y if bias is None else y + bias[expert]


def _experts_routed(
    x_TD: Tensor,
    experts_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    layout: str,
    interleaved: bool,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    act: str,
    alpha: float | None,
    limit: float | None,
    up_offset: float,
) -> Tensor:
    from flexgen.runtime.kernels.experts import route_outputs  # Triton is there where CUDA is

    weights = Weights(gate_up, down, layout, interleaved, gate_up_bias, down_bias)
    return route_outputs(x_TD, experts_TK, **weights.flat(Gate(act, alpha, limit, up_offset)))


def _experts_routed_fake(x_TD: Tensor, experts_TK: Tensor, *_: object) -> Tensor:
    return x_TD.new_empty((*experts_TK.shape, x_TD.shape[1]), dtype=torch.float32)


operator("experts_loop", cpu=_experts_loop, cuda=_experts_loop, fake=_experts_loop_fake)
operator("experts_routed", cpu=_experts_routed, cuda=_experts_routed, fake=_experts_routed_fake)
