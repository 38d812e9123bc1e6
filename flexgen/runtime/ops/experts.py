"""Routing and expert MLPs, as generated code calls them.

Two memory layouts exist and are declared by the spec, never guessed: `out_in`, gate_up (E, 2I, D) and down (E, D, I),
as most families; `in_out`, gate_up (E, D, 2I) and down (E, I, D), as gpt_oss, whose gate and up columns interleave.

Shape suffixes: T tokens, D model width, I inner width of an expert, E experts, K experts of a token, M = T K routes.
"""

from __future__ import annotations

from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from flexgen.runtime.ops.expert_backends import ExpertWeights, Gate, Layout, choose, loop
from flexgen.runtime.ops.library import define_op, flat
from flexgen.runtime.ops.lora import Adapted


def top_k(scores_TE: Tensor, k: int, record: Tensor | None = None, by_order: bool = False) -> tuple[Tensor, Tensor]:
    """The k best experts of each token, best first: (values_TK, experts_TK int64).

    Ties are broken as torch.topk breaks them on a host, and by order on CUDA and where `by_order` asks for it.

    record: (at least T, K) int16, takes the experts in its first T rows; None where nobody asks for them.
    """
    weights_TK, experts_TK = torch.ops.flexgen.top_k(scores_TE, k, by_order)
    if record is not None:
        record[: experts_TK.shape[0]] = experts_TK
    return weights_TK, experts_TK


def _top_k_cpu(scores_TE: Tensor, k: int, by_order: bool = False) -> tuple[Tensor, Tensor]:
    if not by_order:
        return torch.topk(scores_TE, k, dim=-1)
    scores, experts = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    return scores[:, :k].contiguous(), experts[:, :k].contiguous()


def _top_k_cuda(scores_TE: Tensor, k: int, by_order: bool = False) -> tuple[Tensor, Tensor]:
    from flexgen.runtime.ops.kernels.routing import top_k  # Triton is there where CUDA is

    return top_k(scores_TE, k)


def _top_k_fake(scores_TE: Tensor, k: int, by_order: bool = False) -> tuple[Tensor, Tensor]:
    shape = (scores_TE.shape[0], k)
    return scores_TE.new_empty(shape), scores_TE.new_empty(shape, dtype=torch.int64)


define_op("top_k", cpu=_top_k_cpu, cuda=_top_k_cuda, fake=_top_k_fake)


def keep_groups(scores_TE: Tensor, groups: int, keep: int, best: int) -> Tensor:
    """Scores with minus infinity outside the `keep` groups of experts whose `best` scores have the highest sums."""
    scores_TGe = scores_TE.unflatten(-1, (groups, -1))
    best_Nb, _ = torch.ops.flexgen.top_k(scores_TGe.flatten(0, 1), best)
    rank_TG = best_Nb.sum(dim=-1).unflatten(0, (-1, groups))
    _, kept_TK = torch.ops.flexgen.top_k(rank_TG, keep)
    is_kept_TG = torch.zeros_like(rank_TG, dtype=torch.bool).scatter(1, kept_TK, True)
    return scores_TGe.masked_fill(~is_kept_TG[..., None], -torch.inf).flatten(1)


def sparsemixer(scores_TE: Tensor, experts_TK: Tensor, jitter: float) -> Tensor:
    """The weight of each choice, best first: its softmax among near scores (Liu et al. 2024, arXiv:2409.12136, without noise).

    Scores count as near that are at most 2 * jitter below the chosen one, relative to the larger of both. Experts chosen
    before it are left out, so that the weights of a token do not sum to one.
    """
    weights, left_TE = [], scores_TE
    for expert_T1 in experts_TK.split(1, dim=-1):
        best_T1 = scores_TE.gather(1, expert_T1)
        far_TE = (best_T1 - scores_TE) / scores_TE.abs().clamp(min=best_T1) > 2 * jitter
        near_TE = torch.softmax(left_TE.masked_fill(far_TE, -torch.inf), dim=-1)
        weights.append(near_TE.gather(1, expert_T1))
        left_TE = left_TE.scatter(1, expert_T1, -torch.inf)
    return torch.cat(weights, dim=-1)


def renormalise(weights_TK: Tensor, on: bool, eps: float = 0.0, floor: float = 0.0) -> Tensor:
    """Each token's routing weights over their sum, plus `eps` and at least `floor`; `on` False leaves them."""
    if not on:
        return weights_TK
    sum_T1 = weights_TK.sum(dim=-1, keepdim=True)
    sum_T1 = sum_T1 + eps if eps else sum_T1
    return weights_TK / (sum_T1.clamp(min=floor) if floor else sum_T1)


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
    gated: bool = True,
    weights_on: Literal["output", "input"] = "output",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """The routed MLPs of each token, weighted and summed: (T, D) in x's dtype.

    weights_TK may be fp32 in a 16-bit model: the product with them is then fp32. Biases: (E, 2I) and (E, D).
    `weights_on` "input": what an expert reads is weighted, not what it gives. `gated` False: gate_up holds up alone, J = I.
    On a host it is the reference, which rounds where transformers does.
    """
    tables: tuple[Tensor, ...] = ()
    if isinstance(gate_up, Adapted) and isinstance(down, Adapted):
        slots_T = gate_up.slots_T[: x_TD.shape[0]]
        if weights_on == "input":
            slots_T = slots_T[:, None].expand_as(experts_TK).flatten()
        tables = gate_up.a, gate_up.b, down.a, down.b, slots_T
        gate_up, down = gate_up.weight, down.weight
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)  # adapters have room in both or in none
    weights = ExpertWeights(gate_up, down, layout, interleaved, gate_up_bias, down_bias, *tables)
    gate = Gate(act, alpha, limit, up_offset, gated)
    if weights_on == "output":
        return _weighted(x_TD, weights_TK, experts_TK, weights, gate)
    x_MD = (x_TD[:, None] * weights_TK[..., None]).to(x_TD.dtype).flatten(0, 1)  # each route is a token with one expert
    y_MD = _weighted(x_MD, torch.ones_like(x_MD[:, :1]), experts_TK.flatten()[:, None], weights, gate)
    return y_MD.unflatten(0, (-1, experts_TK.shape[1])).float().sum(dim=1).to(x_TD.dtype)


def _weighted(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    packed = (*flat(weights), *flat(gate))
    if _takes_reference(x_TD):
        return torch.ops.flexgen.experts_loop(x_TD, weights_TK, experts_TK, *packed)
    outputs_TKD = torch.ops.flexgen.expert_outputs(x_TD, experts_TK, *packed)
    return reduce(torch.add, (outputs_TKD * weights_TK[..., None]).float().unbind(1)).to(x_TD.dtype)


def _takes_reference(x_TD: Tensor) -> bool:
    return x_TD.device.type == "cpu"


def _expert_outputs(x_TD: Tensor, experts_TK: Tensor, weights: ExpertWeights, gate: Gate) -> Tensor:
    return choose(x_TD, weights, gate)(x_TD, experts_TK, weights, gate)


def _expert_outputs_fake(x_TD: Tensor, experts_TK: Tensor, *_: object) -> Tensor:
    return x_TD.new_empty((*experts_TK.shape, x_TD.shape[1]))


def _experts_loop_fake(x_TD: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TD)


define_op("experts_loop", cpu=loop, cuda=loop, fake=_experts_loop_fake)
define_op("expert_outputs", cpu=_expert_outputs, cuda=_expert_outputs, fake=_expert_outputs_fake)
