"""Routing and expert matmuls.

Two memory layouts exist and are declared by the spec, never guessed: `out_in`, gate_up (E, 2I, D) and down (E, D, I),
as most families; `in_out`, gate_up (E, D, 2I) and down (E, I, D), as gpt_oss, whose gate and up columns interleave.

Shape suffixes: T tokens, D model width, I inner width of an expert, E experts, K experts of a token, M = T K routes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.runtime.ops import ACTIVATIONS

Layout = Literal["out_in", "in_out"]


def top_k(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best experts of each token, best first: (values_TK, experts_TK int64); ties as torch.topk breaks them."""
    return torch.topk(scores_TE, k, dim=-1)


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
    return torch.ops.flexgen.experts_loop(
        x_TD,
        weights_TK,
        experts_TK,
        gate_up,
        down,
        act,
        layout,
        interleaved,
        gate_up_bias,
        down_bias,
        alpha,
        limit,
        up_offset,
    )


@torch.library.custom_op("flexgen::experts_loop", mutates_args=())
def _experts_loop(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    act: str,
    layout: str,
    interleaved: bool,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    alpha: float | None,
    limit: float | None,
    up_offset: float,
) -> Tensor:
    """An expert at a time, ascending, with the order and casts of transformers' eager loop: the reference.

    An opaque operator, since which experts run depends on the data.
    """
    gate_act = Gate(act, alpha, limit, up_offset)
    y_TD = torch.zeros_like(x_TD)
    experts_KT = experts_TK.T
    for expert in experts_TK.unique().tolist():
        choice, token = torch.where(experts_KT == expert)
        h = _linear(x_TD[token], gate_up, gate_up_bias, expert, layout)
        h = gate_act(*split_gate_up(h, interleaved))
        h = _linear(h, down, down_bias, expert, layout) * weights_TK[token, choice, None]
        y_TD.index_add_(0, token, h.to(y_TD.dtype))
    return y_TD


@_experts_loop.register_fake
def _experts_loop_fake(x_TD: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TD)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int, layout: str) -> Tensor:
    y = F.linear(x, weight[expert]) if layout == "out_in" else x @ weight[expert]
    return y if bias is None else y + bias[expert]
