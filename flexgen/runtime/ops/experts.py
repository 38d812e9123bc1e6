"""Routing and expert MLPs, as generated code calls them.

Two memory layouts exist and are declared by the spec, never guessed: `out_in`, gate_up (E, 2I, D) and down (E, D, I),
as most families; `in_out`, gate_up (E, D, 2I) and down (E, I, D), as gpt_oss, whose gate and up columns interleave.

Shape suffixes: T tokens, D model width, I inner width of an expert, E experts, K experts of a token, M = T K routes.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from flexgen.runtime.ops.expert_backends import ExpertWeights, Gate, Layout, choose, loop
from flexgen.runtime.ops.library import define_op, flat
from flexgen.runtime.ops.lora import Adapted


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
    from flexgen.runtime.ops.kernels.routing import top_k  # Triton is there where CUDA is

    return top_k(scores_TE, k)


def _top_k_fake(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (scores_TE.shape[0], k)
    return scores_TE.new_empty(shape), scores_TE.new_empty(shape, dtype=torch.int64)


define_op("top_k", cpu=_top_k_cpu, cuda=_top_k_cuda, fake=_top_k_fake)


def renormalise(weights_TK: Tensor, on: bool) -> Tensor:
    """Each token's routing weights over their sum; `on` False leaves them."""
    return weights_TK / weights_TK.sum(dim=-1, keepdim=True) if on else weights_TK


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    gate_up: Tensor | Adapted,
    down: Tensor | Adapted,
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
    On a host it is the reference, which rounds where transformers does.
    """
    if isinstance(gate_up, Adapted) and isinstance(down, Adapted):
        slots_T = gate_up.slots_T[: x_TD.shape[0]]
        tables = gate_up.a, gate_up.b, down.a, down.b, slots_T
        weights = ExpertWeights(gate_up.weight, down.weight, layout, interleaved, gate_up_bias, down_bias, *tables)
    else:
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)  # adapters have room in both or in none
        weights = ExpertWeights(gate_up, down, layout, interleaved, gate_up_bias, down_bias)
    packed = (*flat(weights), *flat(Gate(act, alpha, limit, up_offset)))
    if _takes_reference(x_TD):
        return torch.ops.flexgen.experts_loop(x_TD, weights_TK, experts_TK, *packed)
    outputs_TKD = torch.ops.flexgen.expert_outputs(x_TD, experts_TK, *packed)
    return reduce(torch.add, (outputs_TKD * weights_TK[..., None]).float().unbind(1)).to(x_TD.dtype)


def _takes_reference(x_TD: Tensor) -> bool:
    return x_TD.device.type == "cpu"


def _expert_outputs(x_TD: Tensor, experts_TK: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    return choose(x_TD, weights)(x_TD, experts_TK, weights, gate)


def _expert_outputs_fake(x_TD: Tensor, experts_TK: Tensor, *_: object) -> Tensor:
    return x_TD.new_empty((*experts_TK.shape, x_TD.shape[1]))


def _experts_loop_fake(x_TD: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TD)


define_op("experts_loop", cpu=loop, cuda=loop, fake=_experts_loop_fake)
define_op("expert_outputs", cpu=_expert_outputs, cuda=_expert_outputs, fake=_expert_outputs_fake)
