"""The recurrent mixer of the gated delta net (Yang et al. 2024, arXiv:2412.06464): its short convolution and its rule, as generated
code calls them.

Rows address their state by slot. A step reads a row's state, runs the row's tokens and writes the state back; rows
never see each other, and a slot that no row names is neither read nor written. Slot 0 serves the padding rows, whose results
nobody reads: a kernel may leave them out.

Shape suffixes: T tokens, R rows, C channels, H key heads, V value heads, k and v their widths, c tokens of a chunk,
n chunks of a step.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from flexgen.contract.abi import Step
from flexgen.runtime.ops.elementwise import ACTIVATIONS
from flexgen.runtime.ops.library import define_op

CHUNK = 64
"""Tokens that the chunked rule takes at once."""


def causal_conv(u_TC: Tensor, weight_CK: Tensor, state: Tensor, step: Step, act: str | None = None) -> Tensor:
    """Depthwise causal convolution of each row's tokens, preceded by the row's state, then the activation if any; (T, C).

    state (slots, C, taps) keeps a row's last `taps` inputs and is updated. Sums are fp32, cast once before the activation.
    """
    return torch.ops.flexgen.causal_conv(u_TC, weight_CK, state, step.rows_T, step.starts_R, step.state_R, act)


def _causal_conv_cpu(
    u_TC: Tensor, weight_CK: Tensor, state: Tensor, rows_T: Tensor, starts_R: Tensor, state_R: Tensor, act: str | None
) -> Tensor:
    taps = weight_CK.shape[-1]
    rows_T, starts_R = rows_T.long(), starts_R.long()
    past_RCK = state[state_R]
    local_T = torch.arange(u_TC.shape[0], device=u_TC.device) - starts_R[rows_T]
    y_TC = torch.zeros_like(u_TC, dtype=torch.float32)
    for tap in range(taps):
        y_TC += _input_at(u_TC, past_RCK, rows_T, starts_R, local_T - (taps - 1 - tap)) * weight_CK[:, tap].float()
    counts_R = starts_R.diff()
    every_R = torch.arange(past_RCK.shape[0], device=u_TC.device)
    latest = [_input_at(u_TC, past_RCK, every_R, starts_R, counts_R - taps + tap) for tap in range(taps)]
    state[state_R] = torch.stack(latest, dim=-1)
    y_TC = y_TC.to(u_TC.dtype)
    return ACTIVATIONS[act](y_TC) if act else y_TC


def _input_at(u_TC: Tensor, past_RCK: Tensor, rows: Tensor, starts_R: Tensor, local: Tensor) -> Tensor:
    """The inputs of `rows` at positions `local` of this step; negative ones lie in the past, -1 the latest."""
    taps = past_RCK.shape[-1]
    now = u_TC[(starts_R[rows] + local).clamp(0, u_TC.shape[0] - 1)]
    before = past_RCK[rows, :, (local + taps).clamp(0, taps - 1)]
    return torch.where((local >= 0)[:, None], now, before)


def _causal_conv_cuda(
    u_TC: Tensor, weight_CK: Tensor, state: Tensor, rows_T: Tensor, starts_R: Tensor, state_R: Tensor, act: str | None
) -> Tensor:
    from flexgen.runtime.ops.kernels.causal_conv import causal_conv  # Triton is there where CUDA is

    return causal_conv(u_TC, weight_CK, state, rows_T, starts_R, state_R, act)


def _causal_conv_fake(u_TC: Tensor, *_: object) -> Tensor:
    return u_TC.new_empty(u_TC.shape)


define_op("causal_conv", cpu=_causal_conv_cpu, cuda=_causal_conv_cuda, fake=_causal_conv_fake, mutates=("state",))


def delta_rule(
    q_THk: Tensor, k_THk: Tensor, v_TVv: Tensor, g_TV: Tensor, beta_TV: Tensor, state: Tensor, step: Step
) -> Tensor:
    """The gated delta rule over each row's tokens, starting from and updating its state; (T, V, v) in v's dtype.

    S = exp(g) S; S += k beta (v - S^T k)^T; o = S^T q, in fp32, with q and k brought to unit length and q scaled by
    k's width ** -0.5 in here. Value head j reads key head j // (V / H).
    state (slots, V, k, v), in fp32 while it is here; g_TV fp32, the logarithm of the decay, <= 0; beta_TV in (0, 1).
    """
    return torch.ops.flexgen.delta_rule(
        q_THk, k_THk, v_TVv, g_TV, beta_TV, state, step.starts_R, step.state_R
    )


def _delta_rule_cpu(
    q_THk: Tensor,
    k_THk: Tensor,
    v_TVv: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    state: Tensor,
    starts_R: Tensor,
    state_R: Tensor,
) -> Tensor:
    """An opaque operator: how many chunks there are depends on the data."""
    inputs = (*_unit_heads(q_THk, k_THk, v_TVv.shape[1]), v_TVv.float(), g_TV.float(), beta_TV.float())
    if v_TVv.shape[0] == state_R.shape[0]:
        return recurrent_rule(*inputs, state, state_R).to(v_TVv.dtype)
    return chunked_rule(*inputs, state, starts_R, state_R).to(v_TVv.dtype)


def _delta_rule_fake(q_THk: Tensor, k_THk: Tensor, v_TVv: Tensor, *_: object) -> Tensor:
    return torch.empty_like(v_TVv)


def _delta_rule_cuda(
    q_THk: Tensor,
    k_THk: Tensor,
    v_TVv: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    state: Tensor,
    starts_R: Tensor,
    state_R: Tensor,
) -> Tensor:
    from flexgen.runtime.ops.kernels.delta_rule import delta_prefill, delta_step  # Triton is there where CUDA is

    inputs = (q_THk, k_THk, v_TVv, g_TV, beta_TV, state)
    decode = v_TVv.shape[0] == state_R.shape[0]
    return delta_step(*inputs, state_R) if decode else delta_prefill(*inputs, starts_R, state_R)


define_op("delta_rule", cpu=_delta_rule_cpu, cuda=_delta_rule_cuda, fake=_delta_rule_fake, mutates=("state",))


def _unit_heads(q_THk: Tensor, k_THk: Tensor, value_heads: int) -> tuple[Tensor, Tensor]:
    """q and k at unit length in fp32, q scaled, both repeated to the value heads."""
    group = value_heads // k_THk.shape[1]
    q_THk, k_THk = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q_THk.float(), k_THk.float()))
    q_THk = q_THk * q_THk.shape[-1] ** -0.5
    return q_THk.repeat_interleave(group, dim=1), k_THk.repeat_interleave(group, dim=1)


def recurrent_rule(
    q_RVk: Tensor, k_RVk: Tensor, v_RVv: Tensor, g_RV: Tensor, beta_RV: Tensor, state: Tensor, state_R: Tensor
) -> Tensor:
    """One token a row, all rows at once, the rule as it is written."""
    s_RVkv = state[state_R].to(v_RVv.dtype) * g_RV.exp()[..., None, None]
    seen_RVv = torch.einsum("rvkw,rvk->rvw", s_RVkv, k_RVk)
    change_RVv = (v_RVv - seen_RVv) * beta_RV[..., None]
    s_RVkv = s_RVkv + k_RVk[..., None] * change_RVv[..., None, :]
    state[state_R] = s_RVkv.to(state.dtype)
    return torch.einsum("rvkw,rvk->rvw", s_RVkv, q_RVk)


def chunked_rule(
    q_TVk: Tensor,
    k_TVk: Tensor,
    v_TVv: Tensor,
    g_TV: Tensor,
    beta_TV: Tensor,
    state: Tensor,
    starts_R: Tensor,
    state_R: Tensor,
) -> Tensor:
    """The rule in its parallel form: chunks of CHUNK tokens, solved at once, then one scan over a row's chunks.

    Inside a chunk all changes d solve (I + tril(beta k k^T decay, -1)) d = beta (v - decayed S^T k), which is linear in
    the state S that enters: d = values - keys S. Short chunks are padded with tokens that change nothing.
    """
    chunks = _Chunks(starts_R)
    q, k, v, g, beta = (chunks.split(x) for x in (q_TVk, k_TVk, v_TVv, g_TV[..., None], beta_TV[..., None]))
    decay = g.cumsum(dim=2)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay - decay.transpose(2, 3)).masked_fill(~causal, float("-inf")).exp()
    system = beta * (k @ k.transpose(2, 3)) * between
    right = torch.cat((beta * v, beta * k * decay.exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.transpose(2, 3)) * between
    q_in, k_out = q * decay.exp(), k * (decay[:, :, -1:] - decay).exp()
    through = decay[:, :, -1:].exp()
    s_RVkv = state[state_R].to(v_TVv.dtype)
    o_nVcv = torch.empty_like(v)
    for rows, at in chunks.scan():
        s = s_RVkv[rows]
        change = values[at] - keys[at] @ s
        o_nVcv[at] = q_in[at] @ s + scores[at] @ change
        s_RVkv[rows] = s * through[at] + k_out[at].transpose(2, 3) @ change
    state[state_R] = s_RVkv.to(state.dtype)
    return chunks.join(o_nVcv, v_TVv.shape[0])


class _Chunks:
    """Where the tokens of packed rows lie once each row is cut into chunks of CHUNK, the last one padded."""

    def __init__(self, starts_R: Tensor) -> None:
        starts = starts_R.tolist()
        self._device = starts_R.device
        self._chunks = [
            (row, index, begin, min(begin + CHUNK, stop))
            for row, (start, stop) in enumerate(pairwise(starts))
            for index, begin in enumerate(range(start, stop, CHUNK))
        ]
        self._places = torch.cat(
            [torch.arange(stop - begin) + n * CHUNK for n, (_, _, begin, stop) in enumerate(self._chunks)]
        ).to(self._device)

    def split(self, x: Tensor) -> Tensor:
        """(T, V, w) to (n, V, c, w), zeros where a chunk is short: zero k, beta and g change nothing."""
        chunked = x.new_zeros(len(self._chunks) * CHUNK, *x.shape[1:])
        chunked[self._places] = x[: len(self._places)]
        return chunked.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()

    def join(self, x_nVcw: Tensor, tokens: int) -> Tensor:
        """(n, V, c, w) to (T, V, w); tokens that no row owns are zeros."""
        packed = x_nVcw.transpose(1, 2).flatten(0, 1)[self._places]
        return F.pad(packed, (0, 0, 0, 0, 0, tokens - len(self._places)))

    def scan(self) -> list[tuple[Tensor, Tensor]]:
        """For the first, second, ... chunk of the rows that have one: (row indices, chunk indices)."""
        steps: list[tuple[list[int], list[int]]] = []
        for n, (row, index, _, _) in enumerate(self._chunks):
            if index == len(steps):
                steps.append(([], []))
            steps[index][0].append(row)
            steps[index][1].append(n)
        return [(torch.tensor(rows, device=self._device), torch.tensor(chunks, device=self._device)) for rows, chunks in steps]
