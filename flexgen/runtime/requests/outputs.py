"""What a request returns, shaped as vLLM's outputs. Requests make them, callers read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from flexgen.errors import FlexgenError
from flexgen.runtime.requests.params import LoRARequest


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position. `rank` counts from 1, the most likely token's rank."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""By token id: the token itself first, then the most likely ones."""


def token_logprobs(
    chosen: tuple[int, float, int],
    top: tuple[Sequence[int], Sequence[float]],
    wanted: int,
    decode: Callable[[int], str | None],
) -> TokenLogprobs:
    """What is said of one position.

    chosen  the token, its logprob and rank
    top     ids and logprobs of the most likely tokens, of which the first `wanted` (-1: all) are listed
    decode  gives a token's text
    """
    token, logprob, rank = chosen
    entry = {token: Logprob(logprob, rank, decode(token))}
    listed = zip(*top) if wanted == -1 else islice(zip(*top), wanted)
    for place, (other, value) in enumerate(listed, start=1):
        if other != token:
            entry[other] = Logprob(value, place, decode(other))
    return entry


@dataclass
class CompletionOutput:
    """One answer. `logprobs[i]` belongs to `token_ids[i]`, and both include the eos or stop token that ended it.

    finish_reason  None while it grows, else "stop", "length", "abort" or "error"
    error          why it ended with "error", else None
    stop_reason    the stop string or stop token id; "timeout" for a request that ran out of time; None for eos
    routed_experts (tokens of prompt and answer - 1, routers, K) int16: the experts of each token that was computed, layer
                   after layer, best first; only once finished, where asked for. A router that chooses fewer than K: -1
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    routed_experts: np.ndarray | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """When what happened to a request. All but `arrival_time` are seconds of `time.monotonic`, 0 for what has not been yet.

    arrival_time  seconds since 1970
    queued_ts, scheduled_ts, first_token_ts, last_token_ts  it was queued, first ran, drew its first and its last token
    first_token_latency  seconds from queued to the first token
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class RequestOutput:
    """All answers to one prompt. `prompt_logprobs[0]` is None: nothing precedes the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    lora_request: LoRARequest | None = None
    metrics: RequestStateStats = field(default_factory=RequestStateStats)


class GenerationError(FlexgenError):
    """An answer that could not be finished. `outputs` are those of every prompt, the finished ones whole."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs
