"""What a request returns, shaped as vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    metrics: dict[str, float] = field(default_factory=dict)


class GenerationError(FlexgenError):
    """An answer that could not be finished. `outputs` are those of every prompt, the finished ones whole."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs
