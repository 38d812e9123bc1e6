"""Logits to tokens and logprobs, in the order of vLLM's V1 sampler, one row a request. `DeviceStep.draw` calls `sample`.

fp32 logits -> bias and masks -> penalties -> temperature -> min_p -> top_k -> top_p -> one log-softmax, which the draw and
the returned logprobs share. Parameters lie in device tables indexed by slot, so a step is described by its slots alone.

Suffixes: R rows of the step, S slots (slot 0 is the pad slot), V vocabulary, K most likely tokens asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flexgen.runtime.requests.params import SamplingParams
from flexgen.runtime.requests.request import Request
from flexgen.runtime.sampling.randoms import exponential_noise
from flexgen.runtime.transfer import Download, upload

NEVER = float("-inf")

LogitsEdit = Callable[[Tensor], Tensor]
"""A host-side rule of a lock-step batch: (R, V) fp32 in and out."""

@dataclass(frozen=True)
class Features:
    """What the rows of a batch ask for together; each combination is one straight piece of code.

    A row's result does not depend on features that only its neighbours ask for.
    """

    random: bool = False
    truncates: bool = False
    min_p: bool = False
    penalises: bool = False
    biases: bool = False
    min_tokens: bool = False
    top_logprobs: int = 0

    @property
    def edits(self) -> bool:
        """Whether logits are changed before the last stage."""
        return self.penalises or self.biases or self.min_tokens or self.min_p or self.truncates

    @classmethod
    def of(cls, requests: Sequence[Request], vocab: int) -> Features:
        requests = list({id(request.params): request for request in requests}.values())  # most share one
        params = [request.params for request in requests]
        drawn = [p for p in params if not p.greedy]
        return cls(
            random=bool(drawn),
            truncates=any(p.top_k > 0 or p.top_p < 1 for p in drawn),
            min_p=any(p.min_p > 0 for p in drawn),
            penalises=any(p.penalises for p in params),
            biases=any(biases(request) for request in requests),
            min_tokens=any(p.min_tokens > 0 for p in params),
            top_logprobs=max((vocab if p.logprobs == -1 else p.logprobs or 0 for p in params), default=0),
        )


@dataclass
class Sampled:
    """One step's draws: tokens_R int64, logprobs_R fp32, ranks_R int64 (from 1), and the K most likely (R, K)."""

    tokens_R: Tensor
    logprobs_R: Tensor
    ranks_R: Tensor
    top_ids_RK: Tensor | None = None
    top_logprobs_RK: Tensor | None = None

    def download(self) -> Download:
        """The five of them, in this order, on their way to the host."""
        return Download((self.tokens_R, self.logprobs_R, self.ranks_R, self.top_ids_RK, self.top_logprobs_RK))


def biases(request: Request) -> bool:
    params = request.params
    return bool(params.logit_bias or request.banned_tokens) or params.allowed_token_ids is not None


class SamplingTables:
    """Sampling parameters on the device, by slot. Tables of (S, V) exist only once a request asks for them."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.slots, self.vocab, self.device = slots, vocab, device
        self.numbers_S6 = self._rows([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], torch.float32)
        self.integers_S3 = self._rows([0, 0, 0], torch.int64)
        self.bias_SV: Tensor | None = None
        self.early_SV: Tensor | None = None
        self.prompt_SV: Tensor | None = None
        self.counts_SV: Tensor | None = None

    def _rows(self, row: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(row, dtype=dtype, device=self.device).repeat(self.slots + 1, 1)

    def _wide(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros((self.slots + 1, self.vocab), dtype=dtype, device=self.device)

    def enter(self, requests: Sequence[Request]) -> None:
        """Write the parameters of requests that just got their slots."""
        integers = [
            (r.slot, 0 if r.params.greedy else max(r.params.top_k, 0), r.seed, len(r.prompt) + r.params.min_tokens)
            for r in requests
        ]
        integers_R4 = upload(integers, self.device)
        slots_R = integers_R4[:, 0]
        self.integers_S3[slots_R] = integers_R4[:, 1:]
        numbers = [_numbers(request.params) for request in requests]
        self.numbers_S6[slots_R] = upload(numbers, self.device, np.float32)
        for request in requests:
            self._enter_wide(request)

    def forget(self, slot: int) -> None:
        """Count none of the tokens that the slot has drawn."""
        if self.counts_SV is not None:
            self.counts_SV[slot] = 0

    def _enter_wide(self, request: Request) -> None:
        slot, params = request.slot, request.params
        if biases(request):
            if self.bias_SV is None:
                self.bias_SV = self._wide(torch.float32)
            self.bias_SV[slot] = self._bias_row(request)
        elif self.bias_SV is not None:
            self.bias_SV[slot] = 0
        if params.min_tokens:
            if self.early_SV is None:
                self.early_SV = self._wide(torch.bool)
            self.early_SV[slot] = False
            self.early_SV[slot, self._ids(request.stop_ids)] = True
        elif self.early_SV is not None:
            self.early_SV[slot] = False
        if params.penalises:
            if self.counts_SV is None or self.prompt_SV is None:
                self.counts_SV, self.prompt_SV = self._wide(torch.int32), self._wide(torch.bool)
            self.prompt_SV[slot] = False
            self.prompt_SV[slot, self._ids(request.prompt)] = True
            outputs = self._ids(request.outputs)
            self.counts_SV[slot] = 0
            self.counts_SV[slot].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def _bias_row(self, request: Request) -> Tensor:
        params, row = request.params, torch.zeros(self.vocab, device=self.device)
        if params.allowed_token_ids is not None:
            row.fill_(NEVER)
            row[self._ids(params.allowed_token_ids)] = 0
        if params.logit_bias:
            values = upload(list(params.logit_bias.values()), self.device, np.float32)
            row[self._ids(list(params.logit_bias))] += values
        row[self._ids(request.banned_tokens)] = NEVER
        return row

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return upload(list(ids), self.device)


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    drawn = (params.temperature, params.top_p, params.min_p)
    neutral = (0.0, 1.0, 0.0)
    return (
        *(neutral if params.greedy else drawn),
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def finish(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seeds_R: Tensor,
    lengths_R: Tensor,
    real_vocab: int,
    random: bool,
    divide: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The last stage: tokens (R,) int64, logprobs (R,) fp32, ranks (R,) int64 from 1.

    random  some rows draw (the others, of temperature 0, take the most likely token); divide: by the temperature first
    keep    also return all logprobs, (R, V) fp32
    """
    logits_RV = mask_padding(logits_RV.float(), real_vocab)
    if divide:
        logits_RV = warm(logits_RV, temperature_R)
    logprobs_RV = logits_RV.log_softmax(-1)
    tokens_R = logprobs_RV.argmax(-1)
    if random:
        noise_RV = exponential_noise(seeds_R, lengths_R, logprobs_RV.shape[1])
        tokens_R = torch.where(temperature_R > 0, (logprobs_RV - noise_RV.log()).argmax(-1), tokens_R)
    chosen_R1 = logprobs_RV.gather(1, tokens_R[:, None])
    ranks_R = (logprobs_RV > chosen_R1).sum(-1) + 1
    return tokens_R, chosen_R1[:, 0], ranks_R, logprobs_RV if keep else None


def finish_on(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """`finish` for tensors on `device`: on CUDA the kernel that stands for it."""
    if device.type != "cuda":
        return finish
    from flexgen.runtime.sampling import kernel  # Triton is there where CUDA is

    return kernel.finish


def sample(
    logits_RV: Tensor,
    slots_R: Tensor,
    lengths_R: Tensor,
    tables: SamplingTables,
    features: Features,
    real_vocab: int,
    raw: bool = False,
    mask: LogitsEdit | None = None,
    process: LogitsEdit | None = None,
) -> Sampled:
    """Draw one token a row. `lengths_R` (int64) is each request's length, the position that the token will take.

    Ids from `real_vocab` on have no token and a logprob of -inf. With `raw` the returned logprobs are those of the
    model's own logits; else (the default mode) exactly those that were drawn from. `mask` and `process` are the
    host-side rules of a lock-step batch. Tables are read, except the penalty counts, which take the new tokens.
    """
    numbers_R6, integers_R3 = tables.numbers_S6[slots_R], tables.integers_S3[slots_R]
    temperature_R, seeds_R = numbers_R6[:, 0], integers_R3[:, 1]
    model_RV = logits_RV
    if features.edits or mask or process:
        logits_RV = mask_padding(logits_RV.float(), real_vocab)
        logits_RV = mask(logits_RV) if mask else logits_RV
        logits_RV = _apply_bias(logits_RV, slots_R, lengths_R, integers_R3[:, 2], tables, features)
        logits_RV = process(logits_RV) if process else logits_RV
    if features.penalises:
        assert tables.prompt_SV is not None and tables.counts_SV is not None
        logits_RV = penalise(logits_RV, tables.prompt_SV[slots_R], tables.counts_SV[slots_R], *numbers_R6[:, 3:].T)
    divide = features.random
    if divide and (features.min_p or features.truncates):
        logits_RV, divide = warm(logits_RV, temperature_R), False
    if features.min_p:
        logits_RV = keep_min_p(logits_RV, numbers_R6[:, 2])
    if features.truncates:
        logits_RV = keep_top(logits_RV, integers_R3[:, 0], numbers_R6[:, 1])
    keep = features.top_logprobs > 0 and not raw
    last_stage = finish_on(logits_RV.device)
    tokens_R, logprobs_R, ranks_R, logprobs_RV = last_stage(
        logits_RV, temperature_R, seeds_R, lengths_R, real_vocab, features.random, divide, keep
    )
    if features.penalises:
        assert tables.counts_SV is not None
        tables.counts_SV.index_put_((slots_R, tokens_R), torch.ones_like(tokens_R, dtype=torch.int32), accumulate=True)
    if raw:
        sampled = describe(mask_padding(model_RV.float(), real_vocab).log_softmax(-1), tokens_R, features.top_logprobs)
        sampled.logprobs_R = torch.where(logprobs_R.isnan(), logprobs_R, sampled.logprobs_R)  # nothing could be drawn
        return sampled
    if logprobs_RV is None:
        return Sampled(tokens_R, logprobs_R, ranks_R, None, None)
    return Sampled(tokens_R, logprobs_R, ranks_R, *most_likely(logprobs_RV, features.top_logprobs))


def mask_padding(logits_RV: Tensor, real_vocab: int) -> Tensor:
    """-inf for ids that no token has."""
    if real_vocab == logits_RV.shape[1]:
        return logits_RV
    return logits_RV.masked_fill(torch.arange(logits_RV.shape[1], device=logits_RV.device) >= real_vocab, NEVER)


def warm(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Logits over their row's temperature; rows of temperature 0 as they are. fp32."""
    return logits_RV.float() / torch.where(temperature_R > 0, temperature_R, 1)[:, None]


def _apply_bias(
    logits_RV: Tensor,
    slots_R: Tensor,
    lengths_R: Tensor,
    earliest_R: Tensor,
    tables: SamplingTables,
    features: Features,
) -> Tensor:
    """logit_bias, allowed_token_ids and bad words of one token; then no stop token before min_tokens."""
    if features.biases:
        assert tables.bias_SV is not None
        logits_RV = logits_RV + tables.bias_SV[slots_R]
    if features.min_tokens:
        assert tables.early_SV is not None
        early_RV = tables.early_SV[slots_R] & (lengths_R < earliest_R)[:, None]
        logits_RV = logits_RV.masked_fill(early_RV, NEVER)
    return logits_RV


def penalise(
    logits_RV: Tensor, prompt_RV: Tensor, counts_RV: Tensor, repetition_R: Tensor, presence_R: Tensor, frequency_R: Tensor
) -> Tensor:
    """Repetition over prompt and output (divide what is positive, multiply the rest), the others over output alone."""
    seen_RV = prompt_RV | (counts_RV > 0)
    factor_RV = torch.where(seen_RV, repetition_R[:, None], 1)
    logits_RV = torch.where(logits_RV > 0, logits_RV / factor_RV, logits_RV * factor_RV)
    return logits_RV - frequency_R[:, None] * counts_RV - presence_R[:, None] * (counts_RV > 0)


def keep_min_p(logits_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Mask tokens whose probability is below min_p times that of the most likely one."""
    probs_RV = logits_RV.softmax(-1)
    limit_R1 = probs_RV.amax(-1, keepdim=True) * min_p_R[:, None]
    return logits_RV.masked_fill(probs_RV < limit_R1, NEVER)


def keep_top(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Keep the top_k most likely (0: all; ties at the limit stay), then the fewest of them that hold top_p.

    The most likely token always stays. Rows with top_k 0 and top_p 1 come back unchanged.
    """
    vocab = logits_RV.shape[1]
    sorted_RV, order_RV = logits_RV.sort(dim=-1, stable=True)
    kept_R = torch.where(top_k_R > 0, top_k_R, vocab).clamp(max=vocab)
    limit_R1 = sorted_RV.gather(1, (vocab - kept_R)[:, None])
    sorted_RV = sorted_RV.masked_fill(sorted_RV < limit_R1, NEVER)
    below_RV = sorted_RV.softmax(-1).cumsum(-1) <= 1 - top_p_R[:, None]
    below_RV &= (top_p_R < 1)[:, None]
    below_RV[:, -1] = False
    return torch.empty_like(sorted_RV).scatter_(1, order_RV, sorted_RV.masked_fill(below_RV, NEVER))


def describe(logprobs_RV: Tensor, tokens_R: Tensor, top: int) -> Sampled:
    """Logprob and rank of `tokens_R` in `logprobs_RV`, and the `top` most likely tokens of each row."""
    chosen_R1 = logprobs_RV.gather(1, tokens_R[:, None])
    ranks_R = (logprobs_RV > chosen_R1).sum(-1) + 1
    return Sampled(tokens_R, chosen_R1[:, 0], ranks_R, *(most_likely(logprobs_RV, top) if top else ()))


def most_likely(logprobs_RV: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Ids and logprobs of the `top` most likely tokens, (R, top)."""
    logprobs_RK, ids_RK = logprobs_RV.topk(min(top, logprobs_RV.shape[1]), dim=-1)
    return ids_RK, logprobs_RK
